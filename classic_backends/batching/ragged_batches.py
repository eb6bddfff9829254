"""Ragged batches: `batch_input` and `batch_output` of a model's config.

Requests of different shapes share a batch as one flat tensor; a batch input tells the model the place of each request's
elements. Source: https://github.com/triton-inference-server/server/blob/main/docs/user_guide/ragged_batching.md. Knows
nothing of requests.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.errors import Internal, InvalidArgument
from ...core.model import RawConfig

Shape = tuple[int, ...]

_TYPES = {"TYPE_INT32": np.int32, "TYPE_FP32": np.float32}


def _element_counts(shapes: Sequence[Shape]) -> NDArray[Any]:
    return np.array([np.prod(shape, dtype=np.int64) for shape in shapes], np.int64)


def _item_shapes(shapes: Sequence[Shape]) -> NDArray[Any]:
    """[items of the batch, dims of one]"""
    return np.array([shape[1:] for shape in shapes for _ in range(shape[0])], np.int64)


_KINDS: dict[str, Callable[[Sequence[Shape]], NDArray[Any]]] = {
    "BATCH_ELEMENT_COUNT": _element_counts,
    "BATCH_ACCUMULATED_ELEMENT_COUNT": lambda shapes: np.cumsum(_element_counts(shapes)),
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": lambda shapes: np.cumsum([0, *_element_counts(shapes)]),
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": lambda shapes: np.zeros(int(_element_counts(shapes).max()), np.int64),
    "BATCH_ITEM_SHAPE": _item_shapes,
    "BATCH_ITEM_SHAPE_FLATTEN": lambda shapes: _item_shapes(shapes).ravel(),
}


class BatchInput(NamedTuple):
    """A tensor `name` made from the shapes (with batch dimension) of the input `source` in each request."""

    name: str
    shape_kind: str
    source: str
    dtype: Any

    def build(self, shapes: Sequence[Shape]) -> NDArray[Any]:
        return _KINDS[self.shape_kind](shapes).astype(self.dtype)


class RaggedConfig(NamedTuple):
    """`outputs`: an output's name -> the input whose shape each request's part of it has."""

    inputs: tuple[BatchInput, ...] = ()
    outputs: Mapping[str, str] = {}


def read_ragged_config(raw: RawConfig) -> RaggedConfig:
    """Parse `batch_input` and `batch_output`.

    Raises:
        InvalidArgument: a kind, type or source is unknown; `field` names it.
    """
    names = {each["name"] for each in raw.get("input", ())}
    inputs: list[BatchInput] = []
    for asked in raw.get("batch_input", ()):
        kind, datatype = asked.get("kind", "BATCH_ELEMENT_COUNT"), asked.get("data_type")
        if kind not in _KINDS:
            raise InvalidArgument(f"unknown kind of batch input '{kind}'", field="batch_input.kind")
        if datatype not in _TYPES:
            raise InvalidArgument("a batch input must be of TYPE_INT32 or TYPE_FP32", field="batch_input.data_type")
        source = _read_source(asked, names, "batch_input")
        inputs += (BatchInput(name, kind, source, _TYPES[datatype]) for name in asked.get("target_name", ()))
    outputs: dict[str, str] = {}
    for asked in raw.get("batch_output", ()):
        outputs |= dict.fromkeys(asked.get("target_name", ()), _read_source(asked, names, "batch_output"))
    return RaggedConfig(tuple(inputs), outputs)


def _read_source(asked: RawConfig, names: set[str], field: str) -> str:
    sources = asked.get("source_input", ())
    if len(sources) != 1 or sources[0] not in names:
        message = f"'{field}' needs one source_input that is an input of the model, got {list(sources)}"
        raise InvalidArgument(message, field=f"{field}.source_input")
    return str(sources[0])


def split_flat_output(name: str, array: NDArray[Any], shapes: Sequence[Shape]) -> list[NDArray[Any]]:
    """The elements of an output, dealt out in these shapes.

    Raises:
        Internal: there are more or fewer.
    """
    counts = [int(np.prod(shape)) for shape in shapes]
    if array.size != sum(counts):
        raise Internal(f"output '{name}' has {array.size} elements for {sum(counts)} of the batch's requests")
    parts = np.split(array.ravel(), np.cumsum(counts)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
