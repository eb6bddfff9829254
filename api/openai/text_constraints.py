"""The fields of a body by which its text is constrained: OpenAI's `response_format`, vLLM's and TensorRT-LLM's."""

from collections.abc import Iterator
from typing import Any

import msgspec

from ...core.request import GuidedDecoding, GuidedDecodingKind
from ...core.structured_outputs import JsonText, StructuredOutputs, make_constraint, only_constraint
from .json_body import field_error
from .known_fields import Shape, ShapeByType, shape_of

_FORMAT = "response_format"


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="text"):
    """The `response_format` that asks for nothing. Clients write what the other formats have as null."""

    schema: None = None
    json_schema: None = None

    def constraint(self) -> GuidedDecoding | None:
        return None


class JsonObjectFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="json_object"):
    """The `response_format` that asks for a JSON object, of any shape or, as with llama.cpp, of a schema."""

    schema: dict[str, Any] | None = None
    json_schema: None = None

    def constraint(self) -> GuidedDecoding | None:
        if self.schema is None:
            return GuidedDecoding("json", parameter=_FORMAT)
        return make_constraint("json_schema", self.schema, _FORMAT)


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A named schema. `name` and `description` change nothing. Without `strict`, what cannot be enforced of the schema
    is left out, and the response names it."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="json_schema"):
    """The `response_format` that asks for JSON of a schema: OpenAI's, or with the members of its `json_schema` beside
    the type, as clients of other servers and of /v1/responses write it."""

    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None

    def constraint(self) -> GuidedDecoding | None:
        if self.json_schema is not None and self.schema is not None:
            raise field_error(f"{_FORMAT}.schema", "is the same field as its json_schema: give one")
        if self.json_schema is not None:
            return make_constraint("json_schema", self.json_schema.schema, _FORMAT, bool(self.json_schema.strict))
        if self.schema is None:
            raise field_error(f"{_FORMAT}.json_schema", "is missing")
        return make_constraint("json_schema", self.schema, _FORMAT, bool(self.strict))


class StructuralTagFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="structural_tag"):
    """Free text with tags in it, the content of each constrained: `structures` that begin at `triggers`, or a `format`
    that is made of parts."""

    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None

    def constraint(self) -> GuidedDecoding | None:
        if (self.format is None) == (self.structures is None):
            raise field_error(_FORMAT, ": give either format, or structures and triggers")
        tag = {
            "type": "structural_tag",
            "structures": self.structures,
            "triggers": self.triggers,
            "format": self.format,
        }
        stated = {key: value for key, value in tag.items() if value is not None}
        return make_constraint("structural_tag", stated, _FORMAT)


RESPONSE_FORMAT_SHAPE = ShapeByType(
    {
        "text": Shape(frozenset(("type", "schema", "json_schema"))),
        "json_object": Shape(frozenset(("type", "schema", "json_schema"))),
        "json_schema": shape_of(JsonSchemaFormat, {"json_schema": shape_of(JsonSchema)}),
        "structural_tag": shape_of(StructuralTagFormat),
    }
)


class ConstraintFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a body of which one may constrain the text. Those called `guided_...`, but for the two of
    TensorRT-LLM, are vLLM's older ones."""

    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_decoding_guide_type: GuidedDecodingKind | None = None
    guided_decoding_guide: str | None = None
    guided_json: JsonText | None = None
    guided_regex: str | None = None
    guided_choice: tuple[str, ...] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None

    def constraint(self) -> GuidedDecoding | None:
        """The constraint, if there is one.

        Raises:
            InvalidArgument: there are two, or one that is not complete; `field` names it.
        """
        constraints = [*self._constraints()]
        return only_constraint(constraints) if constraints else None

    def _constraints(self) -> Iterator[GuidedDecoding]:
        if self.response_format is not None and (constraint := self.response_format.constraint()) is not None:
            yield constraint
        if self.structured_outputs is not None:
            yield from self.structured_outputs.constraints("structured_outputs.")
        older: dict[str, Any] = {
            "json": self.guided_json,
            "regex": self.guided_regex,
            "choice": self.guided_choice,
            "grammar": self.guided_grammar,
            "whitespace_pattern": self.guided_whitespace_pattern,
        }
        if any(value is not None for value in older.values()):
            yield from StructuredOutputs(**older).constraints("guided_")
        constraint = GuidedDecoding.from_parameters(self.guided_decoding_guide_type, self.guided_decoding_guide or "")
        if constraint is not None:
            yield constraint
