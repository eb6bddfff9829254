"""The words of a transcript: which of its tokens each one consists of. Follows arXiv 2212.04356's reference."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

_BEFORE = "\"'“¡¿([{-"
"""Punctuation that belongs to the word behind it, if a space is before it."""
_BEHIND = "\"'.。,，!！?？:：”)]}、"  # noqa: RUF001
"""Punctuation that belongs to the word before it."""
_ALONE = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
"""Punctuation that begins a word of its own, before it finds its neighbour."""
_CUT = "\ufffd"
"""What stands for a part of a character."""

UNSPACED = frozenset(("zh", "ja", "th", "lo", "my", "yue"))
"""Codes of languages that part words by no spaces: each of their characters is a word."""


class SpokenWord(NamedTuple):
    """A word with the punctuation beside it."""

    text: str
    """As the tokens have it, with the space before it."""
    first: int
    """The index of its first token."""
    end: int
    """The index behind its last token."""


def split_words(tokens: Sequence[int], decode: Callable[[Sequence[int]], str], spaced: bool) -> list[SpokenWord]:
    """The words of some tokens, which are all in them. Without `spaced` each character is one."""
    words = _characters(tokens, decode)
    return _merge_behind(_merge_before(_merge_unspaced(words) if spaced else words))


def _characters(tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[SpokenWord]:
    """The fewest tokens that are whole characters, or all that there will ever be of one."""
    whole_text = decode(tokens)
    parts: list[SpokenWord] = []
    first, characters = 0, 0
    for end in range(1, len(tokens) + 1):
        text = decode(tokens[first:end])
        cut = text.find(_CUT)
        if cut < 0 or whole_text[characters + cut : characters + cut + 1] in ("", _CUT):
            parts.append(SpokenWord(text, first, end))
            first, characters = end, characters + len(text)
    if first < len(tokens):
        parts.append(SpokenWord(decode(tokens[first:]), first, len(tokens)))
    return parts


def _joined(words: Sequence[SpokenWord]) -> SpokenWord:
    return SpokenWord("".join(word.text for word in words), words[0].first, words[-1].end)


def _merge_unspaced(parts: Sequence[SpokenWord]) -> list[SpokenWord]:
    words: list[SpokenWord] = []
    for part in parts:
        if not words or part.text.startswith(" ") or part.text.strip() in _ALONE:
            words.append(part)
        else:
            words[-1] = _joined((words[-1], part))
    return words


def _merge_before(words: Sequence[SpokenWord]) -> list[SpokenWord]:
    merged: list[SpokenWord] = []
    for word in reversed(words):
        if merged and word.text.startswith(" ") and word.text.strip() in _BEFORE:
            merged[-1] = _joined((word, merged[-1]))
        else:
            merged.append(word)
    return merged[::-1]


def _merge_behind(words: Sequence[SpokenWord]) -> list[SpokenWord]:
    merged: list[SpokenWord] = []
    for word in words:
        if merged and not merged[-1].text.endswith(" ") and word.text in _BEHIND:
            merged[-1] = _joined((merged[-1], word))
        else:
            merged.append(word)
    return merged
