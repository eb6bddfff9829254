"""JSON of v2 requests: a parser as lenient as Triton's, and typed access with Triton's error texts."""

import json
from typing import Any, TypeAlias

import orjson

from ..core.errors import CharoniaError, InvalidArgument
from ..core.request import ParameterValue

Buffer: TypeAlias = bytes | bytearray | memoryview

MAX_ID_LENGTH = 4096
"""The most characters of a request's id."""

JsonObject: TypeAlias = dict[str, Any]


def parse_json(body: Buffer, offset: int = 0) -> Any:
    """The value of a JSON text, in which NaN and infinities may be bare words. Raises `InvalidArgument`. `offset`:
    where the text begins in the body."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        try:
            return json.loads(bytes(body).decode())
        except (ValueError, RecursionError) as error:
            raise unreadable_json(error, offset) from None


def parse_json_object(body: Buffer) -> JsonObject:
    """The object that a body is. Raises `InvalidArgument` as `parse_json` does, and for another value."""
    value = parse_json(body)
    if not isinstance(value, dict):
        raise malformed_json("the body must be a JSON object")
    return value


def unreadable_json(error: ValueError | RecursionError, offset: int = 0) -> CharoniaError:
    """The error for a body that the standard library's parser cannot read."""
    if isinstance(error, json.JSONDecodeError):
        return malformed_json(error.msg, max(0, offset + error.pos))
    if isinstance(error, UnicodeDecodeError):
        return malformed_json(f"it is not UTF-8: {error.reason}", max(0, offset + error.start))
    deep = isinstance(error, RecursionError)
    return malformed_json("it is nested too deeply" if deep else "a number has too many digits", max(0, offset))


def malformed_json(reason: str, offset: int = 0) -> CharoniaError:
    return InvalidArgument(f"failed to parse the request JSON buffer: {reason} at {offset}")


def wrong_json_type(field: str, texts: str) -> CharoniaError:
    return InvalidArgument(f"Unable to parse '{field}': attempt to access JSON {texts}", field=field)


def required_member(of: JsonObject, key: str) -> Any:
    """Raises `InvalidArgument` where the member is missing."""
    if key not in of:
        message = f"Unable to parse '{key}': attempt to access non-existing object member '{key}'"
        raise InvalidArgument(message, field=key)
    return of[key]


def as_string(field: str, value: Any) -> str:
    """Raises `InvalidArgument` for a value of another type, as all functions below do."""
    if not isinstance(value, str):
        raise wrong_json_type(field, "non-string as string")
    try:
        if not value.isascii():
            value.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"Unable to parse '{field}': a lone surrogate is not text", field=field) from None
    return value


def as_request_id(value: Any) -> str:
    """The id of a request, bounded as it goes into responses, records and traces."""
    if isinstance(value, str) and len(value) > MAX_ID_LENGTH:
        raise InvalidArgument(
            f"'id' has {len(value)} characters, more than the {MAX_ID_LENGTH} there may be", field="id"
        )
    return as_string("id", value)


def as_boolean(field: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise wrong_json_type(field, "non-boolean as boolean")
    return value


def as_unsigned(field: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**64:
        raise wrong_json_type(field, "non-unsigned-integer as unsigned-integer")
    return value


def as_signed(field: str, value: Any) -> int:
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise wrong_json_type(field, "non-signed-integer as signed-integer")
    return value


def as_array(field: str, value: Any) -> list[Any]:
    if type(value) is not list:
        raise wrong_json_type(field, "non-array as array")
    return value


def as_object(field: str, value: Any) -> JsonObject:
    if type(value) is not dict:
        raise wrong_json_type(field, "non-object as object")
    return value


def as_parameter(key: str, value: Any) -> ParameterValue:
    """The value of a request parameter: text, number or boolean."""
    if isinstance(value, str):
        return as_string(key, value)
    if isinstance(value, bool | float) or (isinstance(value, int) and -(2**63) <= value < 2**64):
        return value
    if isinstance(value, int):
        raise InvalidArgument(f"parameter '{key}' must be between -2**63 and 2**64 - 1", field=key)
    message = f"parameter '{key}' has invalid type. It should be either 'int', 'bool', or 'string'."
    raise InvalidArgument(message, field=key)
