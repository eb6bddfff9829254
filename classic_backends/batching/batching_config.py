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

    timeout: int = 0
    postpone: bool = False
    override: bool = False
    max_size: int = 0

    def deadline(self, arrived: int, asked: int) -> int | None:
        """When a request that asked for a timeout of `asked` (0: for none) has waited too long."""
        timeout = asked if self._shortened(asked) else self.timeout
        return arrived + timeout if timeout else None

    def limit(self, arrived: int, asked: int) -> int | None:
        """When it must be answered, though it is executed by then: what a config alone says is for the queue."""
        return arrived + asked if self._shortened(asked) and not self.postpone else None

    def _shortened(self, asked: int) -> bool:
        return self.override and 0 < asked < self.timeout


NO_POLICY = QueuePolicy()
"""Wait without end, in any number."""


@dataclass(frozen=True, slots=True)
class BatchingConfig:
    """How requests become batches of at most `max_size`; where `combine` is false, each is a batch of its own.

    `preferred` sizes, in ascending order, leave at once; others wait until the oldest request has waited `max_delay`.
    `levels`: how many priority levels, 1 the highest. `ordered`: responses leave in the order in which requests came.
    """

    combine: bool = False
    max_size: int = 1
    preferred: Sequence[int] = ()
    max_delay: int = 0
    ordered: bool = False
    levels: int = 1
    default_level: int = 1
    policy: QueuePolicy = NO_POLICY
    policies: Mapping[int, QueuePolicy] = field(default_factory=dict)

    @property
    def largest(self) -> int:
        """No batch waits for more than this."""
        return self.preferred[-1] if self.preferred else self.max_size

    @property
    def reorders(self) -> bool:
        """A request that comes may be served before one that is there already."""
        return self.levels > 1 or self.policy_of(1).postpone

    @property
    def portion(self) -> int:
        """How much of a backlog keeps one instance busy."""
        return self.largest if self.combine else 1

    def level_of(self, priority: int) -> int:
        """The level of a request that asked for `priority`; 0, or one that there is not, means the default."""
        return priority if 1 <= priority <= self.levels else self.default_level

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
        combine=max_batch_size > 0 and not decoupled,
        max_size=max(max_batch_size, 1),
        preferred=preferred_sizes(asked, max_batch_size, "dynamic_batching"),
        max_delay=int(asked.get("max_queue_delay_microseconds", 0)) * _MICROSECOND,
        ordered=bool(asked.get("preserve_ordering", False)),
        levels=max(levels, 1),
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
        timeout=int(asked.get("default_timeout_microseconds", 0)) * _MICROSECOND,
        postpone=asked.get("timeout_action", "REJECT") == "DELAY",
        override=bool(asked.get("allow_timeout_override", False)),
        max_size=int(asked.get("max_queue_size", 0)),
    )


def _check(rules: BatchingConfig) -> None:
    if not 1 <= rules.default_level <= rules.levels:
        message = f"default priority level must be in range [1, {rules.levels}], got {rules.default_level}"
        raise InvalidArgument(message, field="dynamic_batching.default_priority_level")
    for level in rules.policies:
        if not 1 <= level <= rules.levels:
            message = f"priority queue policy is given for level {level}, but there are {rules.levels} priority levels"
            raise InvalidArgument(message, field="dynamic_batching.priority_queue_policy")
    if rules.ordered and rules.reorders:
        message = "preserve_ordering allows only one priority level and no timeout_action DELAY"
        raise InvalidArgument(message, field="dynamic_batching.preserve_ordering")
