"""Why a request or a call of the model's API failed, as the API tells it."""

from __future__ import annotations


class TritonModelException(Exception):
    """A call of the API failed."""


class TritonError:
    """Why a request failed, for the client. `code` decides about the HTTP and gRPC status."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        if code not in ERROR_NAMES:
            raise TritonModelException(f"{code} is no code of TritonError")
        self._message, self._code = str(message), code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


ERROR_NAMES = {number: name for name, number in vars(TritonError).items() if isinstance(number, int)}
