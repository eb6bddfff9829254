"""The rules of a stateful model, as its config writes them: model-config.md section 4.4.

Knows nothing of tensors and requests. Times are nanoseconds here, microseconds in the config.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from ...core.errors import InvalidArgument, Unsupported
from ...core.model import ConfigDocument, ModelConfig
from ...core.tensor import Tensor
from ..batching.batching_config import BatchingConfig, preferred_sizes
from .sequence_tensors import ControlTensor, StateTensor, read_controls, read_states

_MICROSECOND = 1000
_DEFAULT_IDLE = 1_000_000


class SlotRules(NamedTuple):
    """How many sequences may be open at a time on one instance, and how long each may be `idle`. `pinned`: a sequence
    has a row of the batch to itself as long as it is open, whoever else is in the batch."""

    slots_per_instance: int
    max_idle_ns: int = _DEFAULT_IDLE * _MICROSECOND
    fixed_rows: bool = False


@dataclass(frozen=True, slots=True)
class SequenceConfig:
    """How the requests of sequences reach a model. `batching`: of the next request of each open sequence of an
    instance."""

    slots: SlotRules
    batching: BatchingConfig
    controls: tuple[ControlTensor, ...] = ()
    states: tuple[StateTensor, ...] = ()


def read_sequence_config(config: ModelConfig, initial: Mapping[str, Tensor]) -> SequenceConfig | None:
    """The rules of the model with this config; None without `sequence_batching`. `initial`: see `read_states`.

    Raises:
        InvalidArgument: they contradict each other; `field` names the culprit.
        Unsupported: they want what is not served.
    """
    if "sequence_batching" not in config.document:
        return None
    asked: ConfigDocument = config.document["sequence_batching"]
    _check_served(config, asked)
    idle = (int(asked.get("max_sequence_idle_microseconds", 0)) or _DEFAULT_IDLE) * _MICROSECOND
    if "oldest" in asked:
        seats, batching = _oldest(asked["oldest"], config)
    else:
        seats, batching = _direct(asked.get("direct", {}), config)
    states = read_states(asked, initial, config.max_batch_size > 0)
    return SequenceConfig(SlotRules(seats, idle, "oldest" not in asked), batching, read_controls(asked), states)


def _check_served(config: ModelConfig, asked: ConfigDocument) -> None:
    wrong = "", ""
    if asked.get("iterative_sequence"):
        wrong = "iterative_sequence", "needs a backend that puts its requests back in the queue, and there is none here"
    elif config.decoupled and asked.get("state"):
        wrong = "state", "cannot be carried on by a decoupled model"
    elif config.decoupled and config.max_batch_size > 1 and "oldest" not in asked:
        wrong = "direct", "needs max_batch_size 0 or 1 for a decoupled model, which has no batches"
    if wrong[0]:
        raise Unsupported(
            f"model '{config.name}': sequence batching {' '.join(wrong)}", field=f"sequence_batching.{wrong[0]}"
        )


def _oldest(asked: ConfigDocument, config: ModelConfig) -> tuple[int, BatchingConfig]:
    seats = int(asked.get("max_candidate_sequences", 0))
    if seats < 1:
        field = "sequence_batching.oldest.max_candidate_sequences"
        message = f"sequence batching max_candidate_sequences must be at least 1 for {config.name}, got {seats}"
        raise InvalidArgument(message, field=field)
    return seats, BatchingConfig(
        combine_requests=config.max_batch_size > 0 and not config.decoupled,
        max_batch_size=max(config.max_batch_size, 1),
        preferred_sizes=preferred_sizes(asked, config.max_batch_size, "sequence_batching.oldest"),
        max_delay_ns=int(asked.get("max_queue_delay_microseconds", 0)) * _MICROSECOND,
        preserve_ordering=bool(asked.get("preserve_ordering", False)),
    )


def _direct(asked: ConfigDocument, config: ModelConfig) -> tuple[int, BatchingConfig]:
    """Triton heeds the delay only together with a least utilization."""
    seats = max(config.max_batch_size, 1)
    part = float(asked.get("minimum_slot_utilization", 0))
    if not 0 <= part <= 1:
        field = "sequence_batching.direct.minimum_slot_utilization"
        message = (
            f"sequence batching minimum_slot_utilization must be in range [0.0, 1.0] for {config.name}, got {part}"
        )
        raise InvalidArgument(message, field=field)
    delay = int(asked.get("max_queue_delay_microseconds", 0)) * _MICROSECOND if part else 0
    enough = max(1, ceil(round(part * seats, 4)))
    return seats, BatchingConfig(
        combine_requests=config.max_batch_size > 0 and not config.decoupled,
        max_batch_size=seats,
        preferred_sizes=range(enough, seats + 1) if part else (),
        max_delay_ns=delay,
    )
