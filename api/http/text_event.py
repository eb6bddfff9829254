"""Server-sent events of which all but a text is the same each time: as most of a language model's are."""

from dataclasses import dataclass

import orjson

MOST_TEXT = 4096
"""Characters of a text whose event is written as soon as it is made. A longer one is of many tokens."""


@dataclass(frozen=True, slots=True)
class TextEvent:
    """What stands before and behind the JSON of the text; a call makes the event."""

    before: bytes
    behind: bytes

    def __call__(self, text: str) -> bytes:
        return self.before + orjson.dumps(text) + self.behind


class ChunkHeads(dict[int, bytes]):
    """What stands in an HTTP chunk with an `event` before the JSON of its text, by the bytes of that JSON."""

    def __init__(self, event: TextEvent) -> None:
        super().__init__()
        self._before = event.before
        self._around = len(event.before) + len(event.behind)

    def __missing__(self, size: int) -> bytes:
        head = self[size] = b"%x\r\n%b" % (size + self._around, self._before)
        return head
