"""The text of a stream of token ids that another model decodes: piece by piece, and up to a stop word."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .lookup import AskedModel

_INCOMPLETE = "\ufffd"
_WINDOW = 64
"""Tokens that are decoded together at most, while their text does not end with half a character."""
_CONTEXT = 6
"""Tokens of a window that the next one begins with: enough for any character and its leading space."""


class StreamText:
    """The text of one growing answer. `accumulates`: a piece is decoded with the tokens before it, and half a character
    waits for its other half; else each piece is decoded by itself. `postprocessing`: the model that decodes."""

    def __init__(self, postprocessing: AskedModel, accumulates: bool) -> None:
        self._postprocessing, self._accumulates = postprocessing, accumulates
        self._window: list[int] = []
        self._shown = ""

    async def push(self, tokens: NDArray[Any]) -> str:
        """The text that these tokens add."""
        if not self._accumulates:
            return await self._decode(tokens.ravel().tolist())
        self._window += tokens.ravel().tolist()
        text = await self._decode(self._window)
        if text.endswith(_INCOMPLETE):
            return ""
        piece, self._shown = text[len(self._shown) :], text
        if len(self._window) > _WINDOW:
            del self._window[:-_CONTEXT]
            self._shown = await self._decode(self._window)
        return piece

    async def finish(self) -> str:
        """The text that still waited: half characters show as U+FFFD."""
        return (await self._decode(self._window))[len(self._shown) :] if self._window else ""

    async def _decode(self, tokens: Sequence[int]) -> str:
        batch = {
            "TOKENS_BATCH": np.array([[tokens]], np.int32),
            "SEQUENCE_LENGTH": np.array([[len(tokens)]], np.int32),
        }
        made = await self._postprocessing.infer(batch)
        return b"".join(np.ravel(made["OUTPUT"])).decode(errors="replace")


class StopTrimmer:
    """Ends a text behind the first of several words, which stays in it."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words
        self._longest = max(map(len, words), default=0)
        self._tail = ""
        self.found = False

    def push(self, piece: str) -> str:
        """The part of the next piece that belongs to the text."""
        if self.found or not self._words:
            return "" if self.found else piece
        text = self._tail + piece
        ends = [at + len(word) for word in self._words if (at := text.find(word)) >= 0]
        if ends:
            self.found = True
            return text[len(self._tail) : min(ends)]
        self._tail = text[-(self._longest - 1) :] if self._longest > 1 else ""
        return piece

    def trim_whole(self, text: str, prompt: str) -> str:
        """A whole text, which may begin with the prompt, where no word is looked for."""
        begin = len(prompt) if text.startswith(prompt) else 0
        ends = [at + len(word) for word in self._words if (at := text.find(word, begin)) >= 0]
        return text[: min(ends, default=len(text))]
