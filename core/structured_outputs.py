"""The fields by which clients constrain an answer, shared by all protocols: vLLM's `structured_outputs`, and the rule
that a request has one constraint."""

from collections.abc import Iterable
from typing import Any, TypeAlias

import msgspec
import orjson

from .errors import InvalidArgument, describe_validation_error
from .request import GrammarKind, GuidedDecoding

JsonText: TypeAlias = str | dict[str, Any]
"""A JSON object, or its text."""

_KINDS: dict[str, GrammarKind] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf_grammar",
    "structural_tag": "structural_tag",
}
_UNSUPPORTED_FIELDS = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`, which older clients call `guided_decoding`. `backend` and `disable_fallback` choose
    between libraries and change nothing here, nor does what its own object says of that."""

    json: JsonText | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: JsonText | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None
    backend: str | None = None
    _backend: str | None = None
    _backend_was_auto: bool | None = None

    def constraints(self, where: str) -> list[GuidedDecoding]:
        """The constraints. `where` stands before the fields' names in errors.

        Raises:
            InvalidArgument: an unsupported field is set; `field` names it.
        """
        for name in _UNSUPPORTED_FIELDS:
            if getattr(self, name):
                message = (
                    f"{where}{name} is not supported: white space between the parts of JSON is bounded, not chosen"
                )
                if name == "disable_additional_properties":
                    message = f"{where}{name} is not supported: write additionalProperties into the schema"
                raise InvalidArgument(message, field=f"{where}{name}")
        fields = {name: getattr(self, name) for name in _KINDS}
        constraints = [
            make_constraint(_KINDS[name], value, where + name) for name, value in fields.items() if value is not None
        ]
        if self.json_object:
            constraints.append(GuidedDecoding("json", parameter=f"{where}json_object"))
        return constraints


def parse_structured_outputs(value: JsonText, parameter: str) -> list[GuidedDecoding]:
    """The constraints of a parameter `structured_outputs`, which some clients send as text.

    Raises:
        InvalidArgument: it is not JSON, or has an unknown or wrong member.
    """
    try:
        parsed = orjson.loads(value) if isinstance(value, str) else value
        return msgspec.convert(parsed, StructuredOutputs).constraints(f"{parameter}.")
    except orjson.JSONDecodeError as error:
        raise InvalidArgument(f"parameter '{parameter}' is not JSON: {error}", field=parameter) from None
    except msgspec.ValidationError as error:
        mismatch = describe_validation_error(error)
        field = ".".join(name for name in (parameter, mismatch.path) if name)
        raise InvalidArgument(f"parameter '{field}' {mismatch}", field=field) from None


def make_constraint(kind: GrammarKind, value: Any, parameter: str, strict: bool = False) -> GuidedDecoding:
    """The constraint of a field's value, which becomes JSON text unless it is text.

    Raises:
        InvalidArgument: the value is empty, or nested too deeply.
    """
    if not value and kind != "json_schema":
        raise InvalidArgument(f"{parameter} is empty", field=parameter)
    return GuidedDecoding(kind, value if isinstance(value, str) else json_text(value, parameter), parameter, "", strict)


def json_text(value: Any, parameter: str) -> str:
    """JSON text of a JSON value.

    Raises:
        InvalidArgument: it is nested too deeply.
    """
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError as error:  # it reads deeper nesting than it writes
        raise InvalidArgument(f"{parameter} is nested too deeply", field=parameter) from error


def only_constraint(constraints: Iterable[GuidedDecoding]) -> GuidedDecoding | None:
    """The one constraint of a request, if any.

    Raises:
        InvalidArgument: there are several; the message names two.
    """
    listed = list(constraints)
    if len(listed) > 1:
        message = f"{listed[0].parameter} and {listed[1].parameter} both constrain the answer: give one"
        raise InvalidArgument(message, field=listed[0].parameter)
    return listed[0] if listed else None
