"""JSON bodies of OpenAI's and vLLM's endpoints: parsed, checked for unknown fields and decoded into structs.

A field is supported, ignored, accepted at a value that asks for nothing, or refused by its name. One that nobody knows
is left out, and the answer names it (`known_fields`).
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec
import orjson
from starlette.requests import Request

from ...core.errors import InvalidArgument, NotFound, describe_validation_error, did_you_mean
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
from ..http.connection import read_json_body
from ..http.request_context import record_body, record_warning
from ..json_tensors import Buffer
from .known_fields import Shape, ShapeByType, known_members

NoOpValues: TypeAlias = Mapping[str, tuple[Any, ...]]
"""By the name of an unsupported field: its values that ask for nothing, and are accepted. Null always is."""

JsonBody: TypeAlias = dict[str, Any]

_NO_OPS: Mapping[str, Any] = MappingProxyType({})


class IgnoredFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of OpenAI's that change nothing about the answer, whatever they say."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None


IGNORED_FIELDS = frozenset(IgnoredFields.__struct_fields__)

_TOKEN_ID_FIELDS = frozenset({"prompt", "input", "tokens", "allowed_token_ids"})
_LONG_TEXT_FIELDS = frozenset(
    (
        "prompt",
        "input",
        "instructions",
        "system",
        "query",
        "chat_template",
        "guided_decoding_guide",
        "guided_json",
        "guided_regex",
        "guided_grammar",
        "text_1",
        "text_2",
        "data_1",
        "data_2",
        "queries",
    )
)

_Struct = TypeVar("_Struct", bound=msgspec.Struct)


async def read_members(request: Request, limit: int, shape: Shape) -> JsonBody:
    """The members of a request's body that `shape` knows; the answer's header names the others.

    Raises as `read_all_members`, and `InvalidArgument` for a body with very many unknown names.
    """
    known, warning = known_members(await read_all_members(request, limit), shape)
    if warning:
        record_warning(request.scope, warning)
    return known


_MEMBERS = "charonia.members"


async def read_ahead(request: Request, limit: int) -> JsonBody:
    """The members of a request's body, which the endpoint that it turns out to be for then reads again. Raises as
    `read_all_members`."""
    members: JsonBody = request.scope.setdefault(_MEMBERS, await read_all_members(request, limit))
    return members


async def read_all_members(request: Request, limit: int) -> JsonBody:
    """All members of a request's body of at most `limit` bytes, which its context notes.

    A long body is parsed in pieces, between which the event loop runs. Raises as `read_json_body`, and
    `InvalidArgument` for a body that is no JSON object, or a member that is too long.
    """
    if _MEMBERS in request.scope:
        read_before: JsonBody = request.scope[_MEMBERS]
        return read_before
    body = await read_json_body(request, limit)
    members = _parse(body, 0) if len(body) <= PIECE_BYTES else await _parse_long(body)
    if not isinstance(members, dict):
        raise InvalidArgument("the body must be a JSON object")
    record_body(request.scope, members)
    return members


async def _parse_long(body: bytes | bytearray) -> JsonBody | None:
    """The members of a long body; None if it is no object.

    A member has at most `MAX_VALUES` values, or `MAX_IDS` where it may be a list of token ids, and long strings only
    where texts belong; else `InvalidArgument` is raised.
    """
    container = await read_long_json(body, _parse)
    if not isinstance(container, UnparsedContainer) or not container.is_object:
        return None
    members = await container.members(ValueBudget())
    for key, value in members.items():
        if isinstance(value, str) and len(value) > PIECE_BYTES and key not in _LONG_TEXT_FIELDS:
            raise field_error(key, f"has {len(value)} characters, more than there may be")
        try:
            budget = ValueBudget(MAX_IDS if key in _TOKEN_ID_FIELDS else MAX_VALUES)
            members[key] = await parse_fully(value, budget)
        except TooManyValues as error:
            raise field_error(key, f": {error.message}") from None
    return members


def _parse(text: Buffer, offset: int) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidArgument(f"the body is not valid JSON: {error.msg} at {max(0, offset + error.pos)}") from None


def body_shape(
    names: Iterable[str],
    no_ops: NoOpValues = _NO_OPS,
    inner: Mapping[str, Shape | ShapeByType] = _NO_OPS,
    notes: Mapping[str, str] = _NO_OPS,
) -> Shape:
    """The shape of a body that `supported_members` reads with the same names and values."""
    return Shape(frozenset((*names, *IGNORED_FIELDS, *no_ops)), inner, notes)


def supported_members(body: Mapping[str, Any], names: Iterable[str], no_ops: NoOpValues) -> dict[str, Any]:
    """The members of a body that `names` has; integers written as 8.0 are integers, alone or in a list.

    Raises `InvalidArgument` for one that is unknown, or unsupported and not at a value of `no_ops`; `field` names it.
    """
    names = frozenset(names)
    reject_unsupported(body, names | IGNORED_FIELDS, no_ops, "")
    check_ignored(body, IgnoredFields)
    return {key: _with_integers(value) for key, value in body.items() if key in names}


class BodyFormat(Generic[_Struct]):
    """A body that becomes the struct `kind`, which has a field for each member that is served. `no_ops` and `inner`
    are those of `body_shape`."""

    def __init__(
        self,
        kind: type[_Struct],
        no_ops: NoOpValues = _NO_OPS,
        inner: Mapping[str, Shape | ShapeByType] = _NO_OPS,
    ) -> None:
        self._kind = kind
        self._no_ops = no_ops
        self._shape = body_shape(kind.__struct_fields__, no_ops, inner)

    async def read(self, request: Request, limit: int) -> _Struct:
        """The body of a request, of at most `limit` bytes. Raises as `read_members` and `decode`."""
        return self.decode(await read_members(request, limit, self._shape))

    def decode(self, members: JsonBody) -> _Struct:
        """The struct of a body's members. Raises as `supported_members` and `convert_fields`."""
        return convert_fields(supported_members(members, self._kind.__struct_fields__, self._no_ops), self._kind)


