"""Whether Triton's kernels serve a device, and in which forms each of them can be asked for."""

import os
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch

from ..kernel_choice import FP8_CAPABILITY, computes_with_triton

TRITON_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""The dtypes that kernels compute on, by Triton's names."""

CODE_TYPES = {torch.int8: "i8", torch.float8_e4m3fn: "fp8e4nv"}
"""Eight-bit codes of numbers, by Triton's names."""
LARGEST_CODES = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def serves(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels compute `dtype` on `device`; layers ask while they are built, not at each step.
    CHARONIA_KERNELS=none leaves a GPU to torch; with CHARONIA_KERNELS=triton a CPU interprets the kernels, slowly: so
    what runs on a GPU is proved without one."""
    if dtype not in TRITON_TYPES or device.type not in ("cpu", "cuda"):
        return False
    found = computes_with_triton(device.type == "cuda")
    if found and device.type == "cpu" and "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"  # which Triton reads when it is imported
    return found


@cache
def capability(device: torch.device) -> int:
    """The compute capability of a GPU, times ten: 80 of an A100, 90 of an H100, which the interpreter stands for."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def capabilities() -> list[int]:
    """Of the GPUs that CUDA finds here, as `capability`."""
    return [capability(torch.device("cuda", number)) for number in range(torch.cuda.device_count())]


FP8_GROUP_SIZES = (32, 64, 128)
"""The numbers of inputs that may share a scale in fp8; such groups are whole."""


def serves_fp8(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether they compute `dtype` on `device` by products in fp8 (e4m3), or over a cache in it."""
    return serves(dtype, device) and capability(device) >= FP8_CAPABILITY


DIVISIBLE = ":16"


class Specialisation(NamedTuple):
    """One form of a kernel that the engine can ask for. Every kernel module yields its own from `specialisations()`,
    made by the same functions that choose block sizes and warps for a launch; `tests.proofs.gpu_kernels`
    compiles all of them without a GPU.

    `types`: Triton's type of each argument that is no constant, in order ("*bf16", "i32", "fp32"), with DIVISIBLE if
    launches have multiples of 16 there, which Triton sees and compiles for. `constants`: the values of the others.
    `options`: what Triton is told, num_warps and num_stages among it. `wanted`: what the PTX must contain, such as
    "mma". `least`, `most`: the capabilities (see `capability`) between which the form is asked for."""

    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    options: Mapping[str, int]
    wanted: tuple[str, ...] = ()
    least: int = 80
    most: int = 100

    @property
    def label(self) -> str:
        constants = (f"{name}={value}" for name, value in self.constants.items())
        return " ".join((self.kernel.__name__, *dict.fromkeys(self.types.values()), *constants))
