"""Compiles every form of every Triton kernel that the engine can ask for, for three generations of GPUs.

    python -m tests.proofs.gpu_kernels [--archs 80 90 100] [--only TEXT] [--each-once] [--minutes 60] [--remember FILE]

No GPU is needed, Triton brings the assembler. A form fails if it does not compile, needs more shared memory or
registers than a multiprocessor gives to a block, spills registers, or lacks an instruction that it wants. `--each-once`
compiles one form of each kernel: that is what the suite does. There are some thousands, in an order by chance: what
there are no `--minutes` left for is counted. `--remember` keeps each result in a file as soon as it is known, so a run
may be stopped at any moment, and the next one compiles only what is missing or whose kernel has changed since. A
process that interprets kernels cannot compile them.
"""

import ast
import hashlib
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from math import inf
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any, NamedTuple

import triton
import triton.language as tl
from cyclopts import App
from rich.console import Console
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import JITFunction

from charonia.bench.command import Counts
from charonia.engine import gpu
from charonia.engine.gpu.runtime import DEPENDENT_CAPABILITY, DIVISIBLE, Specialisation

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""What a block may have, by compute capability (CUDA C Programming Guide, table of technical specifications)."""
_DEPENDS = "griddepcontrol.wait", "griddepcontrol.launch_dependents"

app = App(help=__doc__, help_format="plaintext")


class Usage(NamedTuple):
    """What a compiled kernel takes: registers a thread, bytes of shared memory, and bytes of its stack that registers
    were spilled to."""

    registers: int
    shared: int
    spilled: int


class Memory:
    """Results of earlier runs, a line of JSON each: by what was compiled, of which kernel's source."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        lines = file.read_bytes().splitlines() if file is not None and file.exists() else []
        self._known: dict[str, tuple[Usage, list[str]]] = {}
        for line in lines:
            with suppress(ValueError):  # a run that was stopped may leave half a line
                key, usage, wrong = json.loads(line)
                self._known[key] = Usage(*usage), wrong

    def find(self, key: str) -> tuple[Usage, list[str]] | None:
        return self._known.get(key)

    def add(self, key: str, usage: Usage, wrong: list[str]) -> None:
        if self._file is not None:
            with self._file.open("a") as file:
                file.write(f"\n{json.dumps((key, usage, wrong))}")


def _key(form: Specialisation, arch: int) -> str:
    """What is compiled: two forms with the same key are one."""
    texts = form.wanted + form.unwanted
    parts = form.kernel.__name__, form.types, form.constants, form.options, texts, arch, triton.__version__
    return hashlib.sha256("\n".join((*map(str, parts), *_sources(form.kernel))).encode()).hexdigest()


@cache
def _sources(function: Any) -> tuple[str, ...]:
    """The source of a kernel, of all functions that it calls, and the constants that they read. Unlike Triton's own key
    it does not hold the lines where they begin."""
    names = {node.id for node in ast.walk(ast.parse(function.src)) if isinstance(node, ast.Name)}
    values = {name: function.__globals__[name] for name in sorted(names & function.__globals__.keys())}
    called = (_sources(value) for value in values.values() if isinstance(value, JITFunction) and value is not function)
    constants = (f"{name}={value}" for name, value in values.items() if isinstance(value, tl.constexpr))
    return function.src, *constants, *(source for sources in called for source in sources)


def specialisations() -> Iterator[Specialisation]:
    """Those of all modules of engine/gpu, and with dependent launch where a kernel has it."""
    for module in pkgutil.iter_modules(gpu.__path__, f"{gpu.__name__}."):
        for form in getattr(import_module(module.name), "specialisations", tuple)():
            if "DEPENDENT" not in form.kernel.arg_names:
                yield form
                continue
            yield form._replace(constants={**form.constants, "DEPENDENT": False})
            dependent = form._replace(constants={**form.constants, "DEPENDENT": True}, wanted=(*form.wanted, *_DEPENDS))
            if form.most >= DEPENDENT_CAPABILITY:
                yield dependent._replace(least=max(form.least, DEPENDENT_CAPABILITY))


def compile_one(form: Specialisation, arch: int) -> tuple[Usage, list[str]]:
    """The form's usage, and what is wrong with it.

    Raises:
        Exception: Triton's or the assembler's, if it does not compile.
    """
    compiled = triton.compile(_source(form), target=GPUTarget("cuda", arch, 32), options=dict(form.options))
    usage = _usage(compiled.asm["cubin"], compiled.metadata.shared)
    wrong = [f"{name} is missing" for name in form.wanted if name not in compiled.asm["ptx"]]
    wrong += [f"{name} is there" for name in form.unwanted if name in compiled.asm["ptx"]]
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
    *,
    archs: Counts = (80, 90, 100),
    only: str = "",
    each_once: bool = False,
    minutes: float = inf,
    seed: int = 0,
    remember: Path | None = None,
) -> None:
    """Compile them, a line each; exits with 1 if anything is wrong."""
    console, memory, began = Console(), Memory(remember), monotonic()
    forms = [form for form in specialisations() if only in form.label]
    if each_once:
        kinds = {(form.kernel.__name__, form.constants.get("DEPENDENT")): form for form in reversed(forms)}
        forms = [*kinds.values()]
    pairs = [(form, arch) for form in forms for arch in archs if form.least <= arch <= form.most]
    work = [*{_key(form, arch): (form, arch) for form, arch in pairs}.items()]
    Random(seed).shuffle(work)
    count = failed = remembered = 0
    for key, (form, arch) in work:
        result = memory.find(key)
        remembered += result is not None
        if result is None:
            if monotonic() - began > 60 * minutes:
                continue
            try:
                result = compile_one(form, arch)
                memory.add(key, *result)
            except Exception as error:
                result = Usage(0, 0, 0), [f"{type(error).__name__}: {error}"]
        elif not result[1]:
            count += 1
            continue
        usage, wrong = result
        count, failed = count + 1, failed + bool(wrong)
        told = "; ".join(wrong) or f"{usage.registers} registers, {usage.shared} bytes shared"
        console.print(f"sm_{arch} {form.label}: {told}", highlight=False, soft_wrap=True)
    known = f", {remembered} of them before" if remembered else ""
    not_tried = f"; {len(work) - count} were not tried" if count < len(work) else ""
    console.print(f"{count - failed} of {count} compiled{known}{not_tried}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    app()
