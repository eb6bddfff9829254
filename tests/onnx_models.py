"""Small ONNX models, written with the `onnx` package."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

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


class LinearWeights(NamedTuple):
    """The weights of a linear layer: [in, out] and [out]."""

    weight: NDArray[np.float32]
    bias: NDArray[np.float32]


def write_mlp(file: Path, sizes: Sequence[int], seed: int = 0) -> list[LinearWeights]:
    """Write a model that makes OUTPUT [batch, last] of INPUT [batch, first] by linear layers with ReLU between them, of
    random weights, which are returned. `sizes`: of the input, of each hidden layer, of the output."""
    layers = list(_random_layers(sizes, seed))
    weights = {f"{part}{index}": array for index, layer in enumerate(layers) for part, array in layer._asdict().items()}
    inputs, outputs = (
        {name: (onnx.TensorProto.FLOAT, ("batch", size))} for name, size in (("INPUT", sizes[0]), ("OUTPUT", sizes[-1]))
    )
    write_model(file, list(_mlp_nodes(len(layers))), inputs, outputs, weights)
    return layers


def _random_layers(sizes: Sequence[int], seed: int) -> Iterator[LinearWeights]:
    rng = np.random.default_rng(seed)
    for inputs, outputs in pairwise(sizes):
        weight = rng.standard_normal((inputs, outputs), np.float32) / np.float32(inputs**0.5)
        yield LinearWeights(weight, rng.random(outputs, np.float32))


def _mlp_nodes(count: int) -> Iterator[onnx.NodeProto]:
    tensor = "INPUT"
    for index in range(count):
        last = index == count - 1
        product = "OUTPUT" if last else f"linear{index}"
        yield helper.make_node("Gemm", [tensor, f"weight{index}", f"bias{index}"], [product])
        if not last:
            tensor = f"relu{index}"
            yield helper.make_node("Relu", [product], [tensor])


def write_loop(file: Path) -> None:
    """Y is X, once GO is false: it never changes."""
    boolean, number = onnx.TensorProto.BOOL, onnx.TensorProto.FLOAT
    turn = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["goes"]), helper.make_node("Identity", ["x"], ["y"])],
        "turn",
        [helper.make_tensor_value_info(*spec) for spec in (("i", 7, []), ("go", boolean, []), ("x", number, [1]))],
        [helper.make_tensor_value_info(*spec) for spec in (("goes", boolean, []), ("y", number, [1]))],
    )
    nodes = [
        helper.make_node("Squeeze", ["GO"], ["goes_on"]),
        helper.make_node("Loop", ["", "goes_on", "X"], ["Y"], body=turn),
    ]
    write_model(file, nodes, {"GO": (boolean, [1]), "X": (number, [1])}, {"Y": (number, [1])})


def write_accumulator(file: Path, text_ids: bool = False) -> None:
    """SUM is X and the state S; TOLD is START, READY and END, and WHO the ID."""
    numbers, ids = onnx.TensorProto.INT32, onnx.TensorProto.STRING if text_ids else onnx.TensorProto.INT64
    nodes = [
        helper.make_node("Add", ["S", "X"], ["SUM"]),
        helper.make_node("Identity", ["SUM"], ["T"]),
        helper.make_node("Cast", ["READY"], ["ready"], to=numbers),
        helper.make_node("Cast", ["END"], ["ends"], to=numbers),
        helper.make_node("Concat", ["START", "ready", "ends"], ["TOLD"], axis=1),
        helper.make_node("Identity", ["ID"], ["WHO"]),
    ]
    types = {"X": numbers, "START": numbers, "READY": onnx.TensorProto.FLOAT, "END": onnx.TensorProto.BOOL}
    inputs = {name: (element, ("n", 1)) for name, element in (types | {"ID": ids, "S": numbers}).items()}
    made = {"SUM": (numbers, ("n", 1)), "TOLD": (numbers, ("n", 3)), "WHO": (ids, ("n", 1)), "T": (numbers, ("n", 1))}
    write_model(file, nodes, inputs, made)


ACCUMULATOR = """
platform: "onnxruntime_onnx"
max_batch_size: 4
input { name: "X" data_type: TYPE_INT32 dims: 1 }
output [
  { name: "SUM" data_type: TYPE_INT32 dims: 1 }, { name: "TOLD" data_type: TYPE_INT32 dims: 3 },
  { name: "WHO" data_type: TYPE_INT64 dims: 1 }
]
instance_group { count: 2 kind: KIND_CPU }
sequence_batching {
  control_input [
    { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } },
    { name: "READY" control { kind: CONTROL_SEQUENCE_READY fp32_false_true: [ 0, 1 ] } },
    { name: "END" control { kind: CONTROL_SEQUENCE_END bool_false_true: [ false, true ] } },
    { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_INT64 } }
  ]
  state { input_name: "S" output_name: "T" data_type: TYPE_INT32 dims: 1 }
}
"""
"""The config of `write_accumulator`; with text ids, INT64 is STRING."""
