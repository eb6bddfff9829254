"""A matrix of a checkpoint, or several below each other, that layers multiply with: packed once for the CPU, quantised
meanwhile if asked for.

With the C kernels a row's result does not depend on the rows beside it.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..checkpoint.code_forms import CodeForm, Zeros, as_float4, as_int8
from ..checkpoint.packing_cache import Array
from ..checkpoint.served_forms import SCALE_ERROR
from ..checkpoint.weights import TensorSlice, WeightLoader, dtype_name
from ..cpu import library
from ..cpu.matmul import GroupedFormat, GroupedMatmul, GroupedRows, MatmulFormat, PackedMatmul
from ..gpu import runtime
from ..kernel_choice import keeps_codes
from .int4 import BYTES, GROUP_SIZE, DequantizedMatmul, TorchInt4Matmul, quantize_int4
from .torch_matmul import Matmul, TorchInt8Matmul, quantize_rows, torch_matmul

if TYPE_CHECKING:
    from ..gpu.grouped_matmul import GroupedWeights
    from ..gpu.scaled_matmul import QuantisedRows

_STORED = "stored"
"""How packed weights are kept that have the checkpoint's own integers."""

_SCALED_KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""What both sides of a product are quantised to, row by row, by its precision."""


class MatmulUse(NamedTuple):
    """The purpose of a product decides whether its weights may be quantised, and whether the C kernels return the
    float32 that they sum in; torch's products return x's dtype in any case."""

    quantizable: bool = True
    float32: bool = False


LAYER = MatmulUse()
SMALL_LAYER = MatmulUse(quantizable=False)
"""What has few outputs, on whose last bits much depends."""
ROUTER = MatmulUse(quantizable=False, float32=True)
"""A mixture's router is small, and the last bit of a score may choose another expert."""
LM_HEAD = MatmulUse(float32=True)


def build_matmul(
    loader: WeightLoader, slices: Iterable[TensorSlice], bias: Tensor | None = None, use: MatmulUse = LAYER
) -> Matmul:
    """The product with the matrices `slices`, one below the other, and `bias` [out]."""
    matrix = ProductMatrix(loader, list(slices), use)
    if runtime.serves(loader.dtype, loader.device):
        product: Matmul = matrix.on_gpu(bias)
    else:
        product = matrix.packed(bias) if library.supports(loader.dtype, loader.device) else matrix.in_torch(bias)
    watch = loader.context.observer
    return (
        product
        if watch is None or use is not LAYER
        else watch.watch(matrix.label, product, matrix.outputs, matrix.sample())
    )


