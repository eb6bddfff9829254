"""Linear layers split over the ranks of a tensor-parallel group (arXiv 1909.08053), and the matrix products with
constant weights below them: packed once for the CPU, quantised meanwhile if asked for.

With the C kernels a row's result does not depend on the rows beside it. torch's products, which serve where the kernels
do not, promise that for int8 alone.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoint.build_context import TensorGroup, rank_slice
from ..checkpoint.code_forms import CodeForm, Zeros, as_int8
from ..checkpoint.packing_cache import Array
from ..checkpoint.served_forms import SCALE_ERROR
from ..checkpoint.weights import TensorSlice, WeightLoader, dtype_name
from ..cpu import library
from ..cpu.lora import NativeLora
from ..cpu.matmul import GroupedFormat, GroupedMatmul, GroupedRows, MatmulFormat, PackedMatmul
from ..cpu.op_trace import SymbolicTensor
from ..gpu import runtime
from ..kernel_choice import keeps_codes
from ..step_adapters import StepAdapters
from .int4 import BYTES, GROUP_SIZE, DequantizedMatmul, TorchInt4Matmul, quantize_int4
from .step_context import StepContext

if TYPE_CHECKING:
    from ..gpu.grouped_matmul import GroupedWeights
    from ..gpu.lora import TritonLora
    from ..gpu.scaled_matmul import QuantisedRows

Matmul: TypeAlias = Callable[[Tensor], Tensor]
"""x [N, in] -> x W^T + b [N, out]."""

ONEDNN_PACKED_ROWS = 32
"""The number of rows that oneDNN's packed layout is chosen for; measured to serve every number of rows."""

_STORED = "stored"
"""How packed weights are kept that have the checkpoint's own integers."""

_SCALED_KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""What both sides of a product are quantised to, row by row, by its precision."""

INT8_MAX = 127
"""The largest quantised number."""


class MatmulUse(NamedTuple):
    """The purpose of a product decides whether its weights may be quantised, and whether the C kernels return the
    float32 that they sum in; torch's products return x's dtype in any case."""

    quantizable: bool = True
    float32: bool = False


LAYER = MatmulUse()
ROUTER = MatmulUse(quantizable=False, float32=True)
"""A mixture's router is small, and the last bit of a score may choose another expert."""
LM_HEAD = MatmulUse(float32=True)


class OutputShard(NamedTuple):
    """A matrix of the checkpoint with `size` output features, of which this rank computes `features`."""

    name: str
    size: int
    features: slice

    def shifted(self, by: int) -> "OutputShard":
        """The same number of features `by` further on, where one matrix holds several projections."""
        return self._replace(features=slice(self.features.start + by, self.features.stop + by))


class LayerMatmul:
    """The product of a linear layer with the matrices `slices`, one below the other, and what the adapters of a step's
    rows (LoRA, arXiv 2106.09685) add to it."""

    def __init__(self, loader: WeightLoader, slices: list[TensorSlice], bias: Tensor | None) -> None:
        self._product = build_matmul(loader, slices, bias)
        self._number = 0 if loader.adaptable is None else len(loader.adaptable)
        self._lora: NativeLora | TritonLora | TorchLora | None = None
        if loader.adaptable is not None:
            loader.adaptable.append(slices)
            self._lora = _fastest_lora(self._number, slices, loader)

    def __call__(self, x: Tensor, context: StepContext) -> Tensor:
        recorded: object = x  # declared for tensors
        if isinstance(self._lora, NativeLora) and isinstance(recorded, SymbolicTensor):
            shrunk = self._lora.trace_shrink(recorded)
            traced: SymbolicTensor = cast(Any, self._product)(recorded)
            self._lora.trace_expand(shrunk, traced)
            return cast(Tensor, traced)
        out = self._product(x)
        if self._lora is not None and context.adapters is not None and context.adapters.change(self._number):
            self._lora.add(x, out, context.adapters)
        return out


class TorchLora:
    """What adapters add to product `number` by torch, and the reference of the kernels."""

    def __init__(self, number: int) -> None:
        self._number = number

    def add(self, x: Tensor, out: Tensor, step: StepAdapters) -> None:
        """Adds to the product's result `out` [N, outputs] what the step's adapters make of x [N, inputs]."""
        for adapter, places in step.segments(x.device):
            for part in adapter.parts[self._number]:
                added = F.linear(x[places], part.a).mul_(part.scale) @ part.b
                out[:, part.first : part.first + part.outputs].index_add_(0, places, added)


