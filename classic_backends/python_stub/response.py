"""The API's responses, and how they cross to the server and back."""

from __future__ import annotations

import json
from typing import Any, Sequence

from .messages import ErrorMessage, ResponseMessage
from .tensor import Tensor, received_tensor, write_tensors
from .triton_error import ERROR_NAMES, TritonError, TritonModelException


class InferenceResponse:
    """The response to a request: output tensors, or an error; and parameters, a dict of bool, int and str."""

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: dict[str, Any] | str | None = None,
    ) -> None:
        for tensor in output_tensors:
            if not isinstance(tensor, Tensor):
                raise TritonModelException(f"An output must be a Tensor, found type '{type(tensor)}'.")
        self._outputs, self._error = list(output_tensors), error
        self._parameters = parameters_json(parameters)

    def output_tensors(self) -> list[Tensor]:
        return self._outputs

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        """A JSON object."""
        return self._parameters


def parameters_json(parameters: dict[str, Any] | str | None) -> str:
    if parameters is None:
        return "{}"
    if isinstance(parameters, str):
        return parameters
    for name, value in parameters.items():
        if not isinstance(name, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type '{type(name)}'.")
        if not isinstance(value, (bool, int, str)):
            expected = "Expect parameters values to have type bool/int/str"
            raise TritonModelException(f"{expected}, found type '{type(value)}'.")
    return json.dumps(parameters)


def response_from_message(message: ResponseMessage) -> InferenceResponse:
    if message.error is not None:
        code = {name: number for number, name in ERROR_NAMES.items()}.get(message.error.code, TritonError.UNKNOWN)
        return InferenceResponse(error=TritonError(message.error.message, code), parameters=message.parameters or None)
    tensors = [received_tensor(each) for each in message.outputs]
    return InferenceResponse(tensors, parameters=message.parameters or None)


def response_to_message(response: InferenceResponse, requested: Sequence[str]) -> ResponseMessage:
    """A response as it travels: its tensors written, those that no one asked for dropped."""
    if response._error is not None:
        error = ErrorMessage(ERROR_NAMES[response._error.code()], response._error.message())
        return ResponseMessage([], error, response._parameters)
    wanted = (tensor for tensor in response._outputs if not requested or tensor._name in requested)
    return ResponseMessage(write_tensors(wanted), None, response._parameters)
