"""Text on its way to the reader, whose citations, such as [2], are of sources that there are."""

import re
from collections.abc import Sequence

_CITATION = re.compile(r"\s\[(\d{1,3})\]")
_MAYBE_CITATION = re.compile(r"\s(\[\d{0,3})?\Z")


class Citations:
    """Takes a text in pieces. A citation that a piece cuts in two is held back until the rest has come."""

    def __init__(self, sources: Sequence[str]) -> None:
        self._sources = sources
        self._cited: set[int] = set()
        self._held = ""

    def add(self, text: str) -> str:
        """What can be shown by now, without citations of anything but a source."""
        text = self._held + text
        found = _MAYBE_CITATION.search(text)
        end = found.start() if found else len(text)
        self._held = text[end:]
        return _CITATION.sub(self._checked, text[:end])

    def end(self) -> str:
        """What is left, and the list of the sources that were cited."""
        listed = [f"[{number}] {self._sources[number - 1]}" for number in sorted(self._cited)]
        return self._held.rstrip() + "\n\n" + "\n".join(listed)

    def _checked(self, citation: re.Match[str]) -> str:
        number = int(citation[1])
        if not 1 <= number <= len(self._sources):
            return ""
        self._cited.add(number)
        return citation[0]
