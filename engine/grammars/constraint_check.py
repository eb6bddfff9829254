"""Checks a constraint before an engine gets it: whether it compiles within the limits, and what of it is enforced.

A constraint decides how much time and memory that takes, so the process that calls this must be one that may be killed.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
from llguidance import LLTokenizer, TokenizerWrapper

from ...core.errors import InvalidArgument
from ...core.request import GrammarKind, GuidedDecoding
from .backend import GrammarBackend
from .llguidance_backend import LLGuidanceBackend, check_grammar
from .schema_check import enforce_schema
from .vocabulary import Vocabulary

_PREFIX = "it"
"""The parameter in messages: the same constraint may come by several."""
_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
_NOTHING_FITS = ("NoExtension", "NoExtensionBias", "none of this model's tokens can come next")


_EXACT = 2.0**53
"""Beyond it some integers are no floats."""


class CheckedConstraint(msgspec.Struct, frozen=True, array_like=True):
    """The verdict on a constraint."""

    text: str = ""
    """The text to enforce."""
    left_out: tuple[str, ...] = ()
    """Descriptions of what is not enforced."""
    error: str = ""
    """Why it is refused, without the parameter's name, which each request has its own of."""


def check_constraint(constraint: GuidedDecoding, backend: GrammarBackend) -> CheckedConstraint:
    """Check a constraint. `backend` compiles it, with its first mask."""
    text, left_out = constraint.text, tuple[str, ...]()
    try:
        if constraint.kind in ("json_schema", "structural_tag"):
            text, left_out = _enforced_text(constraint)
        grammar = backend.compile(constraint._replace(text=text, parameter=_PREFIX))
    except InvalidArgument as error:
        return CheckedConstraint(error=_words(constraint.kind, error))
    except ValueError as error:
        return CheckedConstraint(error=str(error))
    except RecursionError:
        return CheckedConstraint(error="it is nested too deeply")
    except Exception as error:  # parts of a wrong schema have any type
        return CheckedConstraint(error=f"it is not understood: {error}")
    return CheckedConstraint(text, (*left_out, *grammar.warnings))


def _enforced_text(constraint: GuidedDecoding) -> tuple[str, tuple[str, ...]]:
    """The text of a schema, or of tags with schemas, that is enforced; and descriptions of the rest."""
    holder = {"": json.loads(constraint.text, parse_constant=_refuse_constant, parse_float=_number)}
    schemas = [(holder, "", "")] if constraint.kind == "json_schema" else list(_schemas_of_tag(holder[""], ""))
    descriptions: list[str] = []
    for parent, key, where in schemas:
        schema, left_out = enforce_schema(parent[key], _problem)
        if constraint.strict and (refused := [str(keyword) for keyword in left_out if keyword.refusable]):
            raise ValueError(f"strict is true, and these cannot be enforced: {', '.join(refused)}")
        parent[key] = schema
        descriptions += [f"{where}{keyword}" for keyword in left_out]
    return json.dumps(holder[""], ensure_ascii=False, separators=(",", ":")), tuple(descriptions)


def _schemas_of_tag(tag: Any, where: str) -> Iterator[tuple[dict[str, Any], str, str]]:
    """The schemas in a structural tag: the object that has it, its key, and its path."""
    if isinstance(tag, list):
        for number, part in enumerate(tag):
            yield from _schemas_of_tag(part, f"{where}/{number}")
    elif isinstance(tag, dict):
        for key, part in tag.items():
            if key in ("schema", "json_schema") and isinstance(part, dict):
                yield tag, key, f"{where}/{key}: "
            else:
                yield from _schemas_of_tag(part, f"{where}/{key}")


def _number(text: str) -> float:
    """A number that is written with a point or an exponent; a whole one is an integer in JSON Schema."""
    number = float(text)
    return int(number) if number.is_integer() and abs(number) < _EXACT else number


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _problem(schema: Any) -> str:
    """Why the library refuses a schema, or does not enforce all of it."""
    text = json.dumps(schema, ensure_ascii=False)
    try:
        return next(iter(check_grammar(GuidedDecoding("json_schema", text, _PREFIX, strict=True))), "")
    except InvalidArgument as error:
        return _words("json_schema", error)


def _words(kind: GrammarKind, error: InvalidArgument) -> str:
    """The library's message about a constraint, without the grammar that was written for it."""
    message = error.message.removeprefix(f"{_PREFIX}: ")
    if kind in ("json_schema", "regex", "choice"):
        message = _PLACE.sub("", message.split("\n   1 | start:")[0])
    return "no text can satisfy it" if message in _NOTHING_FITS else message


def checking_backend(special: Mapping[str, int]) -> GrammarBackend:
    """A backend for single bytes and the `special` tokens of a model. Its verdicts are those of the whole vocabulary,
    and it is ready at once."""
    return LLGuidanceBackend(_byte_vocabulary(special))


class _ByteTokens(NamedTuple):
    """A tokenizer as the library's wrapper wants it."""

    tokens: list[bytes]
    special_token_ids: list[int]
    first_byte: int
    eos_token_id: int
    bos_token_id: None = None

    def __call__(self, text: str) -> list[int]:
        return [self.first_byte + byte for byte in text.encode()]


def _byte_vocabulary(special: Mapping[str, int]) -> Vocabulary:
    first = max(special.values(), default=-1) + 1
    tokens = [*[b""] * first, *(bytes([byte]) for byte in range(256)), b"<|end of text|>"]
    for text, number in special.items():
        tokens[number] = text.encode()
    end = len(tokens) - 1
    wrapped = TokenizerWrapper(_ByteTokens(tokens, [*special.values(), end], first, end))
    return Vocabulary(LLTokenizer(wrapped, eos_token=[end]), tokens, special, (end,), len(tokens))
