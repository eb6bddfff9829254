"""Writes any `GuidedDecoding` as a grammar of the library's Lark dialect."""

import json
from collections.abc import Mapping
from typing import Any

from ...core.errors import InvalidArgument
from ...core.request import GuidedDecoding
from .lark_rules import LarkRules
from .structural_tags import write_structural_tag


def write_grammar(constraint: GuidedDecoding, special: Mapping[str, int] = {}) -> str:
    """The library's grammar of a constraint. Raises `InvalidArgument` for a text that is not of the constraint's kind;
    `field` is its `parameter`."""
    kind, text, parameter, after, strict, opening = constraint
    rules = LarkRules(special, strict)
    try:
        match kind:
            case "json":
                content = rules.json({})
            case "json_schema":
                content = rules.json(_parsed(text))
            case "regex":
                content = rules.regex(text)
            case "choice":
                content = rules.choice(_texts(text))
            case "lark":
                content = rules.lark(text)
            case "ebnf_grammar":
                content = rules.grammar(text)
            case "structural_tag":
                content = write_structural_tag(rules, _parsed(text))
    except InvalidArgument as error:
        raise InvalidArgument(f"{parameter}: {error.message}", field=parameter) from None
    except RecursionError:
        raise InvalidArgument(f"{parameter}: it is nested too deeply", field=parameter) from None
    except Exception as error:  # parts of a wrong text have any type
        raise InvalidArgument(f"{parameter}: {error}", field=parameter) from error
    before = (rules.text_until(after) if after else "", rules.text(opening) if opening else "")
    return rules.finish(" ".join(filter(None, (*before, content))))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidArgument(f"it is not JSON: {error}") from None


def _texts(text: str) -> list[str]:
    texts = _parsed(text)
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidArgument("it must be a list of at least one string")
    return texts
