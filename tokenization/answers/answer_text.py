"""The growing text of an answer, and the steps that formats read it by: markers, runs of characters, words.

Reading is a generator that yields where it needs more text. Steps depend on characters, not on how they were split, and
at most the longest marker waits.
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
    """The text is no call of the format."""


class ShortText:
    """A text made of pieces, of at most `most` characters; `add` raises MalformedCall beyond them."""

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
    """Texts that divide an answer, possibly none. None of them contains another, unless at its end."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = tuple(texts)
        self._longest = max(map(len, texts), default=0)

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self._texts)) or "(?!)")

    @cached_property
    def _first_letters(self) -> re.Pattern[str]:
        return re.compile("|".join({re.escape(text[0]) for text in self._texts}) or "(?!)")

    def absent(self, text: str) -> bool:
        """Whether no marker begins in a text."""
        return self._first_letters.search(text) is None

    def begun(self, text: str, start: int) -> int:
        """The place from `start` on at which the end of a text may be the beginning of a marker; its length if
        nowhere."""
        at = max(start, len(text) - self._longest + 1)
        while (match := self._first_letters.search(text, at)) is not None:
            at = match.start()
            if any(marker.startswith(text[at:]) for marker in self._texts):
                return at
            at += 1
        return len(text)


class AnswerText:
    """The cursor of one answer. What is read after `hold` can be had again."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._held: list[str] | None = None
        self._sought: tuple[Markers, Sink] | None = None
        """What is looked for, and who gets the text before it, while more text is needed to find it."""

    def sink_of(self, piece: str) -> Sink | None:
        """Who gets a whole piece, if to feed it would have no other consequence."""
        if self._sought is None or self._held is not None or self._at < len(self._text):
            return None
        markers, sink = self._sought
        return sink if markers.absent(piece) else None

    def feed(self, piece: str) -> None:
        self._text = self._text[self._at :] + piece
        self._at = 0

    def end(self) -> None:
        self._ended = True

    def hold(self, text: str = "") -> None:
        """Keep `text`, and what is read from now on."""
        self._held = [text]

    def release(self) -> str:
        """The text read since `hold`, which is no longer kept."""
        text = "".join(self._held or ())
        self._held = None
        return text

    def find(self, markers: Markers, sink: Sink) -> Reading[str]:
        """Give `sink` the text up to the first marker, and return that; empty if the text ends first."""
        while True:
            match = self._search(markers.pattern)
            if match is not None:
                self._give(sink, match.start())
                return self._take(match.end())
            self._give(sink, len(self._text) if self._ended else markers.begun(self._text, self._at))
            if self._ended:
                return ""
            self._sought = markers, sink
            yield
            self._sought = None

    def run(self, pattern: re.Pattern[str], sink: Sink) -> Reading[None]:
        """Give `sink` the next characters that are in the class that `pattern` repeats."""
        while True:
            self._give(sink, self._match(pattern))
            if self._at < len(self._text) or self._ended:
                return
            yield

    def spaces(self, sink: Sink = len) -> Reading[None]:
        yield from self.run(_SPACES, sink)

    def peek(self, size: int = 1) -> Reading[str]:
        """The next characters, unread; fewer only at the end of the text."""
        while len(self._text) - self._at < size and not self._ended:
            yield
        return self._text[self._at : self._at + size]

    def look(self, pattern: re.Pattern[str], most: int) -> Reading[str]:
        """The next characters that are in the class that `pattern` repeats, at most `most`, unread."""
        while True:
            end = self._match(pattern, most)
            if end < len(self._text) or end - self._at >= most or self._ended:
                return self._text[self._at : end]
            yield

    def accept(self, *words: str) -> Reading[str]:
        """Skip the first of `words` that comes next, and return it; empty if none does."""
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
        """Read characters that were seen already."""
        return self._take(self._at + size)

    def unread(self, text: str) -> None:
        """Let a text come again that the last step read, and that is not kept."""
        self._at -= len(text)

    def _search(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        return pattern.search(self._text, self._at)

    def _match(self, pattern: re.Pattern[str], most: int = sys.maxsize) -> int:
        match = pattern.match(self._text, self._at, min(self._at + most, len(self._text)))
        return self._at if match is None else match.end()

    def _give(self, sink: Sink, end: int) -> None:
        if end > self._at:
            sink(self._take(end))

    def _take(self, end: int) -> str:
        piece = self._text[self._at : end]
        self._at = end
        if self._held is not None:
            self._held.append(piece)
        return piece
