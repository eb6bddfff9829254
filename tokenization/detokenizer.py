"""Token ids to text, piece by piece, never half a character.

Knows nothing of where the ids come from. The text of a token depends on its neighbours (a leading space, bytes of one
character), so each piece is the difference between two decodings of a short window:

    | emitted already, kept as context | pending |
    0                              _emitted    len
"""

from collections.abc import Sequence

from .tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"
_CONTEXT = 6
"""Prompt tokens that the first piece is decoded after; enough for any character and its leading space."""


class Detokenizer:
    """The text of one growing sequence. The pieces together equal `decode` of all its ids.

    After a `prompt`, the pieces are what decoding prompt and ids together would add to the prompt's text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._decode = tokenizer.decode
        self._window = list(prompt[-_CONTEXT:])
        self._emitted = self._whole_characters()

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids complete; what may still be half a character waits for the next call."""
        self._window.extend(ids)
        piece = self._pending()
        if not piece or piece.endswith(_INCOMPLETE):
            return ""
        self._advance()
        return piece

    def finish(self) -> str:
        """What is left: bytes that never became a character come out as U+FFFD."""
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
