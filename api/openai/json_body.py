"""The fields of a JSON body in OpenAI's manner: decoded into a struct, what is wrong named by its path.

A field is supported, harmless, neutral at the value given, or refused by name: nothing is silently ignored. Knows no
endpoint.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar

import msgspec
import orjson

from ...core.errors import InvalidArgument
from ...core.suggestion import did_you_mean
from ...core.validation_errors import describe_validation_error
from ..chunked_json import (
    MAX_IDS,
    MAX_VALUES,
    PIECE_BYTES,
    TooManyValues,
    UnparsedContainer,
    ValueBudget,
    parse_fully,
    read_long_json,
)
from ..json_values import Buffer

NoOpValues: TypeAlias = Mapping[str, tuple[Any, ...]]
"""Fields that are known and not supported, and the values besides null that ask for nothing."""

IGNORED_FIELDS = frozenset({"user", "metadata", "store", "safety_identifier", "service_tier"}) | {
    *("prompt_cache_key", "prompt_cache_retention")
}
"""Fields that change nothing about the answer."""

JsonBody: TypeAlias = bytes | dict[str, Any]
"""Of a request: its text, or its members if it is long."""

_IDS = frozenset({"prompt", "input", "tokens", "allowed_token_ids"})
_TEXTS = frozenset({"prompt", "input", "query", "guided_decoding_guide", "chat_template"})
"""Fields whose texts may be as long as the body."""

_Body = TypeVar("_Body", bound=msgspec.Struct)
_Any = TypeVar("_Any")


async def load_body(body: bytes | bytearray) -> JsonBody:
    """A long body's members, of which none has more values than `MAX_VALUES`, or token ids than `MAX_IDS`. A short
    body as it is: it is parsed at once.

    Raises:
        InvalidArgument: it is no JSON object, or has more.
    """
    if len(body) <= PIECE_BYTES:
        return bytes(body)
    found = await read_long_json(body, _parse)
    if not isinstance(found, UnparsedContainer) or not found.is_object:
        raise InvalidArgument("the body must be a JSON object")
    members = await found.members(ValueBudget())
    for key, value in members.items():
        if isinstance(value, str) and len(value) > PIECE_BYTES and key not in _TEXTS:
            raise InvalidArgument(f"{key} has {len(value)} characters, more than there may be", field=key)
        try:
            members[key] = await parse_fully(value, ValueBudget(MAX_IDS if key in _IDS else MAX_VALUES))
        except TooManyValues as error:
            raise InvalidArgument(f"{key}: {error.message}", field=key) from None
    return members


def _parse(text: Buffer, offset: int) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidArgument(f"the body is not valid JSON: {error.msg} at {max(0, offset + error.pos)}") from None


def decode_body(body: JsonBody, kind: type[_Body], neutral: NoOpValues) -> _Body:
    """A JSON object with the fields of `kind`, harmless ones, and those of `neutral` at a value that asks for nothing.

    Raises:
        InvalidArgument: it is not; `field` names the culprit.
    """
    members = body if isinstance(body, dict) else _parse(body, 0)
    if not isinstance(members, dict):
        raise InvalidArgument("the body must be a JSON object")
    names = _names(kind)
    reject_unsupported(members, names | IGNORED_FIELDS, neutral, "")
    supported = {key: _whole(value) for key, value in members.items() if key in names}
    return convert_fields(supported, kind)


def _whole(value: Any) -> Any:
    """A number such as 8.0, alone or in a list, is an integer in JSON. One of more than 64 bits comes likewise."""
    if type(value) is float:
        return int(value) if value.is_integer() else value
    if type(value) is list and {float, list} & set(map(type, value)):
        return [_whole(each) for each in value]
    return value


@lru_cache
def _names(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(kind.__struct_fields__)


def reject_unsupported(members: Mapping[str, Any], known: frozenset[str], neutral: NoOpValues, where: str) -> None:
    """Raises `InvalidArgument` for a member that is neither `known` nor `neutral` at its value; `where` is its path."""
    for key, value in members.items():
        if key in known:
            continue
        if key not in neutral:
            alike = did_you_mean(key, (*known, *neutral))
            raise InvalidArgument(f"unknown field: {where}{key}{alike}", field=f"{where}{key}")
        if value is not None and value not in neutral[key]:
            raise InvalidArgument(f"{where}{key} is not supported yet, got {shortened(value)}", field=f"{where}{key}")


def shortened(value: Any) -> str:
    """As much of it as a message has room for."""
    try:
        text = orjson.dumps(value).decode()
    except orjson.JSONEncodeError:
        return "something nested too deeply to show"  # it reads deeper than it writes
    return text if len(text) <= 60 else f"{text[:57]}..."


def convert_fields(members: Any, kind: type[_Any], where: str = "") -> _Any:
    """`members` as a `kind`; raises `InvalidArgument`, whose `field` is the path under `where`."""
    try:
        return msgspec.convert(members, kind)
    except msgspec.ValidationError as error:
        found = describe_validation_error(error)
        field = ".".join(name for name in (where, found.path) if name)
        raise InvalidArgument(f"{field or 'the body'} {found}", field=field or None) from None
