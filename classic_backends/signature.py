"""What a model takes and gives, as its runtime sees it: reshapes, ragged inputs, and which requests fit together.

Requests have passed the gateway's checks; here their tensors become the runtime's arrays, and its arrays tensors.
"""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..core.errors import Internal, InvalidArgument
from ..core.model import ConfigDocument, ModelConfig
from ..core.request import InferRequest
from ..core.tensor import NUMPY_TYPES, Tensor, TensorSpec
from .runtime import Arrays

Shape = tuple[int, ...]


class TensorBinding(NamedTuple):
    """One input or output. `reshape`: its dims as the model has them, where they differ; `ragged`: requests with
    different shapes share a batch, whose elements the model gets in one flat tensor."""

    name: str
    datatype: str
    dims: Shape
    reshape: Shape | None = None
    ragged: bool = False
    optional: bool = False


class ModelSignature:
    """`batched`: requests have a batch dimension in front. `outputs`: all names, in order."""

    def __init__(self, config: ModelConfig) -> None:
        self.batched = config.max_batch_size > 0
        self.model_name = config.name
        self.inputs = _sides(config.inputs, config.document.get("input", ()))
        self._reshaped_inputs = {side.name: side for side in self.inputs if side.reshape is not None}
        self._made = {side.name: side for side in _sides(config.outputs, config.document.get("output", ()))}
        self.outputs = tuple(self._made)
        self._optional = any(side.optional for side in self.inputs)
        self._alike = tuple(side.name for side in self.inputs if -1 in side.dims and not side.ragged)
        self._types = {name: _numpy_type(side.datatype) for name, side in self._made.items()}

    def to_arrays(self, request: InferRequest) -> dict[str, NDArray[Any]]:
        """The request's inputs in the model's shapes; ragged ones as they came."""
        arrays = {}
        for name, tensor in request.inputs.items():
            shape = tensor.shape
            if name in self._reshaped_inputs:
                side = self._reshaped_inputs[name]
                shape = self._reshaped(shape, side.dims, side.reshape or ())
            arrays[name] = tensor.data if tensor.data.shape == shape else tensor.data.reshape(shape)
        return arrays

    def batch_size(self, request: InferRequest) -> int:
        """How many items of a batch it is, at least 1."""
        if not self.batched or not request.inputs:
            return 1
        return max(1, next(iter(request.inputs.values())).shape[0])

    def batch_key(self, request: InferRequest) -> Hashable:
        """Equal for requests that fit in one batch: the shapes that must agree, and which optional inputs there are."""
        given = request.inputs
        shapes = tuple([(name, given[name].shape[1:]) for name in self._alike if name in given])
        return (shapes, frozenset(given)) if self._optional else shapes

    def to_tensors(self, made: Arrays, wanted: Sequence[str] | None) -> tuple[Tensor, ...]:
        """What one request gets: the model's outputs in its order, those `wanted` or all; their shapes as clients know
        them.

        Raises:
            Internal: the model made something other than its config says.
        """
        sides = self._made
        return tuple(
            [
                self._tensor(sides[name], array)
                for name, array in made.items()
                if name in sides and (wanted is None or name in wanted)
            ]
        )

    def _tensor(self, side: TensorBinding, array: NDArray[Any]) -> Tensor:
        if array.dtype != self._types[side.name]:
            message = f"model '{self.model_name}' made output '{side.name}' of type {array.dtype}, not {side.datatype}"
            raise Internal(message)
        if side.reshape is None:
            return Tensor(side.name, side.datatype, array.shape, array)
        shape = self._reshaped(array.shape, side.reshape, side.dims)
        try:
            return Tensor(side.name, side.datatype, shape, array.reshape(shape))
        except ValueError:
            message = (
                f"model '{self.model_name}' made output '{side.name}' of shape {list(array.shape)}, not {list(shape)}"
            )
            raise Internal(message) from None

    def _reshaped(self, shape: Shape, here: Shape, there: Shape) -> Shape:
        """`shape` has dims `here` and gets those of `there`: the free ones take the free ones' sizes, in order."""
        front = int(self.batched)
        free = (size for size, dim in zip(shape[front:], here, strict=False) if dim == -1)
        return (*shape[:front], *(next(free, 1) if dim == -1 else dim for dim in there))


def _sides(specs: Sequence[TensorSpec], documents: Sequence[ConfigDocument]) -> tuple[TensorBinding, ...]:
    by_name = {document["name"]: document for document in documents}
    return tuple(_side(spec, by_name.get(spec.name, {})) for spec in specs)


def _side(spec: TensorSpec, document: ConfigDocument) -> TensorBinding:
    reshape = tuple(map(int, document["reshape"].get("shape", ()))) if "reshape" in document else None
    ragged = bool(document.get("allow_ragged_batch", False))
    return TensorBinding(spec.name, spec.datatype, spec.dims, reshape, ragged, spec.optional)


def _numpy_type(datatype: str) -> np.dtype[Any]:
    """BF16 travels as the bits of uint16."""
    return np.dtype(NUMPY_TYPES.get(datatype, np.uint16))


def check_ragged_support(signature: ModelSignature, able: bool, backend: str) -> None:
    """Raises `InvalidArgument` where a config wants of its backend what that is not `able` to."""
    ragged = [side.name for side in signature.inputs if side.ragged]
    if ragged and not able:
        message = (
            f"input '{ragged[0]}' of model '{signature.model_name}' allows ragged batches, which '{backend}' cannot do"
        )
        raise InvalidArgument(message, field="input.allow_ragged_batch")
    if ragged and not signature.batched:
        message = (
            f"input '{ragged[0]}' of model '{signature.model_name}' allows ragged batches, but max_batch_size is 0"
        )
        raise InvalidArgument(message, field="input.allow_ragged_batch")
