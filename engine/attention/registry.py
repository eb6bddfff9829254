"""The attention backends by name."""

from typing import NamedTuple, TypeAlias

import torch

from ...core.errors import InvalidArgument
from ..kernels import library
from .base import Attention, CacheSpec
from .cpu import CpuAttention
from .native import NativeAttention
from .reference import ReferenceAttention

Backend: TypeAlias = type[NativeAttention] | type[CpuAttention] | type[ReferenceAttention]

BACKENDS: dict[str, Backend] = {"native": NativeAttention, "cpu": CpuAttention, "reference": ReferenceAttention}

AUTO = {"cpu": ("native", "cpu")}
"""Device -> what "auto" may mean there, fastest first; "reference" elsewhere."""


class Wanted(NamedTuple):
    """What is known of a cache before the model is; as CacheSpec has it."""

    device: torch.device
    dtype: torch.dtype
    block_size: int
    stored: str = "auto"


def attention_backend(name: str, spec: CacheSpec) -> Attention:
    """The backend called `name`, or for "auto" the fastest one, with a cache like `spec`.

    Raises:
        InvalidArgument: as `check_backend`; or it does not know heads like these.
    """
    wanted = Wanted(spec.device, spec.dtype, spec.block_size, spec.stored)
    found = check_backend(name, wanted)
    if not BACKENDS[found].fits(spec):
        if name != "auto" or spec.stored != "auto":
            heads = f"{spec.heads} heads on {spec.kv_heads} of {spec.head_dim}"
            raise InvalidArgument(f"attention {found!r} can't do {heads}", field="attention")
        found = "cpu"
    return BACKENDS[found](spec)


def check_backend(name: str, wanted: Wanted) -> str:
    """The name of the backend that `name` means.

    Raises:
        InvalidArgument: no such backend, or one that can't serve this device, dtype or block size.
    """
    if name != "auto" and name not in BACKENDS:
        raise InvalidArgument(
            f"attention must be auto or one of {', '.join(BACKENDS)}, got {name!r}", field="attention"
        )
    names = AUTO.get(wanted.device.type, ("reference",)) if name == "auto" else (name,)
    complaints = [_complaint(each, wanted) for each in names]
    if None not in complaints:
        raise next(filter(None, complaints))
    return names[complaints.index(None)]


def _complaint(name: str, wanted: Wanted) -> InvalidArgument | None:
    supports = BACKENDS[name].supports
    for field, value, legal in (
        ("device", wanted.device.type, supports.devices),
        ("dtype", wanted.dtype, supports.dtypes),
        ("block_size", wanted.block_size, supports.block_sizes),
        ("kv_cache_dtype", wanted.stored, supports.stored),
    ):
        if value not in legal:
            return InvalidArgument(f"attention {name!r} can't do {field} {value}; it can do {legal}", field=field)
    if name == "native" and library.level() is None:
        return InvalidArgument("attention 'native' needs the C extension, which is not there", field="attention")
    return None