def _fastest_lora(
    number: int, slices: list[TensorSlice], loader: WeightLoader
) -> "NativeLora | TritonLora | TorchLora":
    most = loader.context.max_lora_rank
    outputs = Counter[str]()
    for part in slices:
        outputs[part.name] += len(part.row_range)
    if runtime.serves(loader.dtype, loader.device):
        from ..gpu.lora import TritonLora

        return TritonLora(number, [*outputs.values()], most)
    if library.supports(loader.dtype, loader.device):
        return NativeLora(number, len(outputs) * most)
    return TorchLora(number)


def column_slices(outputs: Iterable[OutputShard], inputs: int) -> list[TensorSlice]:
    """The parts of matrices [size, inputs] that compute these output features."""
    return [TensorSlice(f"{o.name}.weight", (o.size, inputs), o.features) for o in outputs]


def column_linear(loader: WeightLoader, outputs: Sequence[OutputShard], inputs: int, *, bias: bool) -> LayerMatmul:
    """The product x [N, in] -> this rank's output features [N, out], those of several matrices in one."""
    biases = (TensorSlice(f"{o.name}.bias", (o.size,), o.features) for o in outputs)
    return LayerMatmul(loader, column_slices(outputs, inputs), loader.concatenate(biases) if bias else None)


class RowLinear:
    """This rank's input features [N, in / ranks] -> the whole output [N, out], summed over the group."""

    def __init__(
        self, loader: WeightLoader, name: str, inputs: int, columns: slice, outputs: int, *, bias: bool
    ) -> None:
        # The sum over ranks must contain the bias once.
        mine = loader.vector(f"{name}.bias", outputs) if bias and loader.group.rank == 0 else None
        self.partial = LayerMatmul(loader, [TensorSlice(f"{name}.weight", (outputs, inputs), columns=columns)], mine)
        """This rank's summand of the output."""
        self._group = loader.group
        self.untraceable = split_reason(loader.group)

    def __call__(self, x: Tensor, context: StepContext) -> Tensor:
        partial = self.partial(x, context)
        return partial if self._group.size == 1 else self._group.all_reduce(partial)


class LMHead:
    """Hidden states [S, hidden] -> logits [S, vocabulary], the vocabulary split over the group."""

    def __init__(self, loader: WeightLoader, name: str, vocab: int, hidden: int) -> None:
        rows = rank_slice(vocab, loader.group)
        self._matmul = build_matmul(loader, [TensorSlice(name, (vocab, hidden), rows)], use=LM_HEAD)
        self._group = loader.group
        self._vocab = vocab
        self.untraceable = split_reason(loader.group)

    def __call__(self, x: Tensor) -> Tensor:
        logits = self._matmul(x)
        return logits if self._group.size == 1 else self._group.all_gather(logits, self._vocab)


