"""The text of an answer as it grows, and what formats read of it: markers, runs of characters, given words.

Reading is a generator that yields where it needs more text. Each step depends on the characters alone and not on the
pieces they came in, so whatever is made of these steps is right for any split. A character is looked at a bounded
number of times: what waits for more text is never longer than the longest marker.
"""

import re
import sys
from collections.abc import Callable, Generator, Sequence
from functools import cached_property
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]
Sink: TypeAlias = Callable[[str], object]

_SPACES = re.compile(r"[ \t\r\n]*")


class MalformedCall(Exception):
    """What is read is no call that its format knows."""


class ShortText:
    """A text that is put together of pieces and not longer than `most` characters.

    `add` raises MalformedCall: it is.
    """

    def __init__(self, most: int) -> None:
        self._left = most
        self._pieces: list[str] = []

    def add(self, piece: str) -> None:
        self._left -= len(piece)
        if self._left < 0:
            raise MalformedCall
        self._pieces.append(piece)

    def __str__(self) -> str:
        return "".join(self._pieces)


class Markers:
    """Texts that part an answer. None of them contains another; there may be none at all."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = tuple(texts)
        self._longest = max(map(len, texts), default=0)

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self._texts)) or "(?!)")

    @cached_property
    def _first_letters(self) -> re.Pattern[str]:
        return re.compile("|".join({re.escape(text[0]) for text in self._texts}) or "(?!)")

    def begun(self, text: str, start: int) -> int:
        """Where the end of a text, from `start` on, may be the beginning of a marker; its length if nowhere."""
        at = max(start, len(text) - self._longest + 1)
        while (found := self._first_letters.search(text, at)) is not None:
            at = found.start()
            if any(each.startswith(text[at:]) for each in self._texts):
                return at
            at += 1
        return len(text)


class AnswerText:
    """The cursor of one answer. What is read while it is `held` can be had again."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._held: list[str] | None = None

    def feed(self, piece: str) -> None:
        self._text = self._text[self._at :] + piece
        self._at = 0

    def end(self) -> None:
        """Nothing more comes."""
        self._ended = True

    def hold(self, text: str = "") -> None:
        """Keep `text`, and what is read from now on."""
        self._held = [text]

    def release(self) -> str:
        """What was read since `hold`; nothing is held any more."""
        held, self._held = self._held or (), None
        return "".join(held)

    def find(self, markers: Markers, sink: Sink) -> Reading[str]:
        """Give `sink` the text up to the first marker, and return that; an empty one if the text ends before."""
        while True:
            found = self._search(markers.pattern)
            if found is not None:
                self._give(sink, found.start())
                return self._take(found.end())
            self._give(sink, len(self._text) if self._ended else markers.begun(self._text, self._at))
            if self._ended:
                return ""
            yield

    def run(self, pattern: re.Pattern[str], sink: Sink) -> Reading[None]:
        """Give `sink` all characters that come next and are in the class that `pattern` repeats."""
        while True:
            self._give(sink, self._match(pattern))
            if self._at < len(self._text) or self._ended:
                return
            yield

    def spaces(self, sink: Sink = len) -> Reading[None]:
        """Skip white space, or give it to `sink`."""
        yield from self.run(_SPACES, sink)

    def peek(self, size: int = 1) -> Reading[str]:
        """The next characters, fewer only where the text ends."""
        while len(self._text) - self._at < size and not self._ended:
            yield
        return self._text[self._at : self._at + size]

    def look(self, pattern: re.Pattern[str], most: int) -> Reading[str]:
        """The characters that come next and are in the class that `pattern` repeats, `most` of them at most; they are
        not read yet."""
        while True:
            end = self._match(pattern, most)
            if end < len(self._text) or end - self._at >= most or self._ended:
                return self._text[self._at : end]
            yield

    def accept(self, *words: str) -> Reading[str]:
        """Skip the one of `words` that comes next and return it; nothing if none does. The first one wins."""
        while True:
            for word in words:
                if self._text.startswith(word, self._at):
                    return self._take(self._at + len(word))
                if not self._ended and word.startswith(self._text[self._at : self._at + len(word)]):
                    break  # it may yet come
            else:
                return ""
            yield

    def skip(self, size: int) -> str:
        """The next characters, which were seen already."""
        return self._take(self._at + size)

    def _search(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        return pattern.search(self._text, self._at)

    def _match(self, pattern: re.Pattern[str], most: int = sys.maxsize) -> int:
        found = pattern.match(self._text, self._at, min(self._at + most, len(self._text)))
        return self._at if found is None else found.end()

    def _give(self, sink: Sink, end: int) -> None:
        if end > self._at:
            sink(self._take(end))

    def _take(self, end: int) -> str:
        taken = self._text[self._at : end]
        self._at = end
        if self._held is not None:
            self._held.append(taken)
        return taken
