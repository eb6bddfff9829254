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
from ...core.validation_errors import mismatch
from ..chunked_json import MOST_IDS, MOST_VALUES, PIECE, Long, TooMany, Values, read_long, whole
from ..json_values import Buffer

Neutral: TypeAlias = Mapping[str, tuple[Any, ...]]
"""Fields that are known and not supported, and the values besides null that ask for nothing."""

HARMLESS = frozenset({"user", "metadata", "store", "safety_identifier", "service_tier"}) | {
    *("prompt_cache_key", "prompt_cache_retention")
}
"""Fields that change nothing about the answer."""

Body: TypeAlias = bytes | dict[str, Any]
"""Of a request: its text, or its members if it is long."""

_IDS = frozenset({"prompt", "input", "tokens", "allowed_token_ids"})
_TEXTS = frozenset({"prompt", "input", "query", "guided_decoding_guide", "chat_template"})
"""Fields whose texts may be as long as the body."""

_Body = TypeVar("_Body", bound=msgspec.Struct)
_Any = TypeVar("_Any")


async def open_body(body: bytes | bytearray) -> Body:
    """A long body's members, of which none has more values than `MOST_VALUES`, or token ids than `MOST_IDS`. A short
    body as it is: it is parsed at once.

    Raises:
        InvalidArgument: it is no JSON object, or has more.
    """
    if len(body) <= PIECE:
        return bytes(body)
    found = await read_long(body, _parse)
    if not isinstance(found, Long) or not found.is_object:
        raise InvalidArgument("the body must be a JSON object")
    members = await found.members(Values())
    for key, value in members.items():
        if isinstance(value, str) and len(value) > PIECE and key not in _TEXTS:
            raise InvalidArgument(f"{key} has {len(value)} characters, more than there may be", field=key)
        try:
            members[key] = await whole(value, Values(MOST_IDS if key in _IDS else MOST_VALUES))
        except TooMany as error:
            raise InvalidArgument(f"{key}: {error.message}", field=key) from None
    return members


def _parse(text: Buffer, offset: int) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidArgument(f"the body is not valid JSON: {error.msg} at {max(0, offset + error.pos)}") from None


def decode(body: Body, kind: type[_Body], neutral: Neutral) -> _Body:
    """A JSON object with the fields of `kind`, harmless ones, and those of `neutral` at a value that asks for nothing.

    Raises:
        InvalidArgument: it is not; `field` names the culprit.
    """
    members = body if isinstance(body, dict) else _parse(body, 0)
    if not isinstance(members, dict):
        raise InvalidArgument("the body must be a JSON object")
    names = _names(kind)
    refuse_others(members, names | HARMLESS, neutral, "")
    supported = {key: _whole(value) for key, value in members.items() if key in names}
    return convert(supported, kind)


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


def refuse_others(members: Mapping[str, Any], known: frozenset[str], neutral: Neutral, where: str) -> None:
    """Raises `InvalidArgument` for a member that is neither `known` nor `neutral` at its value; `where` is its path."""
    for key, value in members.items():
        if key in known:
            continue
        if key not in neutral:
            alike = did_you_mean(key, (*known, *neutral))
            raise InvalidArgument(f"unknown field: {where}{key}{alike}", field=f"{where}{key}")
        if value is not None and value not in neutral[key]:
            raise InvalidArgument(f"{where}{key} is not supported yet, got {short(value)}", field=f"{where}{key}")


def short(value: Any) -> str:
    """As much of it as a message has room for."""
    try:
        text = orjson.dumps(value).decode()
    except orjson.JSONEncodeError:
        return "something nested too deeply to show"  # it reads deeper than it writes
    return text if len(text) <= 60 else f"{text[:57]}..."


def convert(members: Any, kind: type[_Any], where: str = "") -> _Any:
    """`members` as a `kind`; raises `InvalidArgument`, whose `field` is the path under `where`."""
    try:
        return msgspec.convert(members, kind)
    except msgspec.ValidationError as error:
        found = mismatch(error)
        field = ".".join(name for name in (where, found.path) if name)
        raise InvalidArgument(f"{field or 'the body'} {found}", field=field or None) from None
