"""The attention backends by name."""

from collections.abc import Container

import torch

from ...core.errors import InvalidArgument
from .base import Attention, CacheSpec
from .cpu import CpuAttention
from .reference import ReferenceAttention

BACKENDS: dict[str, type[CpuAttention] | type[ReferenceAttention]] = {
    "cpu": CpuAttention,
    "reference": ReferenceAttention,
}


def attention_backend(name: str, spec: CacheSpec) -> Attention:
    """The backend called `name` with a cache like `spec`; raises as `backend_for`."""
    return backend_for(name, spec.device, spec.dtype, spec.block_size)(spec)


def backend_for(
    name: str, device: torch.device, dtype: torch.dtype, block_size: int
) -> type[CpuAttention] | type[ReferenceAttention]:
    """The backend called `name`, or for "auto" the fastest one for the device.

    Raises:
        InvalidArgument: no such backend, or one that can't serve this device, dtype or block size.
    """
    if name == "auto":
        name = "cpu" if device.type == "cpu" else "reference"
    if name not in BACKENDS:
        raise InvalidArgument(
            f"attention must be auto or one of {', '.join(BACKENDS)}, got {name!r}", field="attention"
        )
    supports = BACKENDS[name].supports
    _check(name, "device", device.type, supports.devices)
    _check(name, "dtype", dtype, supports.dtypes)
    _check(name, "block_size", block_size, supports.block_sizes)
    return BACKENDS[name]


def _check(name: str, field: str, value: object, legal: Container[object]) -> None:
    if value not in legal:
        raise InvalidArgument(f"attention {name!r} can't do {field} {value}; it can do {legal}", field=field)
