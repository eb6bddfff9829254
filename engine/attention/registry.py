"""The attention backends by name."""

from ...core.errors import InvalidArgument
from .base import Attention, CacheSpec, Support
from .cpu import CpuAttention
from .reference import ReferenceAttention

BACKENDS: dict[str, type[CpuAttention] | type[ReferenceAttention]] = {
    "cpu": CpuAttention,
    "reference": ReferenceAttention,
}


def attention_backend(name: str, spec: CacheSpec) -> Attention:
    """The backend called `name`, or for "auto" the fastest one for the device.

    Raises:
        InvalidArgument: no such backend, or one that can't serve this device, dtype or block size.
    """
    if name == "auto":
        name = "cpu" if spec.device.type == "cpu" else "reference"
    if name not in BACKENDS:
        raise InvalidArgument(
            f"attention must be auto or one of {', '.join(BACKENDS)}, got {name!r}", field="attention"
        )
    backend = BACKENDS[name]
    _check(name, backend.supports, spec)
    return backend(spec)


def _check(name: str, supports: Support, spec: CacheSpec) -> None:
    wishes = {
        "device": (spec.device.type, supports.devices),
        "dtype": (spec.dtype, supports.dtypes),
        "block_size": (spec.block_size, supports.block_sizes),
    }
    for field, (value, legal) in wishes.items():
        if value not in legal:
            raise InvalidArgument(f"attention {name!r} can't do {field} {value}; it can do {legal}", field=field)
