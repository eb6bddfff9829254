"""The parts of quantised matrices in safetensors: in all formats several tensors, found by the matrix's name."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..cpu.matmul import GroupedRows
from .code_forms import StoredForm, dequantise_codes
from .model_spec import CheckpointError
from .weights import STORED, WHOLE, CheckpointWeights, TensorSlice

INTEGERS, BYTES, SCALES = {"I32": torch.int32}, {"I8": torch.int8}, STORED
"""The dtypes that the tensors of a matrix may have: safetensors' name -> torch's."""

NARROW = (torch.float16, torch.bfloat16)
"""The dtypes of scales that eleven bits hold."""


class MatrixReader(Protocol):
    """A quantised matrix."""

    form: StoredForm

    def codes(self, rows: slice) -> GroupedRows:
        """Some outputs in `form.codes`, which must not be None."""

    def floats(self, rows: slice) -> Tensor:
        """Some outputs as float32."""


class MatrixParts(NamedTuple):
    """The tensors of the matrix `name`, whose names have a common beginning, and its shape in the model."""

    weights: CheckpointWeights
    name: str
    outputs: int
    inputs: int

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    def has(self, part: str) -> bool:
        return f"{self.module}.{part}" in self.weights

    def shape(self, part: str) -> tuple[int, ...]:
        return self.weights.described(f"{self.module}.{part}")[1]

    def dtype(self, part: str) -> torch.dtype | str:
        return self.weights.described(f"{self.module}.{part}")[0]

    def view(self, part: str, shape: tuple[int, ...], dtypes: Mapping[str, torch.dtype], *where: slice) -> Tensor:
        rows, columns = (*where, WHOLE, WHOLE)[:2]
        return self.weights.view(TensorSlice(f"{self.module}.{part}", shape, rows, columns), dtypes)

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.weights.where}: {self.name}: {message}")


class CodedMatrix:
    """A matrix whose floats are made of its codes."""

    form: StoredForm

    def codes(self, rows: slice) -> GroupedRows:
        raise NotImplementedError

    def floats(self, rows: slice) -> Tensor:
        assert self.form.codes is not None, "it is stored as codes"
        return dequantise_codes(self.codes(rows), self.form.codes)


def group_count(inputs: int, size: int) -> int:
    """The groups of an output whose inputs share a scale, `size` each; 0: all of them."""
    return 1 if size == 0 else -(-inputs // size)


def scale_shapes(parts: MatrixParts, size: int) -> list[tuple[int, ...]]:
    """The shapes that scales may have: one for each group, output (0), or for all."""
    if size:
        return [(parts.outputs, group_count(parts.inputs, size))]
    return [(parts.outputs, 1), (parts.outputs,), (1,), (), (1, 1)]


def scale_rows(
    parts: MatrixParts,
    shape: tuple[int, ...],
    rows: slice,
    name: str = "weight_scale",
    dtypes: Mapping[str, torch.dtype] = SCALES,
) -> Tensor:
    """The scales of some outputs, float32 [rows, groups], from a tensor of one of `scale_shapes`."""
    if shape in ((), (1,), (1, 1)) and parts.outputs > 1:
        scale = parts.view(name, shape, dtypes).float().reshape(1, 1)
        return scale.expand(len(range(*rows.indices(parts.outputs))), 1)
    return parts.view(name, shape, dtypes, rows).float().reshape(-1, shape[1] if len(shape) == 2 else 1)


def input_order(parts: MatrixParts, name: str, size: int) -> Tensor | None:
    """The inputs in the order of their groups, which `name` says; None: they are in order. Raises `CheckpointError` if
    a group has more or fewer inputs than the others."""
    groups = parts.view(name, (parts.inputs,), INTEGERS).long()
    if bool((groups < 0).all()) or size == 0:
        return None  # not filled in: there is no order
    order = torch.argsort(groups, stable=True)
    right = torch.arange(parts.inputs) // size
    if not torch.equal(groups[order], right):
        raise parts.error(f"{name} does not put {size} inputs into each group")
    return None if torch.equal(groups, right) else order


def form_label(method: str, bits: int, size: int, order: Tensor | None = None) -> str:
    groups = f" in groups of {size}" if size else ""
    return f"{method} {bits} bits{groups}" + (", inputs in an order of their own" if order is not None else "")
