"""Experts whose matrices a checkpoint stores as one tensor [experts, ...], under the names that they have where each is
stored by itself."""

import re
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from torch import Tensor

_STACKED = re.compile(
    r"(?P<mixture>.*)\.(?:(?P<own>input_linear|output_linear)\.weight"
    r"|experts\.(?P<part>gate_up_proj|down_proj)(?:_(?P<piece>bias|blocks|scales))?)"
)
"""Names of such tensors: Granite's, and those of Qwen 3.5, Qwen3-VL or, with pieces, gpt-oss."""

_BIASED = "experts.gate_up_proj_bias"
"""A mixture that has it is laid out as gpt-oss's: outputs of gate and up take turns, and whole matrices are
transposed."""

_HALVES = {"gate_proj": 0, "up_proj": 1}
"""gpt-oss's first output of each."""


class StackedMatrix(NamedTuple):
    """Matrix `number` of the tensor `stored`, or some of its outputs: every `step`th from `first` on."""

    stored: str
    number: int
    first: int = 0
    step: int = 1
    transposed: bool = False
    """Its inputs come before its outputs."""

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the matrix, in a tensor with the shape `stored`."""
        own = stored[:0:-1] if self.transposed else stored[1:]
        return own[0] // self.step, *own[1:]

    def view(self, tensor: Any, rows: range, columns: slice) -> Tensor:
        """Some outputs and inputs, of the tensor or `safe_open`'s slice of it; of a vector `columns` are not read."""
        outputs = slice(rows.start * self.step, rows.stop * self.step)
        every = slice(self.first, None, self.step)
        view: Tensor
        if self.transposed:
            view = tensor[self.number, columns, outputs][:, every].t()
        elif len(tensor.shape if isinstance(tensor, Tensor) else tensor.get_shape()) == 2:
            view = tensor[self.number, outputs][every]
        else:
            view = tensor[self.number, outputs, columns][every]
        return view


def stacked_matrices(names: Iterable[str], shape_of: Callable[[str], tuple[int, ...]]) -> dict[str, StackedMatrix]:
    """The matrices of all such tensors among `names`, by names such as `layers.0.mlp.experts.3.down_proj.weight`, and
    their pieces by names such as `layers.0.mlp.experts.3.down_proj.bias`."""
    matrices: dict[str, StackedMatrix] = {}
    known = set(names)
    for name in known:
        match = _STACKED.fullmatch(name)
        if match is None:
            continue
        mixture = match["mixture"]
        part = match["own"] or match["part"]
        piece = match["piece"]
        turning = f"{mixture}.{_BIASED}" in known
        if len(shape := shape_of(name)) != 3 and not turning:
            continue
        transposed = turning or _inputs_first(mixture, known, shape_of)
        halves = _HALVES if turning and part == "gate_up_proj" else {part: 0}
        for number in range(shape[0]):
            for half, first in halves.items():
                stored = StackedMatrix(name, number, first, len(halves), transposed and piece is None)
                matrices[f"{mixture}.experts.{number}.{half}.{piece or 'weight'}"] = stored
    return matrices


def _inputs_first(mixture: str, names: Collection[str], shape_of: Callable[[str], tuple[int, ...]]) -> bool:
    """Whether a mixture's matrices are stored as [inputs, outputs], as Qwen3-VL's are: what the second takes, the first
    one gives twice, so their shapes tell."""
    first, second = f"{mixture}.experts.gate_up_proj", f"{mixture}.experts.down_proj"
    if first not in names or second not in names:
        return False
    return shape_of(first)[2] == 2 * shape_of(second)[1]
