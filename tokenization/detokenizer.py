"""Token ids to text, piece by piece, never half a character, and up to a stop string. After a prompt, the pieces are
what the ids add to the prompt's text."""

import codecs
from collections.abc import Sequence
from functools import partial

from .tokenizer import TokenBytes, Tokenizer

_INCOMPLETE = "\ufffd"
_CONTEXT = 6
"""Prompt tokens that the first piece is decoded after; enough for any character and its leading space."""


def make_detokenizer(
    tokenizer: Tokenizer, prompt: Sequence[int] = (), special: bool = False
) -> "ByteDetokenizer | WindowDetokenizer":
    """The cheapest detokenizer that is right for this tokenizer; `special` keeps special tokens in the text."""
    context = prompt[-_CONTEXT:]
    table = tokenizer.bytes_with_special if special else tokenizer.bytes
    return WindowDetokenizer(tokenizer, context, special) if table is None else ByteDetokenizer(table, context)


class ByteDetokenizer:
    """A detokenizer for byte-level vocabularies, where a token's bytes do not depend on its neighbours."""

    def __init__(self, table: TokenBytes, context: Sequence[int]) -> None:
        self._table, self.texts, self.texts_beside = table, table.texts, table.texts_beside
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.incomplete = False
        """Whether the text so far ends within a character."""
        self.push(context)

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids complete; an incomplete character waits for the next call."""
        alone = len(ids) == 1 and not self.incomplete
        if alone and (known := self.texts.get(ids[0])) is not None:
            return known
        table = self._table
        text = self._decoder.decode(b"".join([table[token] for token in ids]))
        self.incomplete = bool(self._decoder.getstate()[0])
        if alone and not self.incomplete:
            self.texts[ids[0]] = text
        return text

    def finish(self) -> str:
        """The rest of the text; bytes that form no character become U+FFFD."""
        self.incomplete = False
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """A detokenizer for any tokenizer. A token's text may depend on the tokens before it, so each piece is the
    difference between two decodings of a short window:

        | emitted already, kept as context | pending |
        0                              _emitted    len
    """

    incomplete = False

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], special: bool = False) -> None:
        self._decode = partial(tokenizer.decode, special=special)
        self.texts: dict[int, str] = {}  # no token has one by itself
        self._window = list(context)
        # A prompt may end with half a character, which the first tokens complete.
        ends = range(len(self._window), 0, -1)
        whole = (end for end in ends if not self._decode(self._window[:end]).endswith(_INCOMPLETE))
        self._emitted = next(whole, len(self._window))

    def texts_beside(self, stops: tuple[str, ...]) -> dict[int, str]:
        return self.texts

    def push(self, ids: Sequence[int]) -> str:
        self._window.extend(ids)
        piece = self._pending()
        if not piece or piece.endswith(_INCOMPLETE):
            return ""
        self._advance()
        return piece

    def finish(self) -> str:
        piece = self._pending()
        self._advance()
        return piece

    def _pending(self) -> str:
        emitted = self._decode(self._window[: self._emitted])
        return self._decode(self._window)[len(emitted) :]

    def _advance(self) -> None:
        del self._window[: self._emitted]
        self._emitted = len(self._window)


class StopStrings:
    """Passes a growing text up to the first of several strings, which is passed only with `include`, and holds back
    what may become one. The string that is complete first wins, the longer one if two end together."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self.strings = tuple(stops)
        self._first_letters = frozenset(stop[0] for stop in stops)
        self._include = include
        self.held = ""
        """The longest end of the text that a string begins with."""
        self.matched: str | None = None

    def __bool__(self) -> bool:
        return bool(self.strings)

    def lets_pass(self, piece: str) -> bool:
        """Whether a piece of the text is shown as it is, as most are: none of the strings is in it, begins at its end,
        or has begun before."""
        if self.held:
            return False
        if self._first_letters.isdisjoint(piece):
            return True
        for at, letter in enumerate(piece):
            if letter in self._first_letters:
                rest = len(piece) - at
                for stop in self.strings:
                    if piece.startswith(stop, at) or (rest < len(stop) and stop.startswith(piece[at:])):
                        return False
        return True

    def push(self, piece: str) -> str:
        """The text that may be shown by now; nothing more once a string was `matched`."""
        held = self.held
        if self.matched is not None:
            return ""
        if self.lets_pass(piece):
            return piece
        begun = held
        for end, letter in enumerate(piece, start=len(held) + 1):
            if begun or letter in self._first_letters:
                begun = self._begun_end(begun + letter)
                complete = [stop for stop in self.strings if begun.endswith(stop)]
                if complete:
                    self.matched = max(complete, key=len)
                    self.held = ""
                    return (held + piece)[: end if self._include else end - len(self.matched)]
        self.held = begun
        return (held + piece).removesuffix(begun)

    def _begun_end(self, text: str) -> str:
        """The longest end of `text` that a string begins with."""
        while text and not any(stop.startswith(text) for stop in self.strings):
            text = text[1:]
        return text

    def finish(self) -> str:
        """The rest of the text at its end, which was no stop string."""
        rest = self.held
        self.held = ""
        return rest
