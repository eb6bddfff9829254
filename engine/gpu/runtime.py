"""Which devices and dtypes Triton's kernels serve, and the form in which each kernel is described."""

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
    """Whether the kernels compute `dtype` on `device`; layers ask while they are built. CHARONIA_KERNELS=none leaves a
    GPU to torch; with CHARONIA_KERNELS=triton a CPU interprets the kernels slowly, which tests them without a GPU."""
    if dtype not in TRITON_TYPES or device.type not in ("cpu", "cuda"):
        return False
    serving = computes_with_triton(device.type == "cuda")
    if serving and device.type == "cpu" and "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"  # which Triton reads when it is imported
    return serving


@cache
def capability(device: torch.device) -> int:
    """The compute capability of a GPU, times ten: 80 of an A100, 90 of an H100 and of the interpreter."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def describe_gpu(device: torch.device) -> str:
    """A GPU's name, capability and memory, and what computes on it, for people."""
    _, memory = torch.cuda.mem_get_info(device)
    kernels = "Triton's kernels" if serves(torch.float32, device) else "torch's kernels alone"
    versions = f"compute capability {capability(device) / 10:.1f}, {memory / 1e9:.3g} GB"
    return f"{torch.cuda.get_device_name(device)}, {versions}; {kernels}"


def gpu_names() -> list[str]:
    """The names of all GPUs that CUDA finds here."""
    return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]


def capabilities() -> list[int]:
    """The capabilities of all GPUs that CUDA finds here."""
    return [capability(torch.device("cuda", number)) for number in range(torch.cuda.device_count())]


FP8_GROUP_SIZES = (32, 64, 128)
"""Numbers of inputs that may share a scale in fp8; they divide the inputs."""


def serves_fp8(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels compute `dtype` on `device` by products in fp8 (e4m3), or over a cache in it."""
    return serves(dtype, device) and capability(device) >= FP8_CAPABILITY


DEPENDENT_CAPABILITY = 90
"""The least compute capability, times ten, that launches a kernel before the one that it depends on is over."""
_launches_dependently = False


def use_dependent_launch(wanted: bool) -> None:
    """Have the kernels of this process that can (`dependent_launch.py`) be launched so from now on, where the device
    can."""
    global _launches_dependently
    _launches_dependently = wanted


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """What a kernel with an argument DEPENDENT, which is False by default, is launched with beside its own."""
    if not _launches_dependently or not can_launch_dependently(device):
        return {}
    return {"DEPENDENT": True, "launch_pdl": True}


def can_launch_dependently(device: torch.device) -> bool:
    return device.type == "cuda" and capability(device) >= DEPENDENT_CAPABILITY


FEW_ROWS = 16
"""The most rows of a product that has a kernel for few."""

DIVISIBLE = ":16"


class Specialisation(NamedTuple):
    """One form of a kernel that the engine can launch. Every kernel module yields its own from `specialisations()`,
    made by the functions that plan its launches; `tests.proofs.gpu_kernels` compiles all of them without a GPU."""

    kernel: Any
    types: Mapping[str, str]
    """Triton's types of the arguments that are no constants, in order ("*bf16", "i32"), with DIVISIBLE where launches
    have multiples of 16."""
    constants: Mapping[str, Any]
    """The values of the other arguments."""
    options: Mapping[str, int]
    """Triton's options, such as num_warps and num_stages."""
    wanted: tuple[str, ...] = ()
    """What the PTX must contain, such as "mma"."""
    least: int = 80
    """The least `capability` that the form is launched on."""
    most: int = 100
    """The greatest."""
    unwanted: tuple[str, ...] = ()
    """What the PTX must not contain."""

    @classmethod
    def of_plan(
        cls,
        kernel: Any,
        types: Mapping[str, str],
        plan: Mapping[str, Any],
        wanted: tuple[str, ...] = (),
        least: int = 80,
    ) -> "Specialisation":
        """The form of a launch by `plan`, which has the kernel's constants and Triton's options. `types`: in any order,
        of other kernels' arguments, too."""
        own = {name: types[name] for name in kernel.arg_names if name in types and name not in plan}
        constants = {name: value for name, value in plan.items() if name in kernel.arg_names}
        options = {name: value for name, value in plan.items() if name not in constants}
        return cls(kernel, own, constants, options, wanted, least)

    @property
    def label(self) -> str:
        constants = (f"{name}={value}" for name, value in (*self.constants.items(), *self.options.items()))
        return " ".join((self.kernel.__name__, *dict.fromkeys(self.types.values()), *constants))
