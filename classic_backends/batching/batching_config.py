"""How a model's config says that requests become batches, parsed: `dynamic_batching`, and for ragged batches
`batch_input` and `batch_output`.

Requests of different shapes share a ragged batch as one flat tensor; a batch input tells the model the place of each
request's elements. Sources: https://github.com/triton-inference-server/server/blob/main/docs/user_guide/batcher.md and
https://github.com/triton-inference-server/server/blob/main/docs/user_guide/ragged_batching.md. Times are nanoseconds
here, microseconds in the config. Knows nothing of requests.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.errors import InvalidArgument
from ...core.model import RawConfig
from ..signature import Shape

NS_PER_US = 1000


class QueuePolicy(NamedTuple):
    """The limits of one priority level. A request may wait for `timeout_ns` (0: for ever); then it is rejected or, with
    `postpone`, served after all others of its level. With `allow_override` a request may ask for a shorter timeout.
    `max_size`: requests that may wait, 0 for any number."""

    timeout_ns: int = 0
    postpone: bool = False
    allow_override: bool = False
    max_size: int = 0

    def queue_deadline(self, arrived_at: int, asked_ns: int) -> int | None:
        """The time until which a request may wait that asked for a timeout of `asked_ns` (0: for none)."""
        timeout = asked_ns if self._shortens(asked_ns) else self.timeout_ns
        return arrived_at + timeout if timeout else None

    def answer_deadline(self, arrived_at: int, asked_ns: int) -> int | None:
        """The time until which a request must be answered. Only a request's own timeout sets one: the config's is for
        the time in the queue."""
        return arrived_at + asked_ns if self._shortens(asked_ns) and not self.postpone else None

    def _shortens(self, asked_ns: int) -> bool:
        return self.allow_override and 0 < asked_ns < self.timeout_ns


NO_POLICY = QueuePolicy()
"""Any number of requests, each for any time."""


@dataclass(frozen=True, slots=True)
class BatchingConfig:
    """How requests become batches of at most `max_batch_size`; without `combine_requests`, each is a batch of its own.
    Batches of `preferred_sizes` (ascending) leave at once, others when the oldest request has waited `max_delay_ns`.
    Priority levels run from 1, the highest, to `priority_levels`. With `preserve_ordering` responses leave in the order
    of their requests."""

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
        """The size at which a batch waits no longer."""
        return self.preferred_sizes[-1] if self.preferred_sizes else self.max_batch_size

    @property
    def can_reorder(self) -> bool:
        """Whether a request may be served before one that came earlier."""
        return self.priority_levels > 1 or self.policy_of(1).postpone

    def level_of(self, priority: int) -> int:
        """The level of a request that asked for `priority`; 0 and unknown levels mean the default."""
        return priority if 1 <= priority <= self.priority_levels else self.default_level

    def policy_of(self, level: int) -> QueuePolicy:
        return self.policies.get(level, self.policy)


def read_batching_config(raw: RawConfig, max_batch_size: int, combines: bool) -> BatchingConfig:
    """Parse `dynamic_batching` of a model's config; without it, requests are not combined (Triton's default scheduler),
    nor if the model never `combines` them. Raises `InvalidArgument` if the values contradict each other; `field` names
    one of them."""
    if "dynamic_batching" not in raw:
        return BatchingConfig()
    asked: RawConfig = raw["dynamic_batching"]
    levels = int(asked.get("priority_levels", 0))
    config = BatchingConfig(
        combine_requests=max_batch_size > 0 and combines,
        max_batch_size=max(max_batch_size, 1),
        preferred_sizes=read_preferred_sizes(asked, max_batch_size, "dynamic_batching"),
        max_delay_ns=int(asked.get("max_queue_delay_microseconds", 0)) * NS_PER_US,
        preserve_ordering=bool(asked.get("preserve_ordering", False)),
        priority_levels=max(levels, 1),
        default_level=int(asked.get("default_priority_level", 0)) if levels else 1,
        policy=_read_policy(asked.get("default_queue_policy", {})),
        policies={int(level): _read_policy(each) for level, each in asked.get("priority_queue_policy", {}).items()},
    )
    _check_levels(config)
    return config


def read_preferred_sizes(asked: RawConfig, max_batch_size: int, field: str) -> tuple[int, ...]:
    """`preferred_batch_size` in ascending order; `field` is the path of `asked` in the config. Raises `InvalidArgument`
    if no batch can have one of the sizes."""
    sizes = tuple(sorted({int(size) for size in asked.get("preferred_batch_size", ())}))
    for size in sizes:
        if size < 1 or size > max(max_batch_size, 1):
            batcher = field.partition(".")[0].replace("_", " ")
            message = f"{batcher} preferred size must be between 1 and max_batch_size {max_batch_size}, got {size}"
            raise InvalidArgument(message, field=f"{field}.preferred_batch_size")
    return sizes


def _read_policy(asked: RawConfig) -> QueuePolicy:
    return QueuePolicy(
        timeout_ns=int(asked.get("default_timeout_microseconds", 0)) * NS_PER_US,
        postpone=asked.get("timeout_action", "REJECT") == "DELAY",
        allow_override=bool(asked.get("allow_timeout_override", False)),
        max_size=int(asked.get("max_queue_size", 0)),
    )


def _check_levels(config: BatchingConfig) -> None:
    levels, field = config.priority_levels, ""
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


_TYPES = {"TYPE_INT32": np.int32, "TYPE_FP32": np.float32}


def _element_counts(shapes: Sequence[Shape]) -> NDArray[Any]:
    return np.array([np.prod(shape, dtype=np.int64) for shape in shapes], np.int64)


def _item_shapes(shapes: Sequence[Shape]) -> NDArray[Any]:
    """[items of the batch, dims of one]"""
    return np.array([shape[1:] for shape in shapes for _ in range(shape[0])], np.int64)


_KINDS: dict[str, Callable[[Sequence[Shape]], NDArray[Any]]] = {
    "BATCH_ELEMENT_COUNT": _element_counts,
    "BATCH_ACCUMULATED_ELEMENT_COUNT": lambda shapes: np.cumsum(_element_counts(shapes)),
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": lambda shapes: np.cumsum([0, *_element_counts(shapes)]),
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": lambda shapes: np.zeros(int(_element_counts(shapes).max()), np.int64),
    "BATCH_ITEM_SHAPE": _item_shapes,
    "BATCH_ITEM_SHAPE_FLATTEN": lambda shapes: _item_shapes(shapes).ravel(),
}


class BatchInput(NamedTuple):
    """A tensor `name` made from the shapes (with batch dimension) of the input `source` in each request."""

    name: str
    shape_kind: str
    source: str
    dtype: Any

    def build(self, shapes: Sequence[Shape]) -> NDArray[Any]:
        return _KINDS[self.shape_kind](shapes).astype(self.dtype)


class RaggedConfig(NamedTuple):
    """`outputs`: an output's name -> the input whose shape each request's part of it has."""

    inputs: tuple[BatchInput, ...] = ()
    outputs: Mapping[str, str] = {}


def read_ragged_config(raw: RawConfig) -> RaggedConfig:
    """Parse `batch_input` and `batch_output`. Raises `InvalidArgument` if a kind, type or source is unknown; `field`
    names it."""
    names = {each["name"] for each in raw.get("input", ())}
    inputs: list[BatchInput] = []
    for asked in raw.get("batch_input", ()):
        kind, datatype = asked.get("kind", "BATCH_ELEMENT_COUNT"), asked.get("data_type")
        if kind not in _KINDS:
            raise InvalidArgument(f"unknown kind of batch input '{kind}'", field="batch_input.kind")
        if datatype not in _TYPES:
            raise InvalidArgument("a batch input must be of TYPE_INT32 or TYPE_FP32", field="batch_input.data_type")
        source = _read_source(asked, names, "batch_input")
        inputs += (BatchInput(name, kind, source, _TYPES[datatype]) for name in asked.get("target_name", ()))
    outputs: dict[str, str] = {}
    for asked in raw.get("batch_output", ()):
        outputs |= dict.fromkeys(asked.get("target_name", ()), _read_source(asked, names, "batch_output"))
    return RaggedConfig(tuple(inputs), outputs)


def _read_source(asked: RawConfig, names: set[str], field: str) -> str:
    sources = asked.get("source_input", ())
    if len(sources) != 1 or sources[0] not in names:
        message = f"'{field}' needs one source_input that is an input of the model, got {list(sources)}"
        raise InvalidArgument(message, field=f"{field}.source_input")
    return str(sources[0])