def serves_int8(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there are products in int8 for activations of `dtype` on `device`."""
    return device.type == "cpu" or runtime.serves(dtype, device)


class ProductMatrix:
    """The matrices `slices`, one below the other, on their way into a product."""

    def __init__(self, loader: WeightLoader, slices: list[TensorSlice], use: MatmulUse) -> None:
        self._loader = loader
        self._slices = slices
        self._use = use
        self.outputs = sum(len(part.row_range) for part in slices)
        self._inputs = slices[0].width
        self.label = " ".join(part.label for part in slices)

    @property
    def precision(self) -> str:
        """none, int8, fp8 or int4."""
        wanted = self._loader.context.quantization if self._use.quantizable else "none"
        if wanted != "int4" or (self._use is LAYER and self.label not in self._loader.context.plan.higher):
            return wanted
        return "int8" if serves_int8(self._loader.dtype, self._loader.device) else "none"

    @property
    def codes(self) -> CodeForm | None:
        """The form in which kernels compute with the codes that the checkpoint stores; None: they do not."""
        loader = self._loader
        if not self._use.quantizable or self.precision != "none":
            return None
        form = loader.common_form(self._slices)
        capability = runtime.capability(loader.device) if loader.device.type == "cuda" else None
        return form if form is not None and keeps_codes(dtype_name(loader.dtype), form.floats, capability) else None

    def packed(self, bias: Tensor | None) -> PackedMatmul | GroupedMatmul:
        """The product for the C kernels, as an earlier load kept it, if one did."""
        loader = self._loader
        codes = self.codes
        earlier = loader.packing.find(self.label)
        wanted = dtype_name(loader.dtype) if self.precision == "none" else self.precision
        kept = earlier[0] if earlier else wanted if codes is None else _STORED
        product = self._product(kept, codes, bias, earlier[1] if earlier else None)
        if earlier:
            loader.pass_over(self._slices)
        else:
            self._pack(product, codes)
            loader.packing.add(self.label, kept, {name: tensor.numpy() for name, tensor in product.arrays.items()})
        self._count(codes)
        return product

    def _count(self, codes: CodeForm | None) -> None:
        """As a product with `codes`, or in the precision that is asked for."""
        loader = self._loader
        kept = self.precision
        if codes is not None:
            numbers = self.outputs * self._inputs
            form = None if codes.by_row else self._grouped_format(codes)
            bits = 8 if form is None else 8 * form.line_bytes / numbers
            bits = 8 + 32 / codes.group_size if codes.floats and not codes.by_row else bits
            name = f"fp4 by groups of {codes.group_size}" if form is not None and form.floats else str(codes)
            loader.count_served(self._slices, name, bits, 0.0 if codes.exact else SCALE_ERROR)
        elif kept == "none":
            loader.count_floats(self._slices)
        else:
            loader.count_served(self._slices, kept, 8 * (BYTES if kept == "int4" else 1), None)

    def _grouped_format(self, codes: CodeForm) -> GroupedFormat:
        x = self._loader.dtype
        points = codes.zeros is Zeros.POINTS
        offsets = codes.zeros is Zeros.OFFSETS
        out = torch.float32 if self._use.float32 else x
        float4 = codes.float4 and not runtime.serves(x, self._loader.device)
        bits = 4 if float4 else codes.bits
        return GroupedFormat(self.outputs, self._inputs, codes.group_size, points, x, out, bits, offsets, float4)

    def _product(
        self, kept: str, codes: CodeForm | None, bias: Tensor | None, arrays: Mapping[str, Array] | None
    ) -> PackedMatmul | GroupedMatmul:
        """A product whose weights are `arrays`, or zero."""
        memory = self._loader.memory
        x = self._loader.dtype
        sizes = (self.outputs, self._inputs)
        out = torch.float32 if self._use.float32 else x
        packed = None
        if arrays is not None:
            packed = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if kept == "int4":
            return GroupedMatmul(GroupedFormat(*sizes, GROUP_SIZE, False, x, out), bias, memory, packed=packed)
        if codes is None or codes.by_row:
            dtype = torch.int8 if kept == _STORED else getattr(torch, kept)
            return PackedMatmul(MatmulFormat(*sizes, dtype, x, out), bias, memory, packed)
        return GroupedMatmul(self._grouped_format(codes), bias, memory, codes.order, packed)

    def _pack(self, product: PackedMatmul | GroupedMatmul, codes: CodeForm | None) -> None:
        if codes is not None:
            for first, stored in self._loader.code_tiles(self._slices, codes):
                if isinstance(product, GroupedMatmul):
                    if product.form.floats:
                        stored = stored._replace(weights=as_float4(stored.weights))
                    product.pack(first, stored)
                else:
                    product.pack(first, as_int8(stored.weights), stored.scales.squeeze(1))
            return
        for first, rows in self._loader.tiles(self._slices):
            if isinstance(product, GroupedMatmul):
                product.pack(first, quantize_int4(rows, self._squares))
            else:
                product.pack(first, rows)

    def on_gpu(self, bias: Tensor | None) -> Matmul:
        """The product by Triton's kernels, or cuBLAS where nothing is quantised and rows may share an order of sums."""
        invariant = self._loader.context.batch_invariance
        if self.scaled_kind is not None:
            from ..gpu.scaled_matmul import TritonScaledMatmul

            return TritonScaledMatmul(self.quantised_rows(), bias, invariant)
        codes = self.codes
        if codes is not None or self.precision == "int4":
            from ..gpu.grouped_matmul import TritonGroupedMatmul

            return TritonGroupedMatmul(self.grouped_weights(), bias, None if codes is None else codes.order, invariant)
        if invariant:
            from ..gpu.float_matmul import TritonFloatMatmul

            self._count(None)
            return TritonFloatMatmul(self._floats(), bias)
        few_rows = self._loader.context.few_rows
        if few_rows is not None and self._use.quantizable:
            self._count(None)
            return few_rows.make(self._floats(), bias)
        return self.in_torch(bias)

    def grouped_weights(self) -> "GroupedWeights":
        """All outputs in groups of inputs, those of the checkpoint or of four bits made here, on the device."""
        from ..gpu.grouped_matmul import GroupedWeights

        loader = self._loader
        stored = self.codes
        self._count(stored)
        form = self._grouped_format(CodeForm(4, GROUP_SIZE) if stored is None else stored)
        weights = GroupedWeights(form, loader.device)
        if stored is not None:
            for first, tile in loader.code_tiles(self._slices, stored):
                weights.pack(first, tile)
        else:
            for first, rows in loader.tiles(self._slices):
                weights.pack(first, quantize_int4(rows.to(loader.device), self._squares))
        return weights

    @property
    def stacks(self) -> bool:
        """Whether the kernels of experts multiply with it on a GPU. With one in four bits that are made here they do
        not: what of it stays higher a calibration says of each expert."""
        codes = self.codes
        loader = self._loader
        if codes is not None:
            return codes.order is None
        if self.precision != "none":
            return self.precision != "int4"
        return all(ProductMatrix(loader, [part], self._use).codes is None for part in self._slices)

    def stacked(self) -> "Tensor | QuantisedRows | GroupedWeights":
        """The whole matrix, as one that `stacks`."""
        if self.scaled_kind is not None:
            return self.quantised_rows()
        if self.codes is not None:
            return self.grouped_weights()
        self._count(None)
        return self._loader.concatenate(self._slices)

    @property
    def scaled_kind(self) -> torch.dtype | None:
        """What both sides of its product become on a GPU, with scales; None: they do not."""
        codes = self.codes
        if codes is None:
            return _SCALED_KINDS.get(self.precision)
        return torch.float8_e4m3fn if codes.floats else torch.int8 if codes.by_row else None

    def quantised_rows(self) -> "QuantisedRows":
        """All outputs in codes of `scaled_kind`, those of the checkpoint or made here, on the device."""
        from ..gpu.scaled_matmul import QuantisedRows, quantise_rows

        loader = self._loader
        stored = self.codes
        kind = self.scaled_kind
        assert kind is not None, "it is to become rows with scales"
        self._count(stored)
        groups = () if stored is None or stored.by_row else (self._inputs // stored.group_size,)
        weight = torch.empty(self.outputs, self._inputs, dtype=kind, device=loader.device)
        scales = torch.empty(self.outputs, *groups, device=loader.device)
        if stored is not None:
            for first, tile in loader.code_tiles(self._slices, stored):
                span = slice(first, first + len(tile.weights))
                weight[span] = tile.weights if stored.floats else as_int8(tile.weights)
                scales[span] = tile.scales.reshape(-1, *groups)
            return QuantisedRows(weight, scales)
        for first, rows in loader.tiles(self._slices):
            span = slice(first, first + len(rows))
            weight[span], scales[span] = quantise_rows(rows.to(loader.device).contiguous(), kind)
        return QuantisedRows(weight, scales)

    def in_torch(self, bias: Tensor | None) -> Matmul:
        loader = self._loader
        sizes = (self.outputs, self._inputs)
        self._count(self.codes if loader.device.type == "meta" else None)  # kernels will compute it, where they can
        if self.precision == "int4":
            tiles = (quantize_int4(rows.to(loader.device), self._squares) for _, rows in loader.tiles(self._slices))
            weights, scales = (
                torch.cat(parts) for parts in zip(*((tile.weights, tile.scales) for tile in tiles), strict=True)
            )
            kind = TorchInt4Matmul if loader.device.type == "cpu" else DequantizedMatmul
            return kind(GroupedRows(weights, scales), bias)
        if self.precision == "int8":
            weight = torch.empty(sizes, dtype=torch.int8)
            scales = torch.empty(self.outputs)
            for first, rows in loader.tiles(self._slices):
                span = slice(first, first + len(rows))
                weight[span], scales[span] = quantize_rows(rows)
            return TorchInt8Matmul(weight.t(), scales, None if bias is None else bias.float())
        return torch_matmul(self._floats(), bias)

    def _floats(self) -> Tensor:
        if self._use is LM_HEAD:
            [table] = self._slices
            return self._loader.mapped(table)  # it may be the embedding's: mapped, there is one of it
        return self._loader.concatenate(self._slices)

    def sample(self) -> Tensor:
        """Some of its rows, from each of its parts."""
        return torch.cat([self._loader.sample(part) for part in self._slices])

    @property
    def _squares(self) -> Tensor | None:
        return self._loader.context.plan.squares.get(self.label)