def _with_integers(value: Any) -> Any:
    # To JSON 8.0 is an integer; one of more than 64 bits comes as a float, too.
    if type(value) is float:
        return int(value) if value.is_integer() else value
    if type(value) is list and {float, list} & set(map(type, value)):
        return [_with_integers(item) for item in value]
    return value


def reject_unsupported(members: Mapping[str, Any], known: frozenset[str], no_ops: NoOpValues, where: str) -> None:
    """Raise `InvalidArgument` for a member that is neither `known` nor at a value of `no_ops`.

    `where` stands before the member's name in the message, and in `field`.
    """
    for key, value in members.items():
        if key in known:
            continue
        if key not in no_ops:
            alike = did_you_mean(key, (*known, *no_ops))
            raise InvalidArgument(f"unknown field: {where}{key}{alike}", field=f"{where}{key}")
        if value is not None and not any(_is_same(value, no_op) for no_op in no_ops[key]):
            raise field_error(f"{where}{key}", f"is not supported yet, got {shortened(value)}")


def _is_same(value: Any, no_op: Any) -> bool:
    # To Python 0 is false, and 1 is true.
    return value == no_op and (value.__class__ is bool) is (no_op.__class__ is bool)


def check_ignored(members: Mapping[str, Any], kind: type[msgspec.Struct]) -> None:
    """Raise `InvalidArgument` for one of `kind`'s members, which change nothing, that is of another type."""
    ignored = {name: _with_integers(members[name]) for name in kind.__struct_fields__ if name in members}
    if ignored:
        convert_fields(ignored, kind)


def field_error(field: str, problem: str) -> InvalidArgument:
    """The error of a body's field: its path, and what is wrong with it, which may begin with a colon."""
    return InvalidArgument(f"{field}{problem}" if problem.startswith(":") else f"{field} {problem}", field=field)


def shortened(value: Any) -> str:
    """The JSON of a value, for an error message: at most 60 characters."""
    try:
        text = orjson.dumps(value).decode()
    except orjson.JSONEncodeError:
        return "something nested too deeply to show"  # orjson reads deeper nesting than it writes
    return text if len(text) <= 60 else f"{text[:57]}..."


def convert_fields(members: Mapping[str, Any], kind: type[_Struct], where: str = "", strict: bool = True) -> _Struct:
    """The struct `kind` made of those of `members` that it has fields for; not `strict`, of numbers in texts, too.

    Raises `InvalidArgument` if a value has the wrong type; `field` is its path below `where`.
    """
    try:
        return msgspec.convert(members, kind, strict=strict)
    except msgspec.ValidationError as error:
        problem = describe_validation_error(error)
        field = ".".join(name for name in (where, problem.path) if name)
        raise InvalidArgument(f"{field or 'the body'} {problem}", field=field or None) from None


@contextmanager
def model_field() -> Iterator[None]:
    """Let errors of a model that is not found name the field `model` of the body."""
    try:
        yield
    except NotFound as error:
        raise NotFound(error.message, field="model") from None
