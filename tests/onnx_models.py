"""Small ONNX models, written with the `onnx` package; those with weights of their own are bench's."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from charonia.bench.onnx_mlp import write_mlp

__all__ = ["write_identity", "write_mlp", "write_model"]

Shapes = Mapping[str, tuple[int, Sequence[int | str | None]]]
"""Name -> element type of TensorProto, and shape; text is a free dimension."""


def write_model(
    file: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Shapes,
    outputs: Shapes,
    weights: Mapping[str, NDArray[Any]] | None = None,
) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    values = [helper.make_tensor_value_info(name, *spec) for name, spec in inputs.items()]
    made = [helper.make_tensor_value_info(name, *spec) for name, spec in outputs.items()]
    constants = [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()]
    graph = helper.make_graph(nodes, "graph", values, made, constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), file)


def write_identity(file: Path, element: int, shape: Sequence[int | str | None] = ("n", "m")) -> None:
    """Y is X."""
    node = helper.make_node("Identity", ["X"], ["Y"])
    write_model(file, [node], {"X": (element, shape)}, {"Y": (element, shape)})
