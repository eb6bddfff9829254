"""Ragged batches: tensors that tell a model where each request's elements lie, and outputs cut up the same way.

`batch_input` and `batch_output` of a config (model-config.md section 3.4). Knows nothing of requests.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.errors import Internal, InvalidArgument
from ...core.model import ConfigDocument

Shape = tuple[int, ...]

_TYPES = {"TYPE_INT32": np.int32, "TYPE_FP32": np.float32}


class BatchInput(NamedTuple):
    """A tensor `name` made from the shapes that `source` has in each request, their batch dimension included."""

    name: str
    shape_kind: str
    source: str
    dtype: Any

    def build(self, shapes: Sequence[Shape]) -> NDArray[Any]:
        return _KINDS[self.shape_kind](shapes).astype(self.dtype)


class RaggedConfig(NamedTuple):
    """What a config says of it. `outputs`: name of an output -> the input whose shape each request's part has."""

    inputs: tuple[BatchInput, ...] = ()
    outputs: Mapping[str, str] = {}


def read_ragged_config(document: ConfigDocument) -> RaggedConfig:
    """Raises `InvalidArgument` for what is not there to refer to; `field` names it."""
    names = {each["name"] for each in document.get("input", ())}
    inputs = tuple(made for each in document.get("batch_input", ()) for made in _batch_inputs(each, names))
    outputs = {name: source for each in document.get("batch_output", ()) for name, source in _targets(each, names)}
    return RaggedConfig(inputs, outputs)


def _batch_inputs(asked: ConfigDocument, names: set[str]) -> list[BatchInput]:
    kind = asked.get("kind", "BATCH_ELEMENT_COUNT")
    if kind not in _KINDS:
        raise InvalidArgument(f"unknown kind of batch input '{kind}'", field="batch_input.kind")
    if asked.get("data_type") not in _TYPES:
        raise InvalidArgument("a batch input must be of TYPE_INT32 or TYPE_FP32", field="batch_input.data_type")
    source, dtype = _source(asked, names, "batch_input"), _TYPES[asked["data_type"]]
    return [BatchInput(name, kind, source, dtype) for name in asked.get("target_name", ())]


def _targets(asked: ConfigDocument, names: set[str]) -> list[tuple[str, str]]:
    source = _source(asked, names, "batch_output")
    return [(name, source) for name in asked.get("target_name", ())]


def _source(asked: ConfigDocument, names: set[str], field: str) -> str:
    sources = asked.get("source_input", ())
    if len(sources) != 1 or sources[0] not in names:
        message = f"'{field}' needs one source_input that is an input of the model, got {list(sources)}"
        raise InvalidArgument(message, field=f"{field}.source_input")
    return str(sources[0])


def split_flat_output(name: str, made: NDArray[Any], shapes: Sequence[Shape]) -> list[NDArray[Any]]:
    """The elements of an output, dealt out in these shapes.

    Raises:
        Internal: there are more or fewer.
    """
    counts = [int(np.prod(shape)) for shape in shapes]
    if made.size != sum(counts):
        raise Internal(f"output '{name}' has {made.size} elements for {sum(counts)} of the batch's requests")
    parts = np.split(made.ravel(), np.cumsum(counts)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _counts(shapes: Sequence[Shape]) -> NDArray[Any]:
    return np.array([np.prod(shape, dtype=np.int64) for shape in shapes], np.int64)


def _accumulated(shapes: Sequence[Shape]) -> NDArray[Any]:
    return np.cumsum(_counts(shapes))


def _accumulated_with_zero(shapes: Sequence[Shape]) -> NDArray[Any]:
    return np.concatenate([[0], _accumulated(shapes)])


def _longest(shapes: Sequence[Shape]) -> NDArray[Any]:
    """Its length is what it says."""
    return np.zeros(int(_counts(shapes).max()), np.int64)


def _item_shapes(shapes: Sequence[Shape]) -> NDArray[Any]:
    """[items of the batch, dims of one]"""
    return np.array([shape[1:] for shape in shapes for _ in range(shape[0])], np.int64)


def _flat_item_shapes(shapes: Sequence[Shape]) -> NDArray[Any]:
    return _item_shapes(shapes).ravel()


_KINDS: dict[str, Callable[[Sequence[Shape]], NDArray[Any]]] = {
    "BATCH_ELEMENT_COUNT": _counts,
    "BATCH_ACCUMULATED_ELEMENT_COUNT": _accumulated,
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": _accumulated_with_zero,
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": _longest,
    "BATCH_ITEM_SHAPE": _item_shapes,
    "BATCH_ITEM_SHAPE_FLATTEN": _flat_item_shapes,
}
