"""Experts whose matrices a checkpoint stores as one tensor [experts, outputs, inputs], under the names that they have
in checkpoints which store one by one."""

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

_STACKED = re.compile(
    r"(?P<mixture>.*)\.(?:(?P<own>input_linear|output_linear)\.weight|experts\.(?P<part>gate_up_proj|down_proj))"
)
"""Names of such tensors: Granite's, and Qwen 3.5's."""


class StackedMatrix(NamedTuple):
    """Matrix `number` of the tensor `stored`."""

    stored: str
    number: int


def stacked_matrices(names: Iterable[str], shape_of: Callable[[str], tuple[int, ...]]) -> dict[str, StackedMatrix]:
    """The matrices of all such tensors among `names`, by names such as `layers.0.mlp.experts.3.down_proj.weight`."""
    matrices: dict[str, StackedMatrix] = {}
    for name in names:
        found = _STACKED.fullmatch(name)
        if found is None or len(shape := shape_of(name)) != 3:
            continue
        part = found["own"] or found["part"]
        for index in range(shape[0]):
            matrices[f"{found['mixture']}.experts.{index}.{part}.weight"] = StackedMatrix(name, index)
    return matrices
