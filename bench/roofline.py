"""The highest rate at which a machine can generate, from a model's shape and the machine's measured limits.

Knows dense decoders alone, and neither torch nor clocks. Not counted: the arithmetic of attention, norms and sampling,
so a long context shows a lower share of the limit than a short one.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from ..core.errors import InvalidArgument
from ..engine.checkpoint.model_spec import LayerAttention, ModelSpec

Precision: TypeAlias = Literal["bf16", "fp16", "fp32", "int8", "int4"]
"""What weights are computed with."""

WEIGHT_BYTES: dict[Precision, float] = {"bf16": 2, "fp16": 2, "fp32": 4, "int8": 1, "int4": 0.9 * 0.5625 + 0.1}
"""Of a weight in the layers: of int4 a tenth stays at 8 bits, and 32 share a scale of two bytes."""

_HEAD_BYTES: dict[Precision, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "int8": 1, "int4": 1}
_KV_BYTES: dict[Precision, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "int8": 2, "int4": 2}
"""Quantised weights leave the cache as it was."""
_SCALE_BYTES = 4
"""A cache in int8 or fp8 has a scale for each token and head."""
_STATE_ITEMSIZE = 2
"""Of what convolutions keep; matrices are float32 whatever weights are."""
_STATE_PASSES = 4
"""Multiplications for each number of a state's matrices and token: it decays, is read, corrected, and read again."""


class OfflineJob(NamedTuple):
    """`sequences` submitted at once, each of `prompt` tokens with `new` tokens to come."""

    sequences: int
    prompt: int
    new: int


class MachinePeaks(NamedTuple):
    """Bytes a second it reads, and operations a second of its best matrix product in the precision asked for."""

    read: float
    peak: float


@dataclass(frozen=True, slots=True)
class ModelDemand:
    """The work of one token: multiplications in the layers and in the head, and bytes."""

    layers: int
    head: int
    weight_bytes: int
    windows: tuple[int | None, ...]
    """The tokens that each layer that attends sees, None for all."""
    kv_bytes: tuple[int, ...]
    """Of a token's keys and values, as each of these layers reads them."""
    token_bytes: int = 0
    """Of a token's keys and values, all that are kept."""
    state_bytes: int = 0
    """Of the states of a sequence, which every step reads and writes."""

    @classmethod
    def of(cls, spec: ModelSpec, precision: Precision, kv_cache_dtype: str = "auto") -> "ModelDemand":
        """With a cache of that `CacheConfig.dtype`.

        Raises:
            InvalidArgument: a mixture of experts, whose demand depends on what its router chooses.
        """
        if spec.experts is not None:
            raise InvalidArgument(f"{spec.architecture}: limits are known for dense models only")
        head = spec.hidden_size * spec.vocab_size
        weights = spec.mixer_weights + spec.feed_forward_weights
        states = [state for state in spec.states if state is not None]
        matrices = sum(state.heads * state.rows * state.columns for state in states)
        plain = kv_cache_dtype == "auto"
        number_bytes, scale_bytes = (_KV_BYTES[precision], 0) if plain else (1, _SCALE_BYTES)

        def kept_bytes(kind: LayerAttention) -> int:
            shape = spec.kept(kind)
            return shape.numbers * number_bytes + 2 * shape.heads * scale_bytes

        attending = [kind for kind in spec.attention if kind is not None]
        return cls(
            layers=weights + _STATE_PASSES * matrices,
            head=head,
            weight_bytes=int(weights * WEIGHT_BYTES[precision]) + head * _HEAD_BYTES[precision],
            windows=tuple(kind.window for kind in attending),
            kv_bytes=tuple(kept_bytes(kind) for kind in attending),
            token_bytes=sum(kept_bytes(kind) for kind in spec.cached_attention),
            state_bytes=sum(state.bytes(_STATE_ITEMSIZE) for state in states),
        )

    def context_bytes(self, tokens: int) -> int:
        """Bytes of keys, values and states that the next token of a sequence of so many tokens reads and writes."""
        layers = zip(self.windows, self.kv_bytes, strict=True)
        return sum(min(tokens, window or tokens) * token for window, token in layers) + 2 * self.state_bytes

    def prompt_ops(self, job: OfflineJob) -> int:
        """Operations of all prompts; only the last token of each goes through the head."""
        return 2 * job.sequences * (job.prompt * self.layers + self.head)

    def decode_ops(self, job: OfflineJob) -> int:
        """Operations of one decode step."""
        return 2 * job.sequences * (self.layers + self.head)


def least_seconds(demand: ModelDemand, job: OfflineJob, machine: MachinePeaks) -> float:
    """The least time a job takes: prompts at the peak, then each decode step as long as its reading or its arithmetic
    takes, whichever is longer. The first new token of each sequence comes with its prompt."""
    arithmetic = demand.decode_ops(job) / machine.peak
    decode = sum(
        max((demand.weight_bytes + job.sequences * demand.context_bytes(context)) / machine.read, arithmetic)
        for context in range(job.prompt + 1, job.prompt + job.new)
    )
    return demand.prompt_ops(job) / machine.peak + decode


def roofline_speed(demand: ModelDemand, job: OfflineJob, machine: MachinePeaks) -> float:
    """Output tokens a second at best."""
    return job.sequences * job.new / least_seconds(demand, job, machine)
