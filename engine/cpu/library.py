"""The shared object of the C kernels beside this file: its functions' signatures, and the level that it runs at."""

import ctypes
import errno
import os
import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch  # before the library is opened: its OpenMP then is torch's, with the same pool of threads

from ...core.errors import Internal
from ..kernel_choice import LEVEL_VARIABLE, native_library
from ..step_batch import SAMPLING_DTYPE
from .compile_kernels import COMMAND
from .source_stamp import source_stamp

LEVELS_OF = {"x86_64": ("avx2", "avx512core", "avx512", "avx512bf16", "amx"), "aarch64": ("dotprod", "i8mm", "bfmmla")}
"""By `platform.machine()`: the levels of instruction sets that are its own, lowest first."""

LEVELS = ("portable", *LEVELS_OF.get(platform.machine(), ()))
"""This machine's, as `enum charonia_level` in level.h."""

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}
"""The dtypes that kernels compute on, with C's number for each (`enum kind` in simd.h)."""

BUILD_COMMAND = COMMAND

_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int, "l": ctypes.c_int64, "f": ctypes.c_float, "s": ctypes.c_char_p}

SIGNATURES = {
    "charonia_sources": ">s",
    "charonia_level": "",
    "charonia_limit": "i",
    "charonia_tiles_refused": "",
    "charonia_threads": "",
    "charonia_norm": "pppplllllfii",
    "charonia_gate": "ppllii",
    "charonia_soft_cap": "pllfi",
    "charonia_gate_heads": "ppplpl",
    "charonia_gate_rows": "pplli",
    "charonia_mix": "ppplp",
    "charonia_multiply_heads": "ppplp",
    "charonia_convolve": "pppplpp",
    "charonia_recur": "pppplplpp",
    "charonia_scan_channels": "pppplplplpp",
    "charonia_attention_plan": "pppl>l",
    "charonia_attention": "ppppp",
    "charonia_rope": "ppplllli",
    "charonia_argmax": "ppllli",
    "charonia_choice_fields": ">s",
    "charonia_sample": "pppllli",
    "charonia_forbid_tokens": "pplllli",
    "charonia_rank_tokens": "pppplll",
    "charonia_provide_masks": "pp",
    "charonia_uniform": "ppl",
    "charonia_matmul": "ppllpl",
    "charonia_pack": "pillllippp",
    "charonia_quantise_int4": "plllppp",
    "charonia_decode_blocks": "iplppp",
    "charonia_dequantise": "pppllip",
    "charonia_pack_spans": "pppppll",
    "charonia_lora": "lppplppplllli",
    "charonia_pool_start": "l>p",
    "charonia_pool_stop": "p",
    "charonia_step_submit": "ppp>l",
    "charonia_pool_wait": "pl",
}
"""The arguments of every exported function, a letter each (p: address, i: int, l: int64, f: float, s: string), and its
result, where that is not int or nothing."""


def level() -> str | None:
    """The level in use; None where there is no library, or LEVEL_VARIABLE forbids it."""
    return LEVELS[bind_function("charonia_level")()] if _open_library() is not None else None


def use_level(name: str) -> None:
    """Compute at the level of that name from now on, in all of this process.

    Raises:
        ValueError: there is no library, or the machine has not got that level.
    """
    before = level()
    if before is None:
        raise ValueError("there are no C kernels here")
    if name not in LEVELS or LEVELS[bind_function("charonia_limit")(LEVELS.index(name))] != name:
        bind_function("charonia_limit")(LEVELS.index(before))
        raise ValueError(f"the best here is {before}{_refusal()}")


def supports(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels compute `dtype` on `device`; layers ask while they are built, not at each step."""
    return device.type == "cpu" and dtype in DTYPE_CODES and level() is not None


def describe() -> str:
    """The way in which the CPU computes, for the log."""
    now = level()
    if now is not None:
        return f"C kernels at level {now}{_refusal()}"
    forbidden = os.environ.get(LEVEL_VARIABLE) in ("none", "triton")
    reason = (
        f"{LEVEL_VARIABLE}={os.environ[LEVEL_VARIABLE]}" if forbidden else "none were built, for want of a compiler"
    )
    return f"no C kernels ({reason}): torch computes, more slowly, and last bits may depend on what shares a batch"


def _refusal() -> str:
    refused = bind_function("charonia_tiles_refused")()
    if not refused:
        return ""
    reason = "a thread's signal stack is too small" if refused == errno.ENOSPC else os.strerror(refused)
    return f"; the processor has AMX, the system does not let this process use it ({reason})"


def struct_fields(*groups: str) -> list[tuple[str, Any]]:
    """The fields of a C structure, in groups of one type: its letter, as in SIGNATURES, and then their names."""
    return [(name, _TYPES[letter]) for letter, *names in map(str.split, groups) for name in names]


@cache
def bind_function(name: str) -> Callable[..., Any]:
    """The exported function `name`. It takes numbers, addresses included (`tensor.data_ptr()`), and checks nothing.

    Raises:
        RuntimeError: there is no library: ask `level()` or `supports()` first.
    """
    library = _open_library()
    if library is None:
        raise RuntimeError("the C extension is not there")
    function: Callable[..., Any] = library[name]
    arguments, _, result = SIGNATURES[name].partition(">")
    function.argtypes = [_TYPES[letter] for letter in arguments]  # type: ignore[attr-defined]
    function.restype = _TYPES[result or "i"]  # type: ignore[attr-defined]
    return function


@cache
def _open_library() -> ctypes.CDLL | None:
    path = native_library()
    if path is None:
        return None
    limit = os.environ.get(LEVEL_VARIABLE, LEVELS[-1])
    if limit not in LEVELS:
        raise ValueError(f"{LEVEL_VARIABLE} must be none, triton or one of {', '.join(LEVELS)}, got {limit!r}")
    library = ctypes.CDLL(str(path))
    _check_sources(library, path)
    _check_sampling_layout(library)
    library.charonia_limit(LEVELS.index(limit))
    return library


def _text(library: ctypes.CDLL, name: str) -> str:
    """What the function `name` returns; "" of a library that has none."""
    function = getattr(library, name, None)
    if function is None:
        return ""
    function.restype = ctypes.c_char_p
    text: bytes = function()
    return text.decode()


def _check_sources(library: ctypes.CDLL, path: Path) -> None:
    """Raise `Internal` unless the library was built from the C sources beside it, if there are any."""
    stamp = source_stamp(path.parent)
    if stamp and _text(library, "charonia_sources") != stamp:
        raise Internal(
            f"{path} was built from other C sources than those beside it, and would compute something else. "
            f"Build it again: make install, or `{BUILD_COMMAND}`"
        )


def _check_sampling_layout(library: ctypes.CDLL) -> None:
    """Raise `Internal` unless `struct choice` of sample.h is SAMPLING_DTYPE."""
    names = {"float32": "float", "int64": "int64_t"}
    ours = "".join(f"{names[str(SAMPLING_DTYPE[name])]} {name};" for name in SAMPLING_DTYPE.names or ())
    if _text(library, "charonia_choice_fields") != ours:
        raise Internal(f"engine/cpu/_native does not fit engine/step_batch.py: build it again ({BUILD_COMMAND})")
