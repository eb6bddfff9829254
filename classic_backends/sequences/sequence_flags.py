"""What a request says of its sequence: its id, and whether it begins or ends it. v2's sequence extension.

Knows nothing of which sequences there are.
"""

import numpy as np

from ...core.errors import InvalidArgument, request_id_prefix
from ...core.request import InferRequest
from .sequence_config import SequenceConfig
from .sequence_context import SequenceFlags, SequenceId
from .sequence_tensors import ControlKind, ControlTensor


class SequenceFlagReader:
    """Of the requests to `model`, each of `rows` items of a batch."""

    def __init__(self, model: str, rules: SequenceConfig) -> None:
        self._model = model
        self._told = next((control for control in rules.controls if control.kind is ControlKind.ID), None)

    def read_flags(self, request: InferRequest, rows: int) -> SequenceFlags:
        """Raises `InvalidArgument` where it is no request of a sequence of this model."""
        if rows != 1:
            message = "must specify batch-size 1 due to requirements of sequence batcher"
            raise InvalidArgument(f"inference request to model '{self._model}' {message}")
        found = self._id(request)
        return SequenceFlags(found, _flag(request, "sequence_start"), _flag(request, "sequence_end"))

    def warm_up_flags(self) -> SequenceFlags:
        """Of a sequence of one request that nobody asked for."""
        text = self._told is not None and self._told.datatype == "BYTES"
        return SequenceFlags("warmup" if text else 1, start=True, end=True)

    def _id(self, request: InferRequest) -> SequenceId:
        found = request.parameters.get("sequence_id", 0)
        if isinstance(found, bool) or not isinstance(found, (int, str)):
            message = f"parameter 'sequence_id' must be an integer or a string, got {found!r}"
            raise InvalidArgument(f"{request_id_prefix(request.id)}{message}", field="sequence_id")
        if not found:
            message = "must specify a non-zero or non-empty correlation ID"
            raise InvalidArgument(f"inference request to model '{self._model}' {message}", field="sequence_id")
        if self._told is not None:
            self._check(self._told, found, request)
        return found

    def _check(self, control: ControlTensor, found: SequenceId, request: InferRequest) -> None:
        """The model can be told this id."""
        text = isinstance(found, str)
        if text != (control.datatype == "BYTES"):
            kind = f"data-type is '{'BYTES' if text else 'UINT64'}'"
            expected = f"but model '{self._model}' expects '{control.datatype}'"
            message = f"sequence batching control '{control.name}' {kind}, {expected}"
            raise InvalidArgument(f"{request_id_prefix(request.id)}{message}", field="sequence_id")
        if isinstance(found, int):
            limits = np.iinfo(control.datatype.lower())
            if not limits.min <= found <= limits.max:
                message = f"sequence id {found} does not fit '{control.name}' of type {control.datatype}"
                raise InvalidArgument(f"{request_id_prefix(request.id)}{message}", field="sequence_id")


def _flag(request: InferRequest, name: str) -> bool:
    value = request.parameters.get(name, False)
    if not isinstance(value, bool):
        message = f"parameter '{name}' must be true or false, got {value!r}"
        raise InvalidArgument(f"{request_id_prefix(request.id)}{message}", field=name)
    return value
