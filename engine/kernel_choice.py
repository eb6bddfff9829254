"""Whose kernels compute on a device, and which of a checkpoint's codes they take as they are: what layers are built by,
and what is counted before anything is loaded. Imports no torch."""

import os
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path

LEVEL_VARIABLE = "CHARONIA_KERNELS"
"""The environment variable that caps the level of the C kernels; "none" is torch's path, on a GPU too, and "triton"
has a CPU interpret those of GPUs (gpu/runtime.py)."""

FP8_CAPABILITY = 89
"""The least compute capability, times ten, whose tensor cores multiply fp8, and for which Triton converts it."""

_HOPPER = 90
"""The GPU that the interpreter stands for."""


def native_library() -> Path | None:
    """The shared object of the C kernels; None where none was built, or the environment forbids it."""
    if os.environ.get(LEVEL_VARIABLE) in ("none", "triton"):
        return None
    paths = (Path(__file__).with_name("cpu") / f"_native{suffix}" for suffix in EXTENSION_SUFFIXES)
    return next((path for path in paths if path.exists()), None)


def computes_with_triton(on_gpu: bool) -> bool:
    """Whether Triton's kernels compute, on a GPU or on the CPU."""
    wanted = os.environ.get(LEVEL_VARIABLE)
    return _has_triton() and (wanted != "none" if on_gpu else wanted == "triton")


def keeps_codes(dtype: str, floats: bool, capability: int | None) -> bool:
    """Whether products with activations of `dtype` take the codes that a checkpoint stores, integers or `floats` (fp8).
    `capability`: of the GPU, times ten, 0 where it is not known; None on a CPU. Where they do not, codes become numbers
    of `dtype` while they are loaded."""
    if dtype == "float32":
        return False
    if computes_with_triton(capability is not None):
        return not floats or (_HOPPER if capability is None else capability) >= FP8_CAPABILITY
    return capability is None and not floats and dtype == "bfloat16" and native_library() is not None


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
