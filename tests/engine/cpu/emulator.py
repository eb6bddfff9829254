"""The kernels for Linux on Arm in a process under an emulator, called as if they were in this one: each call takes
along a copy of the memory that it works on, and brings it back."""

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from charonia.engine.cpu import library
from charonia.engine.cpu.attention import StepStruct
from charonia.engine.cpu.matmul import LANES, LINE_BYTES, GroupedFormat, MatrixStruct
from charonia.engine.cpu.recurrent import (
    ChannelScanStruct,
    ConvolutionStruct,
    HeadGateStruct,
    MovesStruct,
    RecurrenceStruct,
)

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"

IS_HERE = all(map(shutil.which, (COMPILER, EMULATOR)))

FLAGS = "-static -std=gnu11 -Og -fopenmp -fno-math-errno -fno-trapping-math -ffp-contract=fast -Wall -Wno-psabi -Werror"
SOURCES = (
    "convolution",
    "elementwise",
    "gguf_blocks",
    "level",
    "matmul",
    "matmul_dotprod",
    "matmul_i8mm",
    "matmul_pack",
    "matmul_portable",
    "recurrence",
    "sample",
)

CALL, ARGUMENTS = struct.Struct("32sqqf4x"), 12
"""As arm_calls.c has them."""

WIDTHS = (4, 2, 2, 1)
"""Bytes of a number, by the kinds of simd.h and matmul_pack.c; of weights the third has one."""


def build_kernels(directory: Path) -> Path:
    """The program arm_calls.c with the kernels, statically linked."""
    theirs, program = Path(library.__file__).parent, directory / "arm_calls"
    sources = [Path(__file__).with_name("arm_calls.c"), *(theirs / f"{name}.c" for name in SOURCES)]
    asked = [COMPILER, *FLAGS.split(), f"-I{theirs}", *map(str, sources), "-lm", "-o", str(program)]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return program


class Memory:
    """What one call reads and writes: its arguments, and copies of blocks of this process's memory."""

    def __init__(self, arguments: list[int]) -> None:
        self.content = bytearray(struct.pack(f"{ARGUMENTS}q", *arguments, *[0] * (ARGUMENTS - len(arguments))))
        self.places: list[int] = []
        self._blocks: dict[int, tuple[int, int]] = {}

    def attach(self, place: int, address: int | None, size: int, *, returns: bool = True) -> int:
        """Where in the copy the block at `address` begins, which stands at `place`."""
        if not address:
            return 0
        at = next((at for each, (at, _) in self._blocks.items() if each == address), None)
        if at is None:
            self.content += bytes(-len(self.content) % LINE_BYTES)
            at = len(self.content)
            self.content += ctypes.string_at(address, size)
            if returns:
                self._blocks[address] = at, size
        struct.pack_into("q", self.content, place, at)
        self.places.append(place)
        return at

    def attach_matrix(self, address: int) -> MatrixStruct:
        """The first argument, with all that it has the addresses of."""
        matrix = MatrixStruct.from_address(address)
        at, whole = self.attach(0, address, ctypes.sizeof(matrix), returns=False), lanes(matrix.outputs) * 4
        sizes = {"lines": line_bytes(matrix), "scales": whole, "offsets": whole, "bias": whole}
        for name, size in (sizes | {"order": matrix.inputs * 4}).items():
            self.attach(at + getattr(MatrixStruct, name).offset, getattr(matrix, name), size)
        return matrix

    def attach_parts(self, number: int, struct: ctypes.Structure, **sizes: int) -> None:
        """Argument `number`, a structure, with the blocks of so many bytes that it has the addresses of."""
        at = self.attach(8 * number, ctypes.addressof(struct), ctypes.sizeof(struct), returns=False)
        for name, size in sizes.items():
            self.attach(at + getattr(type(struct), name).offset, getattr(struct, name), size, returns=False)

    def attach_step(self, step: StepStruct, moves: MovesStruct) -> tuple[int, int]:
        """Arguments 1 and 2. Returns the number of tokens, and that of slots up to the last that is named."""
        rows = step.rows
        begins = (ctypes.c_int64 * (rows + 1)).from_address(moves.save_begins)
        counts, lines, sources = (
            (ctypes.c_int32 * rows).from_address(address) for address in (step.counts, step.lines, moves.sources)
        )
        saved = (ctypes.c_int32 * begins[rows]).from_address(moves.save_slots)
        self.attach_parts(1, step, lines=4 * rows, starts=4 * rows, counts=4 * rows, angles=4 * rows, firsts=8 * rows)
        saves = 4 * begins[rows]
        self.attach_parts(2, moves, sources=4 * rows, save_begins=8 * rows + 8, save_counts=saves, save_slots=saves)
        return sum(counts), 1 + max((*lines, *sources, *saved))

    def bring_back(self, content: bytes) -> None:
        for address, (at, size) in self._blocks.items():
            ctypes.memmove(address, content[at : at + size], size)


