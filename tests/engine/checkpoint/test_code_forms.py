"""Matrices stored as integers on their way into a product: whatever their form, it is the product of the weights that
they stand for."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from charonia.engine.checkpoint.build_context import BuildContext
from charonia.engine.checkpoint.code_forms import (
    CodeForm,
    CodeRange,
    StoredForm,
    Zeros,
    common_form,
    dequantise_codes,
    turn_codes,
)
from charonia.engine.checkpoint.model_spec import CheckpointError
from charonia.engine.checkpoint.packing_cache import Packing, open_packing_cache
from charonia.engine.checkpoint.weights import CheckpointWeights, TensorSlice, WeightLoader
from charonia.engine.cpu import library
from charonia.engine.cpu.matmul import GroupedMatmul, GroupedRows
from charonia.engine.layers.product_matrix import LM_HEAD, ROUTER, build_matmul

KERNELS = pytest.mark.skipif(library.level() is None, reason="no C extension here")
INPUTS = 320
CPU = torch.device("cpu")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def codes_in(form: CodeForm, outputs: int, seed: int) -> GroupedRows:
    """Random codes, and scales of eleven bits."""
    source, groups = generator(seed), 1 if form.group_size == 0 else -(-INPUTS // form.group_size)
    weights = torch.randint(0, 1 << form.bits, (outputs, INPUTS), generator=source, dtype=torch.uint8)
    scales = (torch.rand(outputs, groups, generator=source) + 0.5).half().float()
    zeros = torch.randint(0, 17, scales.shape, generator=source, dtype=torch.uint8)
    offsets = scales.roll(1, 0) * 4
    return GroupedRows(
        weights, scales, zeros if form.zeros is Zeros.POINTS else None, offsets if form.zeros is Zeros.OFFSETS else None
    )


class CodedWeights:
    """A `WeightSource` of matrices, and plain ones, in memory."""

    def __init__(self, forms: dict[str, CodeForm | None]) -> None:
        self.forms = forms
        self.rows = {name: codes_in(form, 48, i) for i, (name, form) in enumerate(forms.items()) if form is not None}
        self.files: list[Path] = []
        self.bytes, self.unread, self.quantization = 1 << 20, [], "codes"

    def __contains__(self, name: str) -> bool:
        return name in self.forms

    def form(self, piece: TensorSlice) -> StoredForm:
        form = self.forms[piece.name]
        return StoredForm("floats", 32, plain=True) if form is None else StoredForm(str(form), form.bits, form)

    def codes(self, piece: TensorSlice) -> GroupedRows:
        whole = self.rows[piece.name]
        return GroupedRows(*(None if one is None else one[piece.rows] for one in whole))

    def blocks(self, piece: TensorSlice) -> None:
        return None

    def read(self, piece: TensorSlice) -> torch.Tensor:
        form = self.forms[piece.name]
        if form is None:
            return torch.ones(piece.shape)[piece.rows, piece.columns]
        return dequantise_codes(self.codes(piece), form)[:, piece.columns]


def loader_of(
    weights: CodedWeights, dtype: torch.dtype = torch.bfloat16, packing: Packing | None = None
) -> WeightLoader:
    return WeightLoader(weights, BuildContext(dtype, CPU, 64), packing)


def pieces_of(weights: CodedWeights, columns: slice = slice(None)) -> list[TensorSlice]:
    return [TensorSlice(name, (48, INPUTS), slice(3, 44), columns) for name in weights.forms]


def exact_inputs(rows: int, width: int, group: int) -> torch.Tensor:
    """Activations that eight bits hold: whole numbers, of which every group has a 127, where none is cut off."""
    x = torch.randint(-126, 127, (rows, -(-width // group), group), generator=generator(9)).float()
    x[..., 0] = 127
    return x.flatten(1)[:, :width].bfloat16()


ORDER = torch.randperm(INPUTS, generator=generator(5))
FORMS = {
    "four bits": ([CodeForm(4, 32), CodeForm(4, 128)], (4, 32, Zeros.MIDDLE)),
    "small groups need eight bits": ([CodeForm(4, 16), CodeForm(4, 64)], (8, 16, Zeros.MIDDLE)),
    "by output": ([CodeForm(8, 0), CodeForm(8, 0)], (8, 0, Zeros.MIDDLE)),
    "by output of four bits": ([CodeForm(4, 0)], (4, 64, Zeros.MIDDLE)),
    "one group": ([CodeForm(4, INPUTS, Zeros.POINTS)], (4, 64, Zeros.POINTS)),
    "points beside none": ([CodeForm(4, 64, Zeros.POINTS), CodeForm(8, 64)], (8, 64, Zeros.POINTS)),
    "offsets beside none": ([CodeForm(4, 32, Zeros.OFFSETS), CodeForm(8, 16)], (8, 16, Zeros.OFFSETS)),
    "offsets beside points": ([CodeForm(4, 32, Zeros.OFFSETS), CodeForm(4, 64, Zeros.POINTS)], (4, 32, Zeros.OFFSETS)),
    "large groups": ([CodeForm(4, 256)], (4, 64, Zeros.MIDDLE)),
    "in another order": ([CodeForm(4, 64, order=ORDER), CodeForm(4, 128, order=ORDER)], (4, 64, Zeros.MIDDLE)),
}


@KERNELS
@pytest.mark.parametrize("case", FORMS)
def test_kernels_compute_with_the_codes_of_any_form(case: str) -> None:
    forms, (bits, group, zeros) = FORMS[case]
    weights = CodedWeights({str(i): form for i, form in enumerate(forms)})
    pieces, loader = pieces_of(weights), loader_of(weights)
    common = loader.common_form(pieces)
    assert common is not None
    assert (common.bits, common.group_size, common.zeros) == (bits, group, zeros)
    x = exact_inputs(3, INPUTS, group or INPUTS)
    if common.order is not None:
        x = x[:, torch.argsort(common.order)]
    right = x.double() @ torch.cat([weights.read(piece) for piece in pieces]).double().T
    found = build_matmul(loader, pieces, use=LM_HEAD)(x)
    assert found.dtype == torch.float32
    exact = case != "offsets beside points"
    assert ((found - right).abs().max() / right.abs().max()) < (2e-6 if exact else 1e-3)
    assert all(("exactly" in said) is exact for said in loader.served.lines())


@pytest.mark.parametrize("form", [None, CodeForm(4, 32), CodeForm(4, 64, Zeros.POINTS), CodeForm(4, 32, Zeros.OFFSETS)])
def test_every_second_output_of_a_matrix(form: CodeForm | None) -> None:
    weights = CodedWeights({"one": form})
    piece = TensorSlice("one", (48, INPUTS), slice(5, 48, 2))
    found = build_matmul(loader_of(weights), [piece])(exact_inputs(3, INPUTS, 32))
    right = exact_inputs(3, INPUTS, 32).double() @ weights.read(piece).double().T
    assert ((found - right).abs().max() / right.abs().max()) < 0.01


@KERNELS
@pytest.mark.parametrize(("start", "group"), [(64, 64), (32, 32), (16, 16), (8, 0)])
def test_a_rank_has_its_columns_of_groups(start: int, group: int) -> None:
    """Those that begin within a group have smaller ones; where kernels have none so small, weights become floats."""
    weights = CodedWeights({"one": CodeForm(4, 128, Zeros.POINTS)})
    [piece], loader = pieces_of(weights, slice(start, 300)), loader_of(weights)
    common = loader.common_form([piece])
    assert (common.group_size if common else 0) == group
    x = exact_inputs(2, 300 - start, group or 128)
    right = x.double() @ weights.read(piece).double().T
    assert ((build_matmul(loader, [piece])(x) - right).abs().max() / right.abs().max()) < 0.01


def test_orders_that_differ_or_are_cut_make_floats() -> None:
    other = CodeForm(4, 64, order=ORDER.flip(0))
    weights = CodedWeights({"one": CodeForm(4, 64, order=ORDER), "two": other})
    loader = loader_of(weights)
    assert loader.common_form(pieces_of(weights)) is None
    assert loader.common_form(pieces_of(weights, slice(0, 64))[:1]) is None
    x = torch.randn(4, INPUTS, generator=generator()).bfloat16()
    right = x.double() @ torch.cat([weights.read(piece) for piece in pieces_of(weights)]).double().T
    found = build_matmul(loader, pieces_of(weights))(x)
    assert ((found - right).abs().max() / right.abs().max()) < 0.02
    assert [each.kept for each in loader.served] == ["bfloat16"]


@pytest.mark.parametrize("case", FORMS)
def test_in_float32_a_product_is_with_the_weights_themselves(case: str) -> None:
    weights = CodedWeights({str(i): form for i, form in enumerate(FORMS[case][0])})
    pieces, x = pieces_of(weights, slice(0, 192)), torch.randn(4, 192, generator=generator())
    loader = loader_of(weights, torch.float32)
    right = x.double() @ torch.cat([weights.read(piece) for piece in pieces]).double().T
    assert ((build_matmul(loader, pieces)(x) - right).abs().max() / right.abs().max()) < 1e-5
    assert all(each.error == 0 and each.kept == "float32" for each in loader.served)


@KERNELS
def test_plain_matrices_beside_codes_and_routers_are_floats() -> None:
    weights = CodedWeights({"one": CodeForm(4, 32), "plain": None})
    loader = loader_of(weights)
    for pieces, use in ((pieces_of(weights), LM_HEAD), (pieces_of(weights)[:1], ROUTER)):
        assert not isinstance(build_matmul(loader, pieces, use=use), GroupedMatmul)


@KERNELS
@pytest.mark.parametrize("form", [CodeForm(4, 64, Zeros.OFFSETS, order=ORDER), CodeForm(8, 0)], ids=str)
def test_packed_codes_are_kept_and_found(form: CodeForm, tmp_path: Path) -> None:
    weights = CodedWeights({"one": form})
    x, cache = torch.randn(2, INPUTS, generator=generator()).bfloat16(), open_packing_cache(tmp_path / "cache", 1 << 24)
    packing = Packing(cache, "key", "test")
    first = build_matmul(loader_of(weights, packing=packing), pieces_of(weights))(x)
    packing.keep()
    weights.rows["one"].weights.zero_()
    loader = loader_of(weights, packing=Packing(cache, "key", "test"))
    assert torch.equal(build_matmul(loader, pieces_of(weights))(x), first)
    assert [each.error for each in loader.served] == [0]


def test_rounded_scales_are_said() -> None:
    weights = CodedWeights({"one": CodeForm(4, 32, exact=False)})
    loader = loader_of(weights)
    build_matmul(loader, pieces_of(weights))
    if library.level() is not None:
        assert "off by at most 0.05%" in loader.served.lines()[0]


def test_plain_weights_have_no_codes(checkpoint: Callable[..., Path]) -> None:
    weights = CheckpointWeights(checkpoint("llama"))
    piece = TensorSlice("model.embed_tokens.weight", (384, 64))
    assert weights.form(piece).codes is None
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight is stored as floats"):
        weights.codes(piece)


FLOATS, WHOLE_ROWS = CodeForm(8, 128, floats=True), CodeForm(8, 0, floats=True)


@pytest.mark.parametrize(
    ("forms", "columns", "width", "group"),
    [
        ([WHOLE_ROWS, WHOLE_ROWS], range(7, 50), 300, 0),
        ([FLOATS, FLOATS], range(256), 256, 128),
        ([FLOATS, WHOLE_ROWS], range(256), 256, 128),
        ([FLOATS], range(192, 384), 512, 64),  # a rank's columns begin within a group
        ([FLOATS], range(192), 192, 64),  # the last group is half a one
        ([FLOATS], range(48), 48, None),
        ([FLOATS, CodeForm(8, 128)], range(256), 256, None),
    ],
)
def test_floats_of_eight_bits_keep_their_values(
    forms: list[CodeForm], columns: range, width: int, group: int | None
) -> None:
    parts = [CodeRange(form, columns, width) for form in forms]
    common = common_form(parts)
    assert (common and common.group_size) == group
    for part in parts if common is not None else ():
        values = torch.randn(5, width, generator=generator(1)).to(torch.float8_e4m3fn)
        groups = -(-width // (part.form.group_size or width))
        rows = GroupedRows(values, torch.rand(5, groups, generator=generator(2)))
        turned = turn_codes(rows, part, common)
        assert turned.weights.dtype == torch.float8_e4m3fn
        right = dequantise_codes(rows, part.form)[:, columns.start : columns.stop]
        assert torch.equal(dequantise_codes(turned, common), right)
