"""What a text must be, as OpenAI's bodies say it: by `response_format`, or by a guide as on the v2 doors.

Whether a model can hold to it, the model says.
"""

from typing import Any, TypeAlias

import msgspec
import orjson

from ...core.errors import InvalidArgument
from ...core.guided_decoding import GuidedDecoding


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="text"):
    """Nothing is asked for."""


class JsonObjectFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="json_object"):
    """A JSON object."""


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`name`, `description` and `strict` change nothing: a guide is always held to."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="json_schema"):
    json_schema: JsonSchema


ResponseFormat: TypeAlias = TextFormat | JsonObjectFormat | JsonSchemaFormat
"""By its `type`."""


def resolve_guide(wanted: ResponseFormat | None, guide: GuidedDecoding | None) -> GuidedDecoding | None:
    """What a body asks for, by `response_format` or by `guide`.

    Raises:
        InvalidArgument: by both.
    """
    if wanted is None or isinstance(wanted, TextFormat):
        return guide
    if guide is not None:
        message = f"response_format and {guide.parameter} say the same thing twice: give one"
        raise InvalidArgument(message, field="response_format")
    if isinstance(wanted, JsonObjectFormat):
        return GuidedDecoding("json", parameter="response_format")
    return GuidedDecoding("json_schema", orjson.dumps(wanted.json_schema.schema).decode(), "response_format")
