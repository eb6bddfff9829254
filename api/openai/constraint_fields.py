"""Fields of completions and chat that constrain the text: OpenAI's `response_format`, vLLM's and TensorRT-LLM's.

Sources: https://platform.openai.com/docs/guides/structured-outputs and
https://docs.vllm.ai/en/latest/features/structured_outputs.html.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from ...core.errors import InvalidArgument
from ...core.request import GuidedDecoding, GuidedDecodingKind
from ...core.structured_outputs import JsonText, StructuredOutputs, make_guide, only_guide

_FORMAT = "response_format"


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="text"):
    """The `response_format` that asks for nothing."""

    def guide(self) -> GuidedDecoding | None:
        return None


class JsonObjectFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="json_object"):
    """The `response_format` that asks for a JSON object of any shape."""

    def guide(self) -> GuidedDecoding | None:
        return GuidedDecoding("json", parameter=_FORMAT)


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A named schema. `name` and `description` change nothing. Without `strict`, what cannot be enforced of the schema
    is left out, and the response names it."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="json_schema"):
    json_schema: JsonSchema

    def guide(self) -> GuidedDecoding | None:
        asked = self.json_schema
        return make_guide("json_schema", asked.schema, _FORMAT, bool(asked.strict))


class StructuralTagFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="structural_tag"):
    """Free text with tags in it, the content of each constrained: `structures` that begin at `triggers`, or a `format`
    that is made of parts."""

    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None

    def guide(self) -> GuidedDecoding | None:
        if (self.format is None) == (self.structures is None):
            raise InvalidArgument(f"{_FORMAT}: give either format, or structures and triggers", field=_FORMAT)
        tag = {
            "type": "structural_tag",
            "structures": self.structures,
            "triggers": self.triggers,
            "format": self.format,
        }
        return make_guide("structural_tag", {key: each for key, each in tag.items() if each is not None}, _FORMAT)


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

    def guide(self) -> GuidedDecoding | None:
        """The constraint, if there is one.

        Raises:
            InvalidArgument: there are two, or one that is not complete; `field` names it.
        """
        return only_guide(self._guides())

    def _guides(self) -> Iterator[GuidedDecoding]:
        if self.response_format is not None and (guide := self.response_format.guide()) is not None:
            yield guide
        if self.structured_outputs is not None:
            yield from self.structured_outputs.guides("structured_outputs.")
        older = StructuredOutputs(
            json=self.guided_json,
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
            whitespace_pattern=self.guided_whitespace_pattern,
        )
        yield from older.guides("guided_")
        guide = GuidedDecoding.from_parameters(self.guided_decoding_guide_type, self.guided_decoding_guide or "")
        if guide is not None:
            yield guide
