"""Ends a growing text at a stop string. Knows nothing of tokens: text in, text out."""

from collections.abc import Sequence


class StopStrings:
    """Shows a growing text up to the first of several strings, and holds back what may yet become one of them.

    The first is the one that is complete first, of two that end together the longer: so it does not matter how the
    text was cut into pieces. The string itself is shown only with `include`.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.found: str | None = None

    def __bool__(self) -> bool:
        """Whether there are stop strings."""
        return bool(self._stops)

    def push(self, piece: str) -> str:
        """The text that may be shown by now; nothing more once a string was `found`."""
        if self.found is not None or not self._stops:
            return "" if self._stops else piece
        text = self._held + piece
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, begin, self.found = min(found)
            self._held = ""
            return text[: end if self._include else begin]
        begun = self._begun(text)
        self._held = text[begun:]
        return text[:begun]

    def finish(self) -> str:
        """The rest of the text at its end: what was held back was no stop string."""
        held, self._held = self._held, ""
        return held

    def _begun(self, text: str) -> int:
        """The first index from which on the text is the beginning of a stop string; the text's end if there is none."""
        places = range(max(0, len(text) - self._longest + 1), len(text))
        return next((at for at in places if any(stop.startswith(text[at:]) for stop in self._stops)), len(text))
