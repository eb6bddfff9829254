"""The rules of a model's queue, as its config writes them: model-config.md sections 4.1 to 4.3.

Knows nothing of requests. Times are nanoseconds here, microseconds in the config.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...core.errors import InvalidArgument
from ...core.model import ConfigDocument

_MICROSECOND = 1000


class QueuePolicy(NamedTuple):
    """What becomes of requests that wait, in one priority level.

    `timeout`: how long they may, 0 without end; then they are refused, or with `postpone` come after all others of
    their level. With `override` a request may shorten it. `max_size`: how many may wait, 0 any number.
    """

    timeout_ns: int = 0
    postpone: bool = False
    allow_override: bool = False
    max_size: int = 0

    def queue_deadline(self, arrived: int, asked: int) -> int | None:
        """When a request that asked for a timeout of `asked` (0: for none) has waited too long."""
        timeout = asked if self._shortened(asked) else self.timeout_ns
        return arrived + timeout if timeout else None

    def answer_deadline(self, arrived: int, asked: int) -> int | None:
        """When it must be answered, though it is executed by then: what a config alone says is for the queue."""
        return arrived + asked if self._shortened(asked) and not self.postpone else None

    def _shortened(self, asked: int) -> bool:
        return self.allow_override and 0 < asked < self.timeout_ns


NO_POLICY = QueuePolicy()
"""Wait without end, in any number."""


@dataclass(frozen=True, slots=True)
class BatchingConfig:
    """How requests become batches of at most `max_size`; where `combine` is false, each is a batch of its own.

    `preferred` sizes, in ascending order, leave at once; others wait until the oldest request has waited `max_delay`.
    `levels`: how many priority levels, 1 the highest. `ordered`: responses leave in the order in which requests came.
    """

    combine_requests: bool = False
    max_batch_size: int = 1
    preferred_sizes: Sequence[int] = ()
    max_delay_ns: int = 0
    preserve_ordering: bool = False
    priority_levels: int = 1
    default_level: int = 1
    policy: QueuePolicy = NO_POLICY
    policies: Mapping[int, QueuePolicy] = field(default_factory=dict)

    @property
    def target_size(self) -> int:
        """No batch waits for more than this."""
        return self.preferred_sizes[-1] if self.preferred_sizes else self.max_batch_size

    @property
    def can_reorder(self) -> bool:
        """A request that comes may be served before one that is there already."""
        return self.priority_levels > 1 or self.policy_of(1).postpone

    @property
    def work_per_instance(self) -> int:
        """How much of a backlog keeps one instance busy."""
        return self.target_size if self.combine_requests else 1

    def level_of(self, priority: int) -> int:
        """The level of a request that asked for `priority`; 0, or one that there is not, means the default."""
        return priority if 1 <= priority <= self.priority_levels else self.default_level

    def policy_of(self, level: int) -> QueuePolicy:
        return self.policies.get(level, self.policy)


def read_batching_config(document: ConfigDocument, max_batch_size: int, decoupled: bool) -> BatchingConfig:
    """The rules of the model with this config; without `dynamic_batching`, Triton's default scheduler.

    Raises:
        InvalidArgument: they contradict each other; `field` names the culprit.
    """
    if "dynamic_batching" not in document:
        return BatchingConfig()
    asked: ConfigDocument = document["dynamic_batching"]
    levels = int(asked.get("priority_levels", 0))
    policies = {int(level): _policy(policy) for level, policy in asked.get("priority_queue_policy", {}).items()}
    rules = BatchingConfig(
        combine_requests=max_batch_size > 0 and not decoupled,
        max_batch_size=max(max_batch_size, 1),
        preferred_sizes=preferred_sizes(asked, max_batch_size, "dynamic_batching"),
        max_delay_ns=int(asked.get("max_queue_delay_microseconds", 0)) * _MICROSECOND,
        preserve_ordering=bool(asked.get("preserve_ordering", False)),
        priority_levels=max(levels, 1),
        default_level=int(asked.get("default_priority_level", 0)) if levels else 1,
        policy=_policy(asked.get("default_queue_policy", {})),
        policies=policies,
    )
    _check(rules)
    return rules


def preferred_sizes(asked: ConfigDocument, max_batch_size: int, field: str) -> tuple[int, ...]:
    """Of the batcher in the `field` of a config, ascending. Raises `InvalidArgument` for one that no batch has."""
    sizes = tuple(sorted({int(size) for size in asked.get("preferred_batch_size", ())}))
    for size in sizes:
        if size < 1 or size > max(max_batch_size, 1):
            batcher = field.partition(".")[0].replace("_", " ")
            message = f"{batcher} preferred size must be between 1 and max_batch_size {max_batch_size}, got {size}"
            raise InvalidArgument(message, field=f"{field}.preferred_batch_size")
    return sizes


def _policy(asked: ConfigDocument) -> QueuePolicy:
    return QueuePolicy(
        timeout_ns=int(asked.get("default_timeout_microseconds", 0)) * _MICROSECOND,
        postpone=asked.get("timeout_action", "REJECT") == "DELAY",
        allow_override=bool(asked.get("allow_timeout_override", False)),
        max_size=int(asked.get("max_queue_size", 0)),
    )


def _check(rules: BatchingConfig) -> None:
    if not 1 <= rules.default_level <= rules.priority_levels:
        message = f"default priority level must be in range [1, {rules.priority_levels}], got {rules.default_level}"
        raise InvalidArgument(message, field="dynamic_batching.default_priority_level")
    for level in rules.policies:
        if not 1 <= level <= rules.priority_levels:
            there = f"there are {rules.priority_levels} priority levels"
            message = f"priority queue policy is given for level {level}, but {there}"
            raise InvalidArgument(message, field="dynamic_batching.priority_queue_policy")
    if rules.preserve_ordering and rules.can_reorder:
        message = "preserve_ordering allows only one priority level and no timeout_action DELAY"
        raise InvalidArgument(message, field="dynamic_batching.preserve_ordering")
