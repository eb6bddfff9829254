"""Server-sent events of a text, of which most else is the same each time: as most of a language model's are."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import orjson

from ...core.logprobs import TokenLogprob

TextEncoder: TypeAlias = Callable[[str, int, TokenLogprob | None], bytes | None]
"""Encodes what a `TextSink` takes as events, maybe none; None leaves it."""
EventTail: TypeAlias = Callable[[int, TokenLogprob | None], bytes]
"""Makes what stands behind the text of an event."""

MOST_TEXT = 4096
"""Characters of a text whose event is written as soon as it is made. A longer one is of many tokens."""


@dataclass(frozen=True, slots=True)
class TextEvent:
    """A `TextEncoder` of events that are alike but for the text and, with a `tail`, what that makes: what stands before
    and behind the text's JSON. Only without one there is no event of no text."""

    before: bytes
    behind: bytes = b""
    tail: EventTail | None = None

    def __call__(self, text: str, tokens: int, logprob: TokenLogprob | None) -> bytes | None:
        if not text:
            return b"" if self.tail is None else None
        return self.before + orjson.dumps(text) + (self.behind if self.tail is None else self.tail(tokens, logprob))


class ChunkHeads(dict[int, bytes]):
    """What stands in an HTTP chunk with an `event` before the JSON of its text, by the bytes of that JSON."""

    def __init__(self, event: TextEvent) -> None:
        super().__init__()
        self._before = event.before
        self._around = len(event.before) + len(event.behind)

    def __missing__(self, size: int) -> bytes:
        head = self[size] = b"%x\r\n%b" % (size + self._around, self._before)
        return head
