"""JSON as v2's requests bring it: its parser's leniency, and typed access with the texts of its errors.

Knows v2's sections 3.1 and 3.2; not what the values mean.
"""

import json
from typing import Any, TypeAlias

import orjson

from ..core.errors import CharoniaError, InvalidArgument
from ..core.request import Scalar

Buffer: TypeAlias = bytes | bytearray | memoryview

LONGEST_ID = 4096
"""Characters of a request's id."""

Document: TypeAlias = dict[str, Any]


def parse(body: Buffer, offset: int = 0) -> Any:
    """The value that the body is; NaN and infinities are read as Triton reads them. `offset`: where the body begins in
    what the client sent.

    Raises:
        InvalidArgument: it is not JSON.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return _parse_leniently(body, offset)


def parse_object(body: Buffer) -> Document:
    """Raises `InvalidArgument` for what is no JSON object, too."""
    value = parse(body)
    if not isinstance(value, dict):
        raise malformed("the body must be a JSON object")
    return value


def _parse_leniently(body: Buffer, offset: int) -> Any:
    try:
        return json.loads(bytes(body).decode())
    except (ValueError, RecursionError) as error:
        raise unreadable(error, offset) from None


def unreadable(error: ValueError | RecursionError, offset: int = 0) -> CharoniaError:
    """What the standard library's parser cannot read, or not even as text."""
    if isinstance(error, json.JSONDecodeError):
        return malformed(error.msg, max(0, offset + error.pos))
    if isinstance(error, UnicodeDecodeError):
        return malformed(f"it is not UTF-8: {error.reason}", max(0, offset + error.start))
    deep = isinstance(error, RecursionError)
    return malformed("it is nested too deeply" if deep else "a number has too many digits", max(0, offset))


def malformed(reason: str, offset: int = 0) -> CharoniaError:
    return InvalidArgument(f"failed to parse the request JSON buffer: {reason} at {offset}")


def mismatch(field: str, texts: str) -> CharoniaError:
    return InvalidArgument(f"Unable to parse '{field}': attempt to access JSON {texts}", field=field)


def member(of: Document, key: str) -> Any:
    """Raises `InvalidArgument` where it is missing."""
    if key not in of:
        message = f"Unable to parse '{key}': attempt to access non-existing object member '{key}'"
        raise InvalidArgument(message, field=key)
    return of[key]


def string(field: str, value: Any) -> str:
    """Raises `InvalidArgument` for what is no text, as all below it for what is not theirs."""
    if not isinstance(value, str):
        raise mismatch(field, "non-string as string")
    if not value.isascii():
        _check_text(field, value)
    return value


def request_id(value: Any) -> str:
    """It goes into answers, records and traces."""
    if isinstance(value, str) and len(value) > LONGEST_ID:
        raise InvalidArgument(f"'id' has {len(value)} characters, more than the {LONGEST_ID} there may be", field="id")
    return string("id", value)


def _check_text(field: str, value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"Unable to parse '{field}': a lone surrogate is not text", field=field) from None


def boolean(field: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise mismatch(field, "non-boolean as boolean")
    return value


def unsigned(field: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**64:
        raise mismatch(field, "non-unsigned-integer as unsigned-integer")
    return value


def signed(field: str, value: Any) -> int:
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise mismatch(field, "non-signed-integer as signed-integer")
    return value


def array(field: str, value: Any) -> list[Any]:
    if type(value) is not list:
        raise mismatch(field, "non-array as array")
    return value


def object_(field: str, value: Any) -> Document:
    if type(value) is not dict:
        raise mismatch(field, "non-object as object")
    return value


def parameter(key: str, value: Any) -> Scalar:
    """What a model may be told by a parameter: text, number or boolean."""
    if isinstance(value, str):
        return string(key, value)
    if isinstance(value, bool | float) or (isinstance(value, int) and -(2**63) <= value < 2**64):
        return value
    if isinstance(value, int):
        raise InvalidArgument(f"parameter '{key}' must be between -2**63 and 2**64 - 1", field=key)
    message = f"parameter '{key}' has invalid type. It should be either 'int', 'bool', or 'string'."
    raise InvalidArgument(message, field=key)
