"""The products of a rank's decoder that LoRA adapters may change, and an adapter cut and converted for them."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import groupby

import torch
from torch import Tensor

from ...core.errors import InvalidArgument
from ..cpu import library
from ..cpu.lora import CAdapterTable, pack_outputs
from ..cpu.memory import HugePageArena
from ..gpu import runtime
from ..step_adapters import LoraPart, RankAdapter, RankAdapterTable
from .adapter_files import AdaptedModule, AdapterFiles, StoredMatrix
from .hf_checkpoint import own_tensor_name, text_tensor_name
from .weights import STORED, TensorSlice, dtype_name

_PIECE = 1 << 15
"""Numbers that are converted at a time: with so few torch uses no threads, which compute a step."""

_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.")


def matrix_runs(slices: Iterable[TensorSlice]) -> list[list[TensorSlice]]:
    """The slices of a product in runs that an adapter has one `LoraPart` each for: neighbours of one tensor, with one
    factor."""
    return [list(run) for _, run in groupby(slices, lambda part: (part.name, part.factor))]


class _TargetPart:
    """A matrix of the checkpoint, some rows and columns of which, one of `matrix_runs`, are a product's outputs from
    `first` on."""

    def __init__(self, slices: Sequence[TensorSlice], first: int) -> None:
        self.shape, self._columns = slices[0].shape, slices[0].columns
        self._first = first
        self._factor = slices[0].factor
        self._rows = [part.row_range for part in slices]

    @property
    def outputs(self) -> int:
        return sum(map(len, self._rows))

    def share(self, adapted: AdaptedModule, memory: "_AdapterMemory") -> LoraPart:
        """This rank's share of an adapter's matrices for it."""
        a = _matrix(adapted.a)[:, self._columns]
        whole = _matrix(adapted.b)
        some = [whole[rows.start : rows.stop : rows.step] for rows in self._rows]
        b = some[0] if len(some) == 1 else torch.cat(some)
        b = pack_outputs(b) if memory.native else b.t()
        return LoraPart(self._first, self.outputs, memory.copy_of(a), memory.copy_of(b), adapted.scale * self._factor)


class _AdapterMemory:
    """Memory for one adapter's matrices, which is freed with the last of them. `native`: for our kernels. `finite`:
    whether it has no NaN and no infinity."""

    def __init__(self, dtype: torch.dtype, device: torch.device, native: bool) -> None:
        self._dtype = dtype
        self._device = device
        self.native = native
        self._arena = HugePageArena()
        self.finite = True

    def copy_of(self, matrix: Tensor) -> Tensor:
        """A contiguous copy of `matrix`, whatever its strides, in the model's dtype."""
        if self._device.type != "cpu":
            copied = matrix.to(self._device, self._dtype).contiguous()
            self._check(copied)
            return copied
        size = matrix.numel() * self._dtype.itemsize
        whole = self._arena.allocate(size)[:size].view(self._dtype).view(matrix.shape)
        step = max(_PIECE * len(matrix) // matrix.numel(), 1)
        for first in range(0, len(matrix), step):
            piece = whole[first : first + step]
            piece.copy_(matrix[first : first + step])
            self._check(piece)
        return whole

    def _check(self, numbers: Tensor) -> None:
        """Note numbers that are not finite: then their sum, one pass, is not finite either."""
        self.finite = self.finite and math.isfinite(numbers.sum(dtype=torch.float32))


class AdapterTargets:
    """The `products` that adapters may change, each as the slices of the checkpoint that are stacked in it. `layers`:
    this rank's, of `total`. `language_part`: adapters have the larger model's tensor names. `elsewhere`: paths of
    layers that other ranks have, and check."""

    def __init__(
        self,
        products: Sequence[Sequence[TensorSlice]],
        dtype: torch.dtype,
        device: torch.device,
        layers: range,
        total: int,
        language_part: bool = False,
        elsewhere: Set[str] = frozenset(),
    ) -> None:
        self._dtype = dtype
        self._device = device
        self._products = len(products)
        self._native = library.supports(dtype, device)
        self._layers = layers
        self._total = total
        self._language_part = language_part
        self._elsewhere = elsewhere
        # A matrix may be in two products: queries, and the gates between them.
        self._parts: dict[str, list[tuple[int, _TargetPart]]] = {}
        for number, slices in enumerate(products):
            first = 0
            for run in matrix_runs(slices):
                part = _TargetPart(run, first)
                self._parts.setdefault(run[0].name.removesuffix(".weight"), []).append((number, part))
                first += part.outputs

    @torch.inference_mode()
    def prepare(self, files: AdapterFiles) -> RankAdapter:
        """This rank's share of an adapter, for any thread.

        Raises:
            InvalidArgument: a matrix is for no layer of the model, not of that layer's shape, or not finite.
        """
        matched = list(self._matched(files))
        parts: list[list[LoraPart]] = [[] for _ in range(self._products)]
        memory = _AdapterMemory(self._dtype, self._device, self._native)
        for where, number, part, adapted in matched:
            parts[number].append(part.share(adapted, memory))
            if not memory.finite:
                message = f"{where} or its lora_B holds what is no number in {dtype_name(self._dtype)}"
                raise InvalidArgument(message, field="lora_path")
        return RankAdapter(files.digest, files.rank, parts, self._table(parts))

    def _table(self, parts: Sequence[Sequence[LoraPart]]) -> RankAdapterTable | None:
        """The table that the kernels of `layers.linear` read; None where torch computes."""
        if runtime.serves(self._dtype, self._device):
            from ..gpu.lora import AdapterRecords

            return AdapterRecords(parts, self._device)
        return CAdapterTable(parts) if self._native else None

    def _matched(self, files: AdapterFiles) -> Iterator[tuple[str, int, _TargetPart, AdaptedModule]]:
        """Every matrix of this rank's layers, and its place, for errors. Other ranks check theirs."""
        for stored, adapted in files.modules.items():
            own = (text_tensor_name if self._language_part else own_tensor_name)(f"{stored}.")
            layer = _LAYER.match(own)
            other_stage = layer and int(layer[1]) < self._total and int(layer[1]) not in self._layers
            if other_stage or own.removesuffix(".") in self._elsewhere:
                continue
            where = f"{files.directory}: tensor base_model.model.{stored}.lora_A.weight"
            if (targets := self._parts.get(own.removesuffix("."))) is None:
                raise InvalidArgument(f"{where} matches no layer that takes adapters{_why(own)}", field="lora_path")
            for number, part in targets:
                outputs, inputs = part.shape
                if (adapted.b.rows, adapted.a.columns) != (outputs, inputs):
                    sizes = f"has {adapted.a.columns} inputs, and lora_B {adapted.b.rows} outputs"
                    message = f"{where} {sizes}; the model's layer has {inputs} and {outputs}"
                    raise InvalidArgument(message, field="lora_path")
                yield where, number, part, adapted


def _why(module: str) -> str:
    if module.endswith((".mlp.gate.", ".block_sparse_moe.gate.")):
        return ": routers of mixtures take none"
    return ": embeddings and the head take none" if "embed_tokens." in module or "lm_head." in module else ""


def _matrix(stored: StoredMatrix) -> Tensor:
    """A view of the file's bytes as a matrix."""
    return torch.frombuffer(stored.content, dtype=STORED[stored.dtype]).view(stored.rows, stored.columns)
