"""`dynamic_batching` of a model's config, parsed: how requests become batches, and how long each may wait.

Source: https://github.com/triton-inference-server/server/blob/main/docs/user_guide/batcher.md. Times are nanoseconds
here and microseconds in the config.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...core.errors import InvalidArgument
from ...core.model import RawConfig

NS_PER_US = 1000


class QueuePolicy(NamedTuple):
    """The limits of one priority level. A request may wait for `timeout_ns` (0: for ever); then it is rejected or, with
    `postpone`, served after all others of its level. With `allow_override` a request may ask for a shorter timeout.
    `max_size`: requests that may wait, 0 for any number."""

    timeout_ns: int = 0
    postpone: bool = False
    allow_override: bool = False
    max_size: int = 0

    def queue_deadline(self, arrived_at: int, requested_ns: int) -> int | None:
        """The time until which a request may wait that asked for a timeout of `requested_ns` (0: for none)."""
        timeout = requested_ns if self._shortens(requested_ns) else self.timeout_ns
        return arrived_at + timeout if timeout else None

    def answer_deadline(self, arrived_at: int, requested_ns: int) -> int | None:
        """The time until which a request must be answered. Only a request's own timeout sets one: the config's is for
        the time in the queue."""
        return arrived_at + requested_ns if self._shortens(requested_ns) and not self.postpone else None

    def _shortens(self, requested_ns: int) -> bool:
        return self.allow_override and 0 < requested_ns < self.timeout_ns


NO_POLICY = QueuePolicy()
"""Any number of requests, each for any time."""


@dataclass(frozen=True, slots=True)
class BatchingConfig:
    """How the requests of one model become batches, and in which order."""

    combine_requests: bool = False
    """Without it, each request is a batch of its own."""
    max_batch_size: int = 1
    preferred_sizes: Sequence[int] = ()
    """In ascending order: batches of these sizes leave at once."""
    max_delay_ns: int = 0
    """Batches of other sizes leave when their oldest request has waited as long."""
    preserve_ordering: bool = False
    """Responses leave in the order of their requests."""
    priority_levels: int = 1
    """Levels run from 1, the highest, to this one."""
    default_level: int = 1
    """The level of requests that ask for none, or for one that does not exist."""
    policy: QueuePolicy = NO_POLICY
    """The policy of levels that `policies` does not have."""
    policies: Mapping[int, QueuePolicy] = field(default_factory=dict)

    @property
    def target_size(self) -> int:
        """The size at which a batch waits no longer."""
        return self.preferred_sizes[-1] if self.preferred_sizes else self.max_batch_size

    @property
    def can_reorder(self) -> bool:
        """Whether a request may be served before one that came earlier."""
        return self.priority_levels > 1 or self.policy_of(1).postpone

    def level_of(self, priority: int) -> int:
        """The level of a request that asked for `priority`."""
        return priority if 1 <= priority <= self.priority_levels else self.default_level

    def policy_of(self, level: int) -> QueuePolicy:
        return self.policies.get(level, self.policy)


def read_batching_config(raw: RawConfig, max_batch_size: int, combines: bool) -> BatchingConfig:
    """Parse `dynamic_batching` of a model's config; without it, requests are not combined (Triton's default scheduler),
    nor if the model never `combines` them. Raises `InvalidArgument` if the values contradict each other; `field` names
    one of them."""
    if "dynamic_batching" not in raw:
        return BatchingConfig()
    batching: RawConfig = raw["dynamic_batching"]
    levels = int(batching.get("priority_levels", 0))
    policies: RawConfig = batching.get("priority_queue_policy", {})
    config = BatchingConfig(
        combine_requests=max_batch_size > 0 and combines,
        max_batch_size=max(max_batch_size, 1),
        preferred_sizes=read_preferred_sizes(batching, max_batch_size, "dynamic_batching"),
        max_delay_ns=int(batching.get("max_queue_delay_microseconds", 0)) * NS_PER_US,
        preserve_ordering=bool(batching.get("preserve_ordering", False)),
        priority_levels=max(levels, 1),
        default_level=int(batching.get("default_priority_level", 0)) if levels else 1,
        policy=_read_policy(batching.get("default_queue_policy", {})),
        policies={int(level): _read_policy(policy) for level, policy in policies.items()},
    )
    _check_levels(config)
    return config


def read_preferred_sizes(rules: RawConfig, max_batch_size: int, field: str) -> tuple[int, ...]:
    """`preferred_batch_size` in ascending order; `field` is the path of `rules` in the config. Raises `InvalidArgument`
    if no batch can have one of the sizes."""
    sizes = tuple(sorted({int(size) for size in rules.get("preferred_batch_size", ())}))
    for size in sizes:
        if size < 1 or size > max(max_batch_size, 1):
            batcher = field.partition(".")[0].replace("_", " ")
            message = f"{batcher} preferred size must be between 1 and max_batch_size {max_batch_size}, got {size}"
            raise InvalidArgument(message, field=f"{field}.preferred_batch_size")
    return sizes


def _read_policy(policy: RawConfig) -> QueuePolicy:
    return QueuePolicy(
        timeout_ns=int(policy.get("default_timeout_microseconds", 0)) * NS_PER_US,
        postpone=policy.get("timeout_action", "REJECT") == "DELAY",
        allow_override=bool(policy.get("allow_timeout_override", False)),
        max_size=int(policy.get("max_queue_size", 0)),
    )


def _check_levels(config: BatchingConfig) -> None:
    levels = config.priority_levels
    field = ""
    if not 1 <= config.default_level <= levels:
        field = "default_priority_level"
        message = f"default priority level must be in range [1, {levels}], got {config.default_level}"
    elif unknown := [level for level in config.policies if not 1 <= level <= levels]:
        field = "priority_queue_policy"
        message = f"priority queue policy is given for level {unknown[0]}, but there are {levels} priority levels"
    elif config.preserve_ordering and config.can_reorder:
        field = "preserve_ordering"
        message = "preserve_ordering allows only one priority level and no timeout_action DELAY"
    if field:
        raise InvalidArgument(message, field=f"dynamic_batching.{field}")
