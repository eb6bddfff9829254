"""What LoRA adapters (arXiv 2106.09685) add to products: the adapters of a step's rows, and the C kernels (`lora.h`).

Rows of a step are sorted by adapter. A product's input is first multiplied with A, all of an adapter's matrices one
after the other, and the few numbers that come out with B. Each row's sums run in an order of their own: they depend on
no other row and on no thread.
"""

import ctypes
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...scheduler.plan import LongArray
from ..step_batch import to_device
from . import library
from .library import struct_fields
from .op_trace import LORA_EXPAND, LORA_SHRINK, OpStruct, SymbolicTensor

PANEL = 32
"""Outputs side by side in packed B, as in lora.h."""

BLOCK_PLACES = 16
"""Places that a program of a GPU's kernels computes with one adapter: tensor cores take no fewer."""

RECORD_WORDS = 6
"""int64 numbers of a part in `RankAdapter.records`."""


class LoraPart(NamedTuple):
    """What is added to `outputs` outputs of a product from `first` on: scale x (x a^T) b, `a` [rank, inputs] and `b`
    [rank, outputs], for kernels as `pack_outputs` has it."""

    first: int
    outputs: int
    a: Tensor
    b: Tensor
    scale: float


class _PartStruct(ctypes.Structure):
    """`LoraPart` of lora.h."""

    _fields_ = struct_fields("p a b", "l rank first outputs", "f scale")


class _MatricesStruct(ctypes.Structure):
    """`LoraMatrices` of lora.h."""

    _fields_ = struct_fields("p parts", "l count")


class RankAdapter:
    """An adapter as one rank computes with it: the `parts` of each of its products, by number. `digest`, `rank`: see
    `Adapter`. `records_on`: the device whose kernels read its `records`, if one's do."""

    def __init__(
        self, digest: str, rank: int, parts: Sequence[Sequence[LoraPart]], records_on: torch.device | None = None
    ) -> None:
        self.digest, self.rank, self.parts = digest, rank, parts
        self.bytes = sum(matrix.nbytes for product in parts for part in product for matrix in (part.a, part.b))
        self._structs = [(_PartStruct * len(product))(*map(_part_struct, product)) for product in parts]
        pairs = (_MatricesStruct(ctypes.addressof(each), len(each)) for each in self._structs)
        self._matrices = (_MatricesStruct * len(parts))(*pairs)
        self.address = ctypes.addressof(self._matrices)
        """C's array of `parts`."""
        self.records = torch.from_numpy(_records(parts)).to(records_on or "cpu")
        """int64: where the records of each product begin, and those of the last end; then a record for each part."""


def _records(parts: Sequence[Sequence[LoraPart]]) -> LongArray:
    """Of a part the addresses of `a` and `b`, its rank, the bits of its scale as float64, `first` and `outputs`."""
    ends = len(parts) + 1 + RECORD_WORDS * np.cumsum([0, *map(len, parts)])
    scales = np.array([part.scale for product in parts for part in product], np.float64).view(np.int64).tolist()
    flat = (part for product in parts for part in product)
    words = [
        (part.a.data_ptr(), part.b.data_ptr(), len(part.a), scale, part.first, part.outputs)
        for part, scale in zip(flat, scales, strict=True)
    ]
    return np.concatenate([ends, np.array(words, np.int64).reshape(-1)]).astype(np.int64)


def _part_struct(part: LoraPart) -> _PartStruct:
    return _PartStruct(part.a.data_ptr(), part.b.data_ptr(), len(part.a), part.first, part.outputs, part.scale)


class AdapterBlocks(NamedTuple):
    """A step's adapters as the kernels of a GPU read them. `packed`, int64 [4, W]: packed places that have an adapter,
    one adapter's after the other's; then for each block, of `most` at most, the address of its adapter's `records`,
    and its first of these places and the end of them, which are BLOCK_PLACES at most. Blocks at address 0 are
    nobody's."""

    packed: Tensor
    most: int


