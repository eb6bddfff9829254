"""Token ids to text, piece by piece, never half a character.

After a prompt, the pieces are the text that decoding prompt and ids together would add to the prompt's; all of them
together equal `decode` of all ids.
"""

import codecs
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from .token_pieces import TokenBytes
from .tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"
_CONTEXT = 6
"""Prompt tokens that the first piece is decoded after; enough for any character and its leading space."""


class Detokenizer(Protocol):
    """The text of one growing sequence."""

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids complete; half a character waits for the next call."""

    def finish(self) -> str:
        """The rest of the text: bytes that never became a character come out as U+FFFD."""


def make_detokenizer(tokenizer: Tokenizer, prompt: Sequence[int] = (), special: bool = False) -> Detokenizer:
    """The cheapest detokenizer that is right for this tokenizer. `special`: the text has special tokens in it."""
    context, table = prompt[-_CONTEXT:], tokenizer.bytes_with_special if special else tokenizer.bytes
    return WindowDetokenizer(tokenizer, context, special) if table is None else ByteDetokenizer(table, context)


class ByteDetokenizer:
    """A detokenizer for byte-level vocabularies, where the bytes of a token do not depend on its neighbours."""

    def __init__(self, table: TokenBytes, context: Sequence[int]) -> None:
        self._table = table
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self.push(context)

    def push(self, ids: Sequence[int]) -> str:
        table = self._table
        return self._decode(b"".join([table[token] for token in ids]))

    def finish(self) -> str:
        return self._decode(b"", True)


class WindowDetokenizer:
    """A detokenizer for any tokenizer. Text may depend on the tokens before it (a leading space, bytes of one
    character), so each piece is the difference between two decodings of a short window:

        | emitted already, kept as context | pending |
        0                              _emitted    len
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], special: bool = False) -> None:
        self._decode = partial(tokenizer.decode, special=special)
        self._window = list(context)
        self._emitted = self._whole_characters()

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

    def _whole_characters(self) -> int:
        # A prompt may end with half a character, which the first tokens complete.
        ends = range(len(self._window), 0, -1)
        whole = (end for end in ends if not self._decode(self._window[:end]).endswith(_INCOMPLETE))
        return next(whole, len(self._window))

    def _pending(self) -> str:
        emitted = self._decode(self._window[: self._emitted])
        return self._decode(self._window)[len(emitted) :]

    def _advance(self) -> None:
        del self._window[: self._emitted]
        self._emitted = len(self._window)
