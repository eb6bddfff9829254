"""The attention backends by name."""

from typing import Any, NamedTuple, TypeAlias

import torch

from ...core.errors import InvalidArgument
from ..cpu import library
from .backend import AttentionBackend, CacheSpec
from .native import NativeAttention
from .reference import ReferenceAttention
from .torch_sdpa import TorchSdpaAttention

BackendClass: TypeAlias = type[NativeAttention] | type[TorchSdpaAttention] | type[ReferenceAttention]

BACKENDS: dict[str, BackendClass] = {
    "native": NativeAttention,
    "cpu": TorchSdpaAttention,
    "reference": ReferenceAttention,
}

AUTO_ORDER = {"cpu": ("native", "cpu")}
"""Device -> what "auto" may mean there, fastest first; "reference" elsewhere."""


class CacheRequirements(NamedTuple):
    """What is known of a cache before the model is; as CacheSpec has it."""

    device: torch.device
    dtype: torch.dtype
    block_size: int
    kv_cache_dtype: str = "auto"


def create_backend(name: str, spec: CacheSpec) -> AttentionBackend:
    """The backend called `name`, or for "auto" the fastest one that can, with a cache like `spec`.

    Raises:
        InvalidArgument: as `check_backend`; or it does not know heads like these.
    """
    able = _capable_backends(name, CacheRequirements(spec.device, spec.dtype, spec.block_size, spec.kv_cache_dtype))
    for each in able:
        if BACKENDS[each].supports_heads(spec):
            return BACKENDS[each](spec)
    heads = f"{spec.heads} heads on {spec.kv_heads} of {spec.head_dim}"
    raise InvalidArgument(f"attention {able[0]!r} can't do {heads}", field="attention")


def check_backend(name: str, wanted: CacheRequirements) -> None:
    """Whether there is a backend for what is known before the model is.

    Raises:
        InvalidArgument: none called `name`, or it can't serve this device, dtype, block size or way to store.
    """
    _capable_backends(name, wanted)


def _capable_backends(name: str, wanted: CacheRequirements) -> list[str]:
    """Of the backends that `name` may mean those that can serve, fastest first; at least one."""
    if name != "auto" and name not in BACKENDS:
        raise InvalidArgument(
            f"attention must be auto or one of {', '.join(BACKENDS)}, got {name!r}", field="attention"
        )
    names = AUTO_ORDER.get(wanted.device.type, ("reference",)) if name == "auto" else (name,)
    complaints = {each: _missing_support(each, wanted) for each in names}
    able = [each for each, complaint in complaints.items() if complaint is None]
    if not able and (complaint := complaints[names[0]]):
        raise complaint
    return able


def _missing_support(name: str, wanted: CacheRequirements) -> InvalidArgument | None:
    supports = BACKENDS[name].supports
    for field, value, legal in (
        ("device", wanted.device.type, supports.devices),
        ("dtype", wanted.dtype, supports.dtypes),
        ("block_size", wanted.block_size, supports.block_sizes),
        ("kv_cache_dtype", wanted.kv_cache_dtype, supports.kv_cache_dtypes),
    ):
        if value not in legal:
            message = f"attention {name!r} can't do {field} {_format_value(value)}; it can do {_format_legal(legal)}"
            return InvalidArgument(message, field=field)
    if name == "native" and library.level() is None:
        return InvalidArgument("attention 'native' needs the C extension, which is not there", field="attention")
    return None


def _format_legal(legal: range | tuple[Any, ...]) -> str:
    if isinstance(legal, range):
        return f"{legal[0]} to {legal[-1]}" + (f" in steps of {legal.step}" if legal.step > 1 else "")
    return ", ".join(map(_format_value, legal))


def _format_value(value: Any) -> str:
    """As the setting that asks for it is written."""
    return str(value).removeprefix("torch.")
