"""ONNX models to measure with: linear layers with ReLU between them, of random FP32 weights. Needs the package onnx."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Sizes = Sequence[int]
"""Wide of the input, of each hidden layer, of the output."""


class LinearWeights(NamedTuple):
    """The weights of a linear layer: [in, out] and [out]."""

    weight: NDArray[np.float32]
    bias: NDArray[np.float32]


def write_mlp(file: Path, sizes: Sizes, seed: int = 0) -> list[LinearWeights]:
    """Write a model that makes OUTPUT [batch, last] of INPUT [batch, first]; what it is made of."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    layers = list(_layers(sizes, seed))
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", size])
        for name, size in (("INPUT", sizes[0]), ("OUTPUT", sizes[-1]))
    ]
    weights = [
        numpy_helper.from_array(array, f"{part}{index}")
        for index, layer in enumerate(layers)
        for part, array in layer._asdict().items()
    ]
    graph = helper.make_graph(list(_nodes(len(layers))), "mlp", values[:1], values[1:], weights)
    file.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), file)
    return layers


def _layers(sizes: Sizes, seed: int) -> Iterator[LinearWeights]:
    rng = np.random.default_rng(seed)
    for wide, out in pairwise(sizes):
        weight = rng.standard_normal((wide, out), np.float32) / np.float32(wide**0.5)
        yield LinearWeights(weight, rng.random(out, np.float32))


def _nodes(count: int) -> Iterator[Any]:
    from onnx import helper

    here = "INPUT"
    for index in range(count):
        last = index == count - 1
        there = "OUTPUT" if last else f"linear{index}"
        yield helper.make_node("Gemm", [here, f"weight{index}", f"bias{index}"], [there])
        if not last:
            here = f"relu{index}"
            yield helper.make_node("Relu", [there], [here])
