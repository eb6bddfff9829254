"""Compiles every form of every Triton kernel that the engine can ask for, for three generations of GPUs.

    python -m tests.proofs.gpu_kernels [--archs 80 90 100] [--only TEXT] [--each-once] [--minutes 60]

No GPU is needed, Triton brings the assembler. A form fails if it does not compile, needs more shared memory or
registers than a multiprocessor gives to a block, spills registers, or lacks an instruction that it wants. `--each-once`
compiles one form of each kernel: that is what the suite does. There are some thousands, in an order by chance: what
there are no `--minutes` left for is counted. A process that interprets kernels cannot compile them.
"""

import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from math import inf
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any, NamedTuple

import triton
from cyclopts import App
from rich.console import Console
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from charonia.bench.command import Counts
from charonia.engine import gpu
from charonia.engine.gpu.runtime import DIVISIBLE, Specialisation

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""What a block may have, by compute capability (CUDA C Programming Guide, table of technical specifications)."""

app = App(help=__doc__, help_format="plaintext")


class Usage(NamedTuple):
    """What a compiled kernel takes: registers a thread, bytes of shared memory, and bytes of its stack that registers
    were spilled to."""

    registers: int
    shared: int
    spilled: int


def specialisations() -> Iterator[Specialisation]:
    """Those of all modules of engine/gpu."""
    for module in pkgutil.iter_modules(gpu.__path__, f"{gpu.__name__}."):
        yield from getattr(import_module(module.name), "specialisations", tuple)()


def compile_one(form: Specialisation, arch: int) -> tuple[Usage, list[str]]:
    """The form's usage, and what is wrong with it.

    Raises:
        Exception: Triton's or the assembler's, if it does not compile.
    """
    compiled = triton.compile(_source(form), target=GPUTarget("cuda", arch, 32), options=dict(form.options))
    usage = _usage(compiled.asm["cubin"], compiled.metadata.shared)
    wrong = [f"{name} is missing" for name in form.wanted if name not in compiled.asm["ptx"]]
    if usage.shared > SHARED_BYTES[arch]:
        wrong.append(f"{usage.shared} bytes of shared memory, of {SHARED_BYTES[arch]}")
    if usage.spilled:
        wrong.append(f"{usage.spilled} bytes of registers spilled")
    return usage, wrong


def _source(form: Specialisation) -> ASTSource:
    """As the kernel is launched: pointers are aligned to 16 bytes."""
    names = form.kernel.arg_names
    types = {name: form.types.get(name, "constexpr") for name in names}
    signature = {name: kind.removesuffix(DIVISIBLE) for name, kind in types.items()}
    aligned = [["tt.divisibility", 16]]
    found = (at for at, kind in enumerate(types.values()) if kind.startswith("*") or kind.endswith(DIVISIBLE))
    attributes = {(at,): aligned for at in found}
    constants = {(names.index(name),): value for name, value in form.constants.items()}
    return ASTSource(form.kernel, signature, constants, attributes)


def _usage(cubin: bytes, shared: int) -> Usage:
    """Read by the `cuobjdump` that Triton brings."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True, timeout=60)
    registers, stack, local = (_number(told.stdout, name) for name in ("REG", "STACK", "LOCAL"))
    return Usage(registers, shared, stack + local)


def _number(text: str, name: str) -> int:
    found = re.search(rf"{name}:(\d+)", text)
    return int(found[1]) if found else 0


@app.default
def main(
    *, archs: Counts = (80, 90, 100), only: str = "", each_once: bool = False, minutes: float = inf, seed: int = 0
) -> None:
    """Compile them, a line each; exits with 1 if anything is wrong."""
    console, failed, count, began = Console(), 0, 0, monotonic()
    forms: dict[Any, Specialisation] = {}
    for form in specialisations():
        if only in form.label:
            forms.setdefault(form.kernel.__name__ if each_once else form.label, form)
    work = [(form, arch) for form in forms.values() for arch in archs if form.least <= arch <= form.most]
    Random(seed).shuffle(work)
    for form, arch in work:
        if monotonic() - began > 60 * minutes:
            break
        try:
            usage, wrong = compile_one(form, arch)
        except Exception as error:
            usage, wrong = Usage(0, 0, 0), [f"{type(error).__name__}: {error}"]
        count, failed = count + 1, failed + bool(wrong)
        told = "; ".join(wrong) or f"{usage.registers} registers, {usage.shared} bytes shared"
        console.print(f"sm_{arch} {form.label}: {told}", highlight=False, soft_wrap=True)
    not_tried = f"; {len(work) - count} were not tried" if count < len(work) else ""
    console.print(f"{count - failed} of {count} compiled{not_tried}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    app()