def split_reason(group: TensorGroup) -> str | None:
    """Why a layer that is split over `group` can't be part of the C program; None: it is not split."""
    return None if group.size == 1 else f"its layers are split over {group.size} ranks"


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
        """For the C kernels: as an earlier load kept it, if one did."""
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
            bits = 8 if codes.by_row else 8 * self._grouped_format(codes).line_bytes / numbers
            bits = 8 + 32 / codes.group_size if codes.floats and not codes.by_row else bits
            loader.count_served(self._slices, str(codes), bits, 0.0 if codes.exact else SCALE_ERROR)
        elif kept == "none":
            loader.count_floats(self._slices)
        else:
            loader.count_served(self._slices, kept, 8 * (BYTES if kept == "int4" else 1), None)

    def _grouped_format(self, codes: CodeForm) -> GroupedFormat:
        x = self._loader.dtype
        points = codes.zeros is Zeros.POINTS
        offsets = codes.zeros is Zeros.OFFSETS
        out = torch.float32 if self._use.float32 else x
        return GroupedFormat(self.outputs, self._inputs, codes.group_size, points, x, out, codes.bits, offsets)

    def _product(
        self, kept: str, codes: CodeForm | None, bias: Tensor | None, arrays: Mapping[str, Array] | None
    ) -> PackedMatmul | GroupedMatmul:
        """One whose weights are `arrays`, or zero."""
        memory = self._loader.memory
        x = self._loader.dtype
        sizes = (self.outputs, self._inputs)
        out = torch.float32 if self._use.float32 else x
        there = None
        if arrays is not None:
            there = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if kept == "int4":
            return GroupedMatmul(GroupedFormat(*sizes, GROUP_SIZE, False, x, out), bias, memory, packed=there)
        if codes is None or codes.by_row:
            dtype = torch.int8 if kept == _STORED else getattr(torch, kept)
            return PackedMatmul(MatmulFormat(*sizes, dtype, x, out), bias, memory, there)
        return GroupedMatmul(self._grouped_format(codes), bias, memory, codes.order, there)

    def _pack(self, product: PackedMatmul | GroupedMatmul, codes: CodeForm | None) -> None:
        if codes is not None:
            for first, stored in self._loader.code_tiles(self._slices, codes):
                if isinstance(product, GroupedMatmul):
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
        """By Triton's kernels, or cuBLAS where nothing is quantised."""
        if self.scaled_kind is not None:
            from ..gpu.scaled_matmul import TritonScaledMatmul

            return TritonScaledMatmul(self.quantised_rows(), bias)
        codes = self.codes
        if codes is not None or self.precision == "int4":
            from ..gpu.grouped_matmul import TritonGroupedMatmul

            return TritonGroupedMatmul(self.grouped_weights(), bias, None if codes is None else codes.order)
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
        """All of it, as one that `stacks`."""
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
                some = slice(first, first + len(tile.weights))
                weight[some] = tile.weights if stored.floats else as_int8(tile.weights)
                scales[some] = tile.scales.reshape(-1, *groups)
            return QuantisedRows(weight, scales)
        for first, rows in loader.tiles(self._slices):
            some = slice(first, first + len(rows))
            weight[some], scales[some] = quantise_rows(rows.to(loader.device).contiguous(), kind)
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
                some = slice(first, first + len(rows))
                weight[some], scales[some] = quantize_rows(rows)
            return TorchInt8Matmul(weight.t(), scales, None if bias is None else bias.float())
        if self._use is LM_HEAD:
            [table] = self._slices
            return torch_matmul(loader.mapped(table), bias)  # it may be the embedding's: mapped, there is one of it
        return torch_matmul(loader.concatenate(self._slices), bias)

    def sample(self) -> Tensor:
        """Some of its rows, from each of its parts."""
        return torch.cat([self._loader.sample(part) for part in self._slices])

    @property
    def _squares(self) -> Tensor | None:
        return self._loader.context.plan.squares.get(self.label)


class TorchInt8Matmul:
    """The int8 product in torch, the reference of the int8 kernels and their substitute: x in any dtype, results in it.
    Sums are exact integers, so rows do not depend on each other here either."""

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        """`weight` [in, out] in int8, `scales` [out] in float32."""
        self._weight = weight
        self._scales = scales
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        rows, scales = quantize_rows(x)
        result = torch._int_mm(rows, self._weight).float().mul_(scales.unsqueeze(-1) * self._scales)
        return (result if self._bias is None else result.add_(self._bias)).to(x.dtype)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [N, n] -> int8 [N, n] and float32 scales [N], each row's largest number at 127."""
    wide = x.float()
    largest = wide.abs().amax(-1)
    by = torch.where(largest > 0, torch.tensor(float(INT8_MAX)) / largest, 0.0).clamp_(
        max=torch.finfo(torch.float32).max
    )
    return wide.mul(by.unsqueeze(-1)).round_().to(torch.int8), largest / INT8_MAX


def torch_matmul(weight: Tensor, bias: Tensor | None) -> Matmul:
    """torch's product with `weight` [out, in] and `bias` [out]. Where oneDNN packs it, `weight` is not kept."""
    if weight.device.type == "cpu" and onednn_packing_works(weight.dtype):
        return _onednn_matmul(weight, bias)
    return partial(F.linear, weight=weight, bias=bias)


@cache
def onednn_packing_works(dtype: torch.dtype) -> bool:
    """Whether oneDNN's packed product exists and agrees with F.linear: its operators are torch's private ones."""
    if not all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")):
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(80, 48, generator=generator).to(dtype)
    bias = torch.randn(80, generator=generator).to(dtype)
    # A few roundings of the sums' size: 48 products of unit normals are about 7.
    tolerance = 32 * torch.finfo(dtype).eps
    try:
        product = _onednn_matmul(weight, bias)
        for x in (torch.randn(rows, 48, generator=generator).to(dtype) for rows in (1, 3, 64)):
            expected = F.linear(x.float(), weight.float(), bias.float())
            if (product(x).float() - expected).abs().max() > tolerance:
                return False
    except RuntimeError:
        return False
    return True


def _onednn_matmul(weight: Tensor, bias: Tensor | None) -> Matmul:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, ONEDNN_PACKED_ROWS)
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def product(x: Tensor) -> Tensor:
        result: Tensor = multiply(x, packed, bias, "none", [], "")
        return result

    return product
