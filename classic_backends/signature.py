"""The inputs and outputs of a model: between the tensors of requests and the arrays of its runtime.

Knows reshapes, ragged inputs, and which requests fit in one batch. Requests have passed the gateway's validation.
"""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..core.errors import Internal, InvalidArgument
from ..core.model import ModelConfig, RawConfig
from ..core.request import InferRequest
from ..core.tensor import NUMPY_TYPES, Tensor, TensorSpec
from .runtime import Arrays

Shape = tuple[int, ...]


class TensorBinding(NamedTuple):
    """One input or output. `reshape`: its dims as the model has them, where they differ; `ragged`: requests with
    different shapes share a batch, as one flat tensor."""

    name: str
    datatype: str
    dims: Shape
    reshape: Shape | None = None
    ragged: bool = False
    optional: bool = False


class ModelSignature:
    """`batched`: tensors have a batch dimension in front. `outputs`: all names, in order."""

    def __init__(self, config: ModelConfig) -> None:
        self.batched = config.max_batch_size > 0
        self.model_name = config.name
        self.inputs = _bindings(config.inputs, config.raw.get("input", ()))
        self._reshaped_inputs = {binding.name: binding for binding in self.inputs if binding.reshape is not None}
        self._outputs = {each.name: each for each in _bindings(config.outputs, config.raw.get("output", ()))}
        self.outputs = tuple(self._outputs)
        self._has_optional = any(binding.optional for binding in self.inputs)
        self._same_shape = tuple(each.name for each in self.inputs if -1 in each.dims and not each.ragged)
        # BF16 arrays are uint16: its bits.
        self._dtypes = {
            name: np.dtype(NUMPY_TYPES.get(binding.datatype, np.uint16)) for name, binding in self._outputs.items()
        }

    def to_arrays(self, request: InferRequest) -> dict[str, NDArray[Any]]:
        """The request's inputs in the model's shapes; ragged ones are not flattened."""
        arrays = {}
        for name, tensor in request.inputs.items():
            shape = tensor.shape
            if name in self._reshaped_inputs:
                binding = self._reshaped_inputs[name]
                shape = self._reshaped(shape, binding.dims, binding.reshape or ())
            arrays[name] = tensor.data if tensor.data.shape == shape else tensor.data.reshape(shape)
        return arrays

    def batch_size(self, request: InferRequest) -> int:
        """The request's items in a batch, at least 1."""
        if not self.batched or not request.inputs:
            return 1
        return max(1, next(iter(request.inputs.values())).shape[0])

    def batch_key(self, request: InferRequest) -> Hashable:
        """Equal for requests that fit in one batch: the shapes that must agree, and the optional inputs given."""
        given = request.inputs
        shapes = tuple([(name, given[name].shape[1:]) for name in self._same_shape if name in given])
        return (shapes, frozenset(given)) if self._has_optional else shapes

    def to_tensors(self, outputs: Arrays, requested: Sequence[str] | None) -> tuple[Tensor, ...]:
        """The `requested` outputs (None: all) of one request, in the model's order and in the shapes of clients. Raises
        `Internal` if an output is not as the config declares it."""
        bindings = self._outputs
        return tuple(
            [
                self._to_tensor(bindings[name], array)
                for name, array in outputs.items()
                if name in bindings and (requested is None or name in requested)
            ]
        )

    def _to_tensor(self, binding: TensorBinding, array: NDArray[Any]) -> Tensor:
        name, datatype = binding.name, binding.datatype
        if array.dtype != self._dtypes[name]:
            raise Internal(f"model '{self.model_name}' made output '{name}' of type {array.dtype}, not {datatype}")
        if binding.reshape is None:
            return Tensor(name, datatype, array.shape, array)
        shape = self._reshaped(array.shape, binding.reshape, binding.dims)
        try:
            return Tensor(name, datatype, shape, array.reshape(shape))
        except ValueError:
            made = f"made output '{name}' of shape {list(array.shape)}, not {list(shape)}"
            raise Internal(f"model '{self.model_name}' {made}") from None

    def _reshaped(self, shape: Shape, dims: Shape, to_dims: Shape) -> Shape:
        """`shape` has `dims`; the same elements with `to_dims`: its free ones take the free ones' sizes, in order."""
        batch = int(self.batched)
        free = (size for size, dim in zip(shape[batch:], dims, strict=False) if dim == -1)
        return (*shape[:batch], *(next(free, 1) if dim == -1 else dim for dim in to_dims))


def _bindings(specs: Sequence[TensorSpec], raw_tensors: Sequence[RawConfig]) -> tuple[TensorBinding, ...]:
    by_name, bindings = {raw["name"]: raw for raw in raw_tensors}, []
    for spec in specs:
        raw = by_name.get(spec.name, {})
        reshape = tuple(map(int, raw["reshape"].get("shape", ()))) if "reshape" in raw else None
        ragged = bool(raw.get("allow_ragged_batch", False))
        bindings.append(TensorBinding(spec.name, spec.datatype, spec.dims, reshape, ragged, spec.optional))
    return tuple(bindings)


def check_ragged_support(signature: ModelSignature, supported: bool, backend: str) -> None:
    """Raises `InvalidArgument` for ragged inputs that the backend does not support, or without batches."""
    ragged = [binding.name for binding in signature.inputs if binding.ragged]
    if ragged and not (supported and signature.batched):
        reason = "but max_batch_size is 0" if supported else f"which '{backend}' cannot do"
        message = f"input '{ragged[0]}' of model '{signature.model_name}' allows ragged batches, {reason}"
        raise InvalidArgument(message, field="input.allow_ragged_batch")