class StepAdapters:
    """The rows of a step that have adapters: `adapters[s]`, each a different one, is that of the packed `places` from
    `begins[s]` to `begins[s + 1]`."""

    def __init__(self, adapters: Sequence[RankAdapter], begins: LongArray, places: LongArray) -> None:
        self.adapters, self.begins, self.places = adapters, begins, places
        self._blocks: AdapterBlocks | None = None

    @classmethod
    def on_device(cls, blocks: AdapterBlocks) -> "StepAdapters":
        """Of a step that is recorded: whose rows they are stands in `blocks` alone, and changes."""
        there = cls((), np.zeros(1, np.int64), np.zeros(0, np.int64))
        there._blocks = blocks
        return there

    def change(self, product: int) -> bool:
        """Whether one of them changes product number `product`, or may."""
        return not self.adapters or any(each.parts[product] for each in self.adapters)

    def blocks(self, device: torch.device) -> AdapterBlocks:
        """On the device, by one copy that nothing waits for."""
        if self._blocks is None:
            count = int(self._blocks_each.sum())
            self._blocks = AdapterBlocks(to_device(self.pack(max(len(self.places), count)), device), count)
        return self._blocks

    def pack(self, width: int) -> LongArray:
        """`AdapterBlocks.packed` with W = `width`, on the host."""
        each = self._blocks_each
        owners = np.repeat(np.arange(len(each)), each)
        firsts = self.begins[owners] + BLOCK_PLACES * (np.arange(len(owners)) - (np.cumsum(each) - each)[owners])
        addresses = np.array([adapter.records.data_ptr() for adapter in self.adapters], np.int64)
        packed: LongArray = np.zeros((4, width), np.int64)
        packed[0, : len(self.places)] = self.places
        ends = np.minimum(firsts + BLOCK_PLACES, self.begins[owners + 1])
        packed[1:, : len(owners)] = addresses[owners], firsts, ends
        return packed

    @property
    def _blocks_each(self) -> LongArray:
        """The number of each adapter's blocks."""
        return -(-np.diff(self.begins) // BLOCK_PLACES)

    @cached_property
    def c_fields(self) -> list[int]:
        """The number of adapters, and the addresses of adapters, begins and places: valid as long as this object
        lives."""
        self._addresses = np.array([each.address for each in self.adapters], np.int64)
        columns = self._addresses, self.begins, self.places
        return [len(self.adapters), *(column.ctypes.data for column in columns)]

    def segments(self, device: torch.device) -> list[tuple[RankAdapter, Tensor]]:
        """Each adapter with its places, on the device."""
        if self._segments is None:
            places = torch.from_numpy(self.places).to(device)
            self._segments = list(zip(self.adapters, places.tensor_split(self.begins[1:-1].tolist()), strict=True))
        return self._segments

    _segments: list[tuple[RankAdapter, Tensor]] | None = None

    def among(self, rows: LongArray) -> "StepAdapters | None":
        """The adapters of these packed places, for products with them alone in this order; None: they have none, or
        the host does not know them."""
        if not self.adapters:
            return None
        nobody = len(self.adapters)
        owners = np.full(max(self.places.max(), rows.max()) + 1, nobody)
        owners[self.places] = np.repeat(np.arange(nobody), np.diff(self.begins))
        order = owners[rows].argsort(kind="stable")
        begins = np.searchsorted(owners[rows][order], np.arange(nobody + 1))
        return StepAdapters(self.adapters, begins, order[: begins[-1]]) if begins[-1] else None


def pack_outputs(b: Tensor) -> Tensor:
    """B^T [outputs, rank] as the kernels read it: [panels, rank, PANEL], zeros behind the last output."""
    padded = F.pad(b, (0, 0, 0, -len(b) % PANEL)) if len(b) % PANEL else b
    return padded.reshape(-1, PANEL, b.shape[1]).transpose(1, 2)


class NativeLora:
    """The kernels for product `number`, whose parts have `lines` lines of A together at most."""

    def __init__(self, number: int, lines: int) -> None:
        self._number, self._lines = number, lines
        self._add = library.bind_function("charonia_lora")

    def add(self, x: Tensor, out: Tensor, step: StepAdapters) -> None:
        """Adds to `out` [N, outputs], contiguous, what the step's adapters make of x [N, inputs]; both in one dtype."""
        if x.stride(1) != 1:
            x = x.contiguous()
        shrunk = torch.empty(len(x), self._lines)
        sizes = x.stride(0), x.shape[1], self._lines, out.shape[1], library.DTYPE_CODES[x.dtype]
        self._add(*step.c_fields, self._number, x.data_ptr(), shrunk.data_ptr(), out.data_ptr(), *sizes)

    def trace_shrink(self, x: SymbolicTensor) -> SymbolicTensor:
        """Record x A^T, which is computed beside the product that is recorded next."""
        operation = OpStruct(kind=LORA_SHRINK, layer=self._number, size=x.width, stride=self._lines)
        return x.trace.add_op(operation, x, self._lines, dtype=torch.float32)

    def trace_expand(self, shrunk: SymbolicTensor, out: SymbolicTensor) -> None:
        """Record that `shrunk` x B is added to the product's result."""
        operation = OpStruct(kind=LORA_EXPAND, layer=self._number, size=out.width, stride=self._lines)
        out.trace.add_in_place(operation, out, delta=shrunk)
