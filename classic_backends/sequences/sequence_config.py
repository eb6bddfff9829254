"""The configuration of a stateful model: `sequence_batching` of its config, parsed.

Source: https://github.com/triton-inference-server/server/blob/main/docs/user_guide/batcher.md. Knows nothing of
requests.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from ...core.errors import InvalidArgument, Unsupported
from ...core.model import ModelConfig, RawConfig
from ...core.tensor import Tensor
from ..batching.batching_config import NS_PER_US, BatchingConfig, read_preferred_sizes
from .sequence_tensors import ControlTensor, StateTensor, read_controls, read_states

_DEFAULT_IDLE_US = 1_000_000


class SlotRules(NamedTuple):
    """The sequences that may be open on one instance, and how long each may be without a request.

    `fixed_rows` (the "direct" strategy): an open sequence has a row of the batch to itself.
    """

    slots_per_instance: int
    max_idle_ns: int = _DEFAULT_IDLE_US * NS_PER_US
    fixed_rows: bool = False


@dataclass(frozen=True, slots=True)
class SequenceConfig:
    """`batching` is for the next requests of the sequences on one instance."""

    slots: SlotRules
    batching: BatchingConfig
    controls: tuple[ControlTensor, ...] = ()
    states: tuple[StateTensor, ...] = ()


def read_sequence_config(config: ModelConfig, initial: Mapping[str, Tensor]) -> SequenceConfig | None:
    """Parse `sequence_batching`; None without it. `initial`: see `read_states`.

    Raises:
        InvalidArgument: values contradict each other; `field` names one of them.
        Unsupported: the config asks for what is not built.
    """
    if "sequence_batching" not in config.raw:
        return None
    asked: RawConfig = config.raw["sequence_batching"]
    _check_supported(config, asked)
    slots, batching = (_read_oldest if "oldest" in asked else _read_direct)(asked, config)
    idle = (int(asked.get("max_sequence_idle_microseconds", 0)) or _DEFAULT_IDLE_US) * NS_PER_US
    states = read_states(asked, initial, config.max_batch_size > 0)
    return SequenceConfig(SlotRules(slots, idle, "oldest" not in asked), batching, read_controls(asked), states)


def _check_supported(config: ModelConfig, asked: RawConfig) -> None:
    field = ""
    if asked.get("iterative_sequence"):
        field = "iterative_sequence"
        reason = "needs a backend that puts its requests back in the queue, and there is none here"
    elif config.decoupled and asked.get("state"):
        field, reason = "state", "cannot be carried on by a decoupled model"
    elif config.decoupled and config.max_batch_size > 1 and "oldest" not in asked:
        field, reason = "direct", "needs max_batch_size 0 or 1 for a decoupled model, which has no batches"
    if field:
        message = f"model '{config.name}': sequence batching {field} {reason}"
        raise Unsupported(message, field=f"sequence_batching.{field}")


def _read_oldest(sequence_batching: RawConfig, config: ModelConfig) -> tuple[int, BatchingConfig]:
    """The slots of an instance, and its batching."""
    asked: RawConfig = sequence_batching["oldest"]
    slots = int(asked.get("max_candidate_sequences", 0))
    if slots < 1:
        message = f"sequence batching max_candidate_sequences must be at least 1 for {config.name}, got {slots}"
        raise InvalidArgument(message, field="sequence_batching.oldest.max_candidate_sequences")
    return slots, BatchingConfig(
        combine_requests=config.max_batch_size > 0 and not config.decoupled,
        max_batch_size=max(config.max_batch_size, 1),
        preferred_sizes=read_preferred_sizes(asked, config.max_batch_size, "sequence_batching.oldest"),
        max_delay_ns=int(asked.get("max_queue_delay_microseconds", 0)) * NS_PER_US,
        preserve_ordering=bool(asked.get("preserve_ordering", False)),
    )


def _read_direct(sequence_batching: RawConfig, config: ModelConfig) -> tuple[int, BatchingConfig]:
    """The slots of an instance, and its batching. As in Triton, the delay has no effect without a minimum
    utilization."""
    asked: RawConfig = sequence_batching.get("direct", {})
    slots = max(config.max_batch_size, 1)
    utilization = float(asked.get("minimum_slot_utilization", 0))
    if not 0 <= utilization <= 1:
        name = "minimum_slot_utilization"
        message = f"sequence batching {name} must be in range [0.0, 1.0] for {config.name}, got {utilization}"
        raise InvalidArgument(message, field=f"sequence_batching.direct.{name}")
    delay = int(asked.get("max_queue_delay_microseconds", 0)) * NS_PER_US
    enough = max(1, ceil(round(utilization * slots, 4)))
    return slots, BatchingConfig(
        combine_requests=config.max_batch_size > 0 and not config.decoupled,
        max_batch_size=slots,
        preferred_sizes=range(enough, slots + 1) if utilization else (),
        max_delay_ns=delay if utilization else 0,
    )
