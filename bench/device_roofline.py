"""What steps would take on a device that nobody has measured: reading and arithmetic at stated shares of its limits."""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

from cyclopts import Parameter
from cyclopts.validators import Number

from ..engine.checkpoint.model_spec import ModelSpec
from ..planning.simulated_machine import SimulatedMachine
from .roofline import ModelDemand, Precision


class DeviceLimits(NamedTuple):
    """Bytes a second that it reads, operations a second in 16 and in 8 bits, and bytes of memory, as its maker says."""

    read: float
    peak16: float
    peak8: float
    memory: float

    @property
    def about(self) -> str:
        return f"{self.read / 1e12:g} TB/s, {self.peak16 / 1e12:g} TFLOP/s in 16 bits, {self.memory / 1e9:g} GB"


DEVICES = {
    "h100": DeviceLimits(3.35e12, 989e12, 1979e12, 80e9),
    "h200": DeviceLimits(4.8e12, 989e12, 1979e12, 141e9),
}
"""NVIDIA's data sheets of the SXM modules, dense operations."""

_Share = Annotated[float, Parameter(validator=Number(gt=0, lte=1))]
_Seconds = Annotated[float, Parameter(validator=Number(gte=0))]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceShares:
    """What of a device's limits a step is supposed to reach; of --roofline alone."""

    read_share: _Share = 0.65
    """With --roofline: share of the bandwidth at which weights and cache are read."""
    peak_share: _Share = 0.5
    """With --roofline: share of the peak at which products are computed."""
    attention_share: _Share = 0.3
    """With --roofline: share of the peak at which prompts attend."""
    memory_share: _Share = 0.9
    """With --roofline: share of the memory that weights and cache may have."""
    step_ms: _Seconds = 1.0
    """With --roofline: milliseconds that a step takes beside, for launching and sampling."""
    arrival_ms: _Seconds = 2.0
    """With --roofline: milliseconds that a request takes until it is in the engine."""

    def __str__(self) -> str:
        shares = f"{self.read_share:.0%} of reading, {self.peak_share:.0%} of products, {self.attention_share:.0%} of"
        return f"{shares} attention, {self.memory_share:.0%} of memory, {self.step_ms:g} ms a step beside"


class EstimatedMachine(NamedTuple):
    """`token_bytes`: of keys and values of a token in all layers; `cache_bytes`: what is left for them."""

    machine: SimulatedMachine
    token_bytes: int
    cache_bytes: int


def estimate_machine(
    spec: ModelSpec, precision: Precision, device: DeviceLimits, shares: DeviceShares, kv_cache_dtype: str = "auto"
) -> EstimatedMachine:
    """A dense model on one device, with a cache of that `CacheConfig.dtype`.

    Raises:
        InvalidArgument: a mixture of experts.
    """
    demand = ModelDemand.of(spec, precision, kv_cache_dtype)
    read = shares.read_share * device.read
    peak = shares.peak_share * (device.peak8 if precision == "int8" else device.peak16)
    token_bytes = demand.context_bytes(1)
    attended = 4 * spec.heads * spec.head_dim * spec.layers  # operations of a query with one key and its value
    machine = SimulatedMachine(
        weights=demand.weight_bytes / read,
        token=2 * demand.layers / peak,
        head=2 * demand.head / peak,
        decode_context=token_bytes / read,
        prompt_context=attended / (shares.attention_share * device.peak16),
        chunk_context=token_bytes / read,
        rest=shares.step_ms / 1e3,
        arrival=shares.arrival_ms / 1e3,
    )
    table = demand.head * 2 if not spec.tied_embeddings else 0  # embeddings of their own, which no step reads whole
    cache = shares.memory_share * device.memory - demand.weight_bytes - table
    return EstimatedMachine(machine, token_bytes, int(max(cache, 0)))