def lanes(outputs: int) -> int:
    return -(-outputs // LANES) * LANES


def line_bytes(m: MatrixStruct) -> int:
    """Of all its lines; the numbers of kinds are those of matmul.h."""
    if not m.span:
        return lanes(m.outputs) // LANES * -(-m.inputs * (4, 2, 1)[m.kind] // 4) * LINE_BYTES
    bits, x = {3: 4, 4: 8, 5: 4}[m.kind], torch.float32
    return GroupedFormat(m.outputs, m.inputs, m.span, m.zeros == 1, x, x, bits, m.zeros == 2).line_bytes


def attach_all(memory: Memory, name: str, a: list[int]) -> None:
    """The blocks that a function takes the addresses of."""

    def attach(**sizes: int) -> None:
        for argument, size in sizes.items():
            number = int(argument.removeprefix("a"))
            memory.attach(8 * number, a[number], size)

    match name:
        case "charonia_matmul":
            m = memory.attach_matrix(a[0])
            x, out = (
                ((a[3] - 1) * a[2] + m.inputs) * WIDTHS[m.x_kind],
                ((a[3] - 1) * a[5] + m.outputs) * WIDTHS[m.out_kind],
            )
            attach(a1=x, a4=out)
        case "charonia_pack":
            whole, steps = lanes(a[3] + a[4]), -(-a[5] * (4, 2, 1)[a[6]] // 4)
            rows = ((a[4] - 1) * a[2] + a[5]) * WIDTHS[a[1]]
            attach(a0=rows, a7=whole * steps * 4, a8=whole * 4, a9=whole * 4)
        case "charonia_pack_spans":
            m = memory.attach_matrix(a[0])
            spans = a[6] * -(-m.inputs // m.span)
            attach(a1=a[6] * m.inputs, a2=spans * 4, a3=spans, a4=spans * 4)
        case "charonia_norm":
            rows = ((a[4] - 1) * a[6] + a[5] * a[8]) * WIDTHS[a[9]]
            attach(a0=rows, a1=rows, a2=a[7] * a[8] * 4 * (1 + a[10]), a3=rows)
        case "charonia_gate":
            attach(a0=2 * a[2] * a[3] * WIDTHS[a[5]], a1=a[2] * a[3] * WIDTHS[a[5]])
        case "charonia_soft_cap":
            attach(a0=a[1] * a[2] * WIDTHS[a[3]])
        case "charonia_rope":
            head = 2 * a[6] * WIDTHS[a[7]]
            attach(a0=(a[3] - 1) * a[5] * WIDTHS[a[7]] + a[4] * head, a1=a[3] * 2 * a[6] * 4, a2=a[3] * a[4] * head)
        case "charonia_gate_heads":
            gate = HeadGateStruct.from_address(a[0])
            memory.attach_parts(0, gate, weight=4 * gate.weights * gate.n)
            heads, width = gate.heads * gate.n, WIDTHS[gate.kind]
            attach(
                a1=a[5] * heads * width, a2=((a[5] - 1) * a[3] + gate.column + heads) * width, a4=a[5] * heads * width
            )
        case "charonia_convolve":
            layer = ConvolutionStruct.from_address(a[0])
            memory.attach_parts(0, layer, weight=4 * layer.kernel * layer.channels, bias=4 * layer.channels)
            tokens, slots = memory.attach_step(StepStruct.from_address(a[1]), MovesStruct.from_address(a[2]))
            line = layer.channels * WIDTHS[layer.kind]
            attach(a3=tokens * a[4] * WIDTHS[layer.kind], a5=slots * (layer.kernel - 1) * line, a6=tokens * line)
        case "charonia_recur":
            rule = RecurrenceStruct.from_address(a[0])
            memory.attach_parts(0, rule, **dict.fromkeys(("rates", "bias", "skip"), 4 * rule.heads))
            tokens, slots = memory.attach_step(StepStruct.from_address(a[1]), MovesStruct.from_address(a[2]))
            matrices = slots * rule.heads * rule.key_size * rule.value_size * 4
            out = tokens * rule.heads * rule.value_size * WIDTHS[rule.kind]
            x, gates = tokens * a[4] * WIDTHS[rule.kind], tokens * a[6] * WIDTHS[rule.gates_kind]
            attach(a3=x, a5=gates, a7=matrices, a8=out)
        case "charonia_scan_channels":
            scan = ChannelScanStruct.from_address(a[0])
            line = 4 * scan.channels
            memory.attach_parts(0, scan, rates=scan.size * line, bias=line, skip=line)
            tokens, slots = memory.attach_step(StepStruct.from_address(a[1]), MovesStruct.from_address(a[2]))
            width, pairs = WIDTHS[scan.kind], (tokens - 1) * a[6] + 2 * scan.size
            lines = tokens * scan.channels * width
            attach(a3=lines, a5=pairs * width, a7=lines, a9=slots * scan.size * scan.channels * 4, a10=lines)
        case "charonia_argmax":
            attach(a0=((a[2] - 1) * a[3] + a[4]) * WIDTHS[a[5]], a1=a[2] * 8)


class EmulatedLibrary:
    """The library that `library.bind_function` looks functions up in."""

    def __init__(self, program: Path, processor: str = "max") -> None:
        asked = [EMULATOR, "-cpu", processor, str(program)]
        self._process = subprocess.Popen(asked, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, name)

    def _call(self, name: str, *arguments: Any) -> int:
        number = next((argument for argument in arguments if isinstance(argument, float)), 0.0)
        numbers = [argument or 0 for argument in arguments if not isinstance(argument, float)]
        memory = Memory(numbers)
        attach_all(memory, name, numbers)
        places = struct.pack(f"{len(memory.places)}q", *memory.places)
        asked, answers = self._process.stdin, self._process.stdout
        assert asked
        assert answers
        asked.write(CALL.pack(name.encode(), len(memory.content), len(memory.places), number) + places + memory.content)
        asked.flush()
        answer = answers.read(8 + len(memory.content))
        assert len(answer) == 8 + len(memory.content), f"{name} ended the emulator"
        memory.bring_back(answer[8:])
        return int(struct.unpack_from("i", answer)[0])

    def close(self) -> None:
        assert self._process.stdout
        self._process.communicate(timeout=10)
