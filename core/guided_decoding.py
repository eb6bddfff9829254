"""Guided decoding: a constraint on generated text."""

from typing import Literal, NamedTuple, TypeAlias

from .errors import InvalidArgument

GuidedDecodingKind: TypeAlias = Literal["json", "json_schema", "regex", "ebnf_grammar"]


class GuidedDecoding(NamedTuple):
    """A constraint on generated text: any JSON, JSON of a schema, a regular expression or an EBNF grammar.
    `text` is the schema, expression or grammar; empty for `json`. `parameter`: what the client asked for it by."""

    kind: GuidedDecodingKind
    text: str = ""
    parameter: str = "guided_decoding_guide_type"

    @classmethod
    def from_parameters(cls, kind: GuidedDecodingKind | None, text: str) -> "GuidedDecoding | None":
        """By the parameters `guided_decoding_guide_type` and `guided_decoding_guide`; neither asks for nothing.

        Raises:
            InvalidArgument: one needs the other, or must come alone.
        """
        if kind is None and text:
            message = "guided_decoding_guide needs guided_decoding_guide_type"
            raise InvalidArgument(message, field="guided_decoding_guide_type")
        if kind is not None and (kind == "json") == bool(text):
            needs = "takes no guide" if kind == "json" else "needs one"
            message = f"guided_decoding_guide: type '{kind}' {needs}"
            raise InvalidArgument(message, field="guided_decoding_guide")
        return None if kind is None else cls(kind, text)
