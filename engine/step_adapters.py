"""What LoRA adapters (arXiv 2106.09685) change in a step, whatever computes it: an adapter as one rank has it, and
which places of a step have which."""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..scheduler.plan import LongArray
from .step_batch import to_device

BLOCK_PLACES = 16
"""Places that a program of a GPU's kernels computes with one adapter: tensor cores take no fewer."""


class LoraPart(NamedTuple):
    """What is added to `outputs` outputs of a product from `first` on: scale x (x a^T) b, `a` [rank, inputs] and `b`
    [rank, outputs], for the C kernels as their `pack_outputs` has it."""

    first: int
    outputs: int
    a: Tensor
    b: Tensor
    scale: float


class RankAdapterTable(Protocol):
    """Where an adapter's parts lie in memory, as a device's kernels read it: `cpu.lora.CAdapterTable`,
    `gpu.lora.AdapterRecords`."""

    @property
    def address(self) -> int: ...


class RankAdapter:
    """An adapter as one rank computes with it: the `parts` of each of its products, by number, and the `table` of them
    where kernels read one. `digest`, `rank`: see `Adapter`."""

    def __init__(
        self, digest: str, rank: int, parts: Sequence[Sequence[LoraPart]], table: RankAdapterTable | None = None
    ) -> None:
        self.digest = digest
        self.rank = rank
        self.parts = parts
        self._table = table
        self.bytes = sum(matrix.nbytes for product in parts for part in product for matrix in (part.a, part.b))
        self.address = 0 if table is None else table.address


class AdapterBlocks(NamedTuple):
    """A step's adapters as the kernels of a GPU read them, in blocks of up to BLOCK_PLACES places of one adapter."""

    packed: Tensor
    """int64 [4, W]: packed places that have an adapter, one adapter's after the other's; then, for each block, the
    address of its adapter's table (0: it is nobody's), the first of its places among these, and the end of them."""
    most: int
    """The most blocks that there may be."""


class StepAdapters:
    """The rows of a step that have adapters: `adapters[s]`, each a different one, is that of the packed `places` from
    `begins[s]` to `begins[s + 1]`."""

    def __init__(self, adapters: Sequence[RankAdapter], begins: LongArray, places: LongArray) -> None:
        self.adapters = adapters
        self.begins = begins
        self.places = places
        self._blocks: AdapterBlocks | None = None

    @classmethod
    def on_device(cls, blocks: AdapterBlocks) -> "StepAdapters":
        """The adapters of a recorded step: whose rows they are stands in `blocks` alone, and changes."""
        adapters = cls((), np.zeros(1, np.int64), np.zeros(0, np.int64))
        adapters._blocks = blocks
        return adapters

    def change(self, product: int) -> bool:
        """Whether one of them changes product number `product`, or may."""
        return not self.adapters or any(adapter.parts[product] for adapter in self.adapters)

    def blocks(self, device: torch.device) -> AdapterBlocks:
        """The blocks on the device, by one copy that nothing waits for."""
        if self._blocks is None:
            count = int(self._block_counts.sum())
            self._blocks = AdapterBlocks(to_device(self.pack(max(len(self.places), count)), device), count)
        return self._blocks

    def pack(self, width: int) -> LongArray:
        """`AdapterBlocks.packed` with W = `width`, on the host."""
        counts = self._block_counts
        owners = np.repeat(np.arange(len(counts)), counts)
        firsts = self.begins[owners] + BLOCK_PLACES * (np.arange(len(owners)) - (np.cumsum(counts) - counts)[owners])
        addresses = np.array([adapter.address for adapter in self.adapters], np.int64)
        packed: LongArray = np.zeros((4, width), np.int64)
        packed[0, : len(self.places)] = self.places
        ends = np.minimum(firsts + BLOCK_PLACES, self.begins[owners + 1])
        packed[1:, : len(owners)] = addresses[owners], firsts, ends
        return packed

    @property
    def _block_counts(self) -> LongArray:
        """The number of each adapter's blocks."""
        return -(-np.diff(self.begins) // BLOCK_PLACES)

    @cached_property
    def c_fields(self) -> list[int]:
        """The number of adapters, and the addresses of adapters, begins and places: valid as long as this object
        lives."""
        self._addresses = np.array([adapter.address for adapter in self.adapters], np.int64)
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
