"""Small ONNX models, written with the `onnx` package alone; no weights but those given."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

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


def write_mlp(file: Path, sizes: Sequence[int], seed: int = 0) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """OUTPUT is what linear layers of these sizes with ReLU between make of INPUT, FP32. Returns weights and biases."""
    rng = np.random.default_rng(seed)
    layers = [
        (rng.standard_normal((wide, long)).astype(np.float32) / np.float32(wide) ** 0.5, rng.random(long, np.float32))
        for wide, long in pairwise(sizes)
    ]
    nodes, here = [], "INPUT"
    for index in range(len(layers)):
        last = index == len(layers) - 1
        there = "OUTPUT" if last else f"linear{index}"
        nodes.append(helper.make_node("Gemm", [here, f"weight{index}", f"bias{index}"], [there]))
        if not last:
            here = f"relu{index}"
            nodes.append(helper.make_node("Relu", [there], [here]))
    weights = {f"weight{index}": weight for index, (weight, _) in enumerate(layers)}
    weights |= {f"bias{index}": bias for index, (_, bias) in enumerate(layers)}
    given = {"INPUT": (TensorProto.FLOAT, ["batch", sizes[0]])}
    write_model(file, nodes, given, {"OUTPUT": (TensorProto.FLOAT, ["batch", sizes[-1]])}, weights)
    return layers
