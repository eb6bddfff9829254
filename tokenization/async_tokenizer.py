"""A tokenizer for an event loop: long texts are handled in threads, so that the loop goes on.

Knows nothing of requests and engines.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from ..core.errors import Unavailable
from ..core.request import Conversation, Prompt
from .tokenizer import Tokenizer, TokenLimit

_THREADS = 2
_SHORT = 256
"""Characters, or tokens, that take less time to convert than to hand to another thread."""

P = ParamSpec("P")
T = TypeVar("T")


class AsyncTokenizer:
    """The methods of `tokenizer` for one event loop. They raise as its own do, and `Unavailable` for long texts after
    `close`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(_THREADS, "tokenizer")

    async def prompt_ids(
        self, prompt: Prompt, special: bool = True, limit: TokenLimit | None = None, kept: int | None = None
    ) -> list[int]:
        # A template counts as long whatever it renders.
        size = _SHORT + 1 if isinstance(prompt, Conversation) else len(prompt) if isinstance(prompt, str) else 0
        return await self._run(size, self._tokenizer.prompt_ids, prompt, special, limit, kept)

    async def text_ids(self, text: str, limit: TokenLimit, field: str) -> list[int]:
        return await self._run(len(text), self._tokenizer.text_ids, text, False, limit, field)

    async def word_ids(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        return await self._run(sum(map(len, words)), self._tokenizer.word_ids, words)

    async def prompt_text(self, prompt: Prompt, ids: Sequence[int]) -> str:
        return await self._run(0 if isinstance(prompt, str) else len(ids), self._tokenizer.prompt_text, prompt, ids)

    async def decode(self, ids: Sequence[int]) -> str:
        return await self._run(len(ids), self._tokenizer.decode, ids)

    def close(self) -> None:
        """Take no more long texts; those that were taken are finished."""
        self._threads.shutdown(wait=False)

    async def _run(self, size: int, work: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
        if size <= _SHORT:
            return work(*given, **named)
        try:
            future = self._threads.submit(work, *given, **named)
        except RuntimeError:
            raise Unavailable("the model is unloaded") from None
        return await asyncio.wrap_future(future)
