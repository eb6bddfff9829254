"""The suggestion for a name that is not known."""

from collections.abc import Iterable
from difflib import get_close_matches

_MIN_SIMILARITY = 0.8
"""Of all letters, those that both names have in the same order: less is another word, not a slip."""
_MAX_NAME_LENGTH = 64
"""Letters of a name that may be a slip: comparing takes the product of both lengths."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message that says the name is unknown: "; did you mean 'x'?", or nothing where none is alike."""
    alike = get_close_matches(name.lower(), known, 1, _MIN_SIMILARITY) if len(name) <= _MAX_NAME_LENGTH else []
    return f"; did you mean '{alike[0]}'?" if alike else ""
