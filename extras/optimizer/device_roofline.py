"""What steps would take on a device that nobody has measured: reading and arithmetic at stated shares of its limits."""

from typing import NamedTuple

from ...bench.roofline import ModelDemand, Precision
from ...engine.checkpoint.model_spec import ModelSpec
from .options import DeviceShares
from .simulated_machine import SimulatedMachine


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


class EstimatedMachine(NamedTuple):
    """`token_bytes`: of keys and values of a token in all layers; `state_bytes`: of the recurrent states of a sequence;
    `cache_bytes`: what is left for both."""

    machine: SimulatedMachine
    token_bytes: int
    state_bytes: int
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
    read_bytes = demand.context_bytes(1) - 2 * demand.state_bytes
    # Operations of a query with one key and its value.
    attended = 2 * spec.attended_numbers
    machine = SimulatedMachine(
        weights=demand.weight_bytes / read,
        token=2 * demand.layers / peak,
        head=2 * demand.head / peak,
        decode_context=read_bytes / read,
        prompt_context=attended / (shares.attention_share * device.peak16),
        chunk_context=read_bytes / read,
        state=2 * demand.state_bytes / read,
        rest=shares.step_ms / 1e3,
        arrival=shares.arrival_ms / 1e3,
    )
    table = demand.head * 2 if not spec.tied_embeddings else 0  # embeddings of their own, which no step reads whole
    cache = shares.memory_share * device.memory - demand.weight_bytes - table
    return EstimatedMachine(machine, demand.token_bytes, demand.state_bytes, int(max(cache, 0)))
