"""The attention backends by the names of the `attention` setting, and the choice between them."""

import logging
from collections.abc import Mapping
from typing import Any

import torch

from ...core.errors import InvalidArgument
from ..cpu import library
from ..gpu import runtime
from ..kernel_choice import FP8_CAPABILITY
from .backend import AttentionBackend, CacheSpec
from .native import NativeAttention
from .torch_attention import ReferenceAttention, TorchSdpaAttention
from .triton_attention import TritonAttention
from .triton_latents import TritonLatents

log = logging.getLogger(__name__)

BACKENDS: dict[str, type[AttentionBackend]] = {
    "native": NativeAttention,
    "triton": TritonAttention,
    "cpu": TorchSdpaAttention,
    "reference": ReferenceAttention,
}

AUTO_ORDER = {"cpu": ("native", "triton", "cpu"), "cuda": ("triton", "reference")}
"""The backends that "auto" may choose, by type of device, fastest first."""


def create_backend(name: str, spec: CacheSpec) -> AttentionBackend:
    """The backend called `name`, or for "auto" the fastest one that can, with an empty cache like `spec`.

    Raises:
        InvalidArgument: as `capable_backends`; or none of those can serve heads like these.
    """
    capable = capable_backends(name, spec.device, spec.dtype, spec.block_size, spec.kv_cache_dtype)
    chosen = next((backend for backend in capable if _backend_for(backend, spec).supports_heads(spec)), None)
    if chosen == capable[0]:
        return _backend_for(chosen, spec)(spec)
    refused = next((s for s in spec.shapes if not BACKENDS[capable[0]].supports_shape(s, spec.heads)), None)
    wanted = "additions to scores by distance"
    if refused is not None:
        sizes = f"keys of {refused.key_size} and values of {refused.value_size}"
        wanted = f"{spec.heads} heads on {refused.heads} with {sizes}"
    refusal = f"attention {capable[0]!r} can't do {wanted}"
    if chosen is None:
        raise InvalidArgument(refusal, field="attention")
    if chosen == "reference":
        log.warning("%s, so torch attends, one sequence after the other: slowly", refusal)
    return _backend_for(chosen, spec)(spec)


def _backend_for(name: str, spec: CacheSpec) -> type[AttentionBackend]:
    """The one called `name`, of which Triton's has another form for latents."""
    return TritonLatents if name == "triton" and TritonLatents.supports_heads(spec) else BACKENDS[name]


def capable_backends(
    name: str, device: torch.device, dtype: torch.dtype, block_size: int, kv_cache_dtype: str
) -> list[str]:
    """The names of the backends that `name` may mean and that can serve such a cache (see `CacheSpec`), fastest first;
    at least one.

    Raises:
        InvalidArgument: no backend is called `name`, or it can't serve this device, dtype, block size or cache dtype.
    """
    if name != "auto" and name not in BACKENDS:
        message = f"attention must be auto or one of {', '.join(BACKENDS)}, got {name!r}"
        raise InvalidArgument(message, field="attention")
    if kv_cache_dtype == "fp8":
        _check_fp8(dtype, device)
    names = AUTO_ORDER[device.type] if name == "auto" else (name,)
    wanted = {"device": device.type, "dtype": dtype, "block_size": block_size, "kv_cache_dtype": kv_cache_dtype}
    refusals = {backend: _missing_support(backend, wanted, device) for backend in names}
    if all(refusals.values()) and (first := refusals[names[0]]) is not None:
        raise first
    return [backend for backend, refusal in refusals.items() if refusal is None]


def _missing_support(name: str, wanted: Mapping[str, Any], device: torch.device) -> InvalidArgument | None:
    """The refusal of a backend that lacks one of the `wanted`, which come in the order of `BackendSupport`."""
    for (field, value), legal in zip(wanted.items(), BACKENDS[name].supports, strict=True):
        if value not in legal:
            message = f"attention {name!r} can't do {field} {_format(value)}; it can do {_format(legal)}"
            return InvalidArgument(message, field=field)
    if name == "native" and library.level() is None:
        return InvalidArgument("attention 'native' needs the C extension, which is not there", field="attention")
    if name == "triton" and not runtime.serves(wanted["dtype"], device):
        return InvalidArgument("attention 'triton' needs a GPU, and the package triton", field="attention")
    return None


def _check_fp8(dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a cache in fp8 where no attention converts it."""
    on_gpu = device.type == "cuda"
    capability = runtime.capability(device)
    if capability >= FP8_CAPABILITY if on_gpu else runtime.serves(dtype, device):
        return
    here = f"{device} has {capability / 10:.1f}" if on_gpu else f"the engine computes on {device}"
    message = f"kv_cache_dtype fp8 is for GPUs of compute capability 8.9 or more, and {here}; int8 takes as few bytes"
    raise InvalidArgument(message, field="kv_cache_dtype")


def _format(value: Any) -> str:
    """A value as the setting is written, or a range or list of legal values."""
    if isinstance(value, range):
        return f"{value[0]} to {value[-1]}" + (f" in steps of {value.step}" if value.step > 1 else "")
    if isinstance(value, tuple):
        return ", ".join(map(_format, value))
    return str(value).removeprefix("torch.")
