"""What becomes of the tokens that are heard in one window of a sound: whether they make sense, and which parts of the
sound they belong to. Follows arXiv 2212.04356 and its reference."""

import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...core.speech import TranscriptSegment, TranscriptWord
from ...tokenization.speech_tokens import SECONDS_A_TIME
from ...tokenization.speech_words import SpokenWord

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""One after the other, while what is heard makes no sense."""
_MOST_COMPRESSION = 2.4
LEAST_LOGPROB = -1.0
_MOST_NO_SPEECH = 0.6


class SoundWindow(NamedTuple):
    """A part of a sound, in seconds from its beginning."""

    begin: float
    end: float


class HeardWindow(NamedTuple):
    """What was heard in a window at one temperature."""

    tokens: tuple[int, ...]
    """Without the one that ends them."""
    text: str
    temperature: float
    mean_logprob: float
    """The mean of all tokens, the one that ends them included."""
    no_speech: float = 0.0

    @property
    def compression(self) -> float:
        """How many times smaller zlib makes the text: much, where it repeats itself."""
        data = self.text.strip().encode(errors="replace")
        return len(data) / len(zlib.compress(data))

    @property
    def is_silence(self) -> bool:
        """Whether nobody speaks there, likely; what was heard is nothing then."""
        return self.no_speech > _MOST_NO_SPEECH and self.mean_logprob <= LEAST_LOGPROB

    @property
    def makes_sense(self) -> bool:
        return self.is_silence or (self.compression <= _MOST_COMPRESSION and self.mean_logprob >= LEAST_LOGPROB)


class TimedTokens(NamedTuple):
    """Tokens between two times, which are among them, in seconds from the beginning of their window; None: its end."""

    start: float
    end: float | None
    tokens: tuple[int, ...]
    first: int = 0
    """The index of the first one in what was heard."""


def split_times(tokens: Sequence[int], first_time: int) -> list[TimedTokens]:
    """The parts of what was heard, each from a time to the next; a part without text is left out."""
    parts: list[TimedTokens] = []
    start, part, has_text = 0.0, list[int](), False
    for index, token in enumerate(tokens):
        part.append(token)
        if token < first_time:
            has_text = True
            continue
        time = round((token - first_time) * SECONDS_A_TIME, 2)
        if has_text:
            parts.append(TimedTokens(start, max(start, time), tuple(part), index + 1 - len(part)))
            part, has_text = [], False
        else:
            part = [token]
        start = time
    if has_text:
        parts.append(TimedTokens(start, None, tuple(part), len(tokens) - len(part)))
    return parts


def words_of(
    words: Iterable[SpokenWord], indices: Sequence[int], begins: Sequence[int], window: SoundWindow
) -> tuple[TranscriptWord, ...]:
    """The words of some tokens, which have `indices` among those that were heard in a window. `begins`: of each of
    these the row of the encoder that the decoder attends to once it is its input, to say the next: the token ends
    there, and has begun where the one before it ended."""

    def second(index: int) -> float:
        seconds = begins[index] * SECONDS_A_TIME if index >= 0 else 0.0
        return round(min(window.begin + seconds, window.end), 3)

    timed = (
        TranscriptWord(word.text, second(indices[word.first] - 1), second(indices[word.end - 1])) for word in words
    )
    return tuple(word for word in timed if word.text.strip())


def segment_of(
    part: TimedTokens, text: str, window: SoundWindow, heard: HeardWindow, words: tuple[TranscriptWord, ...] = ()
) -> TranscriptSegment:
    """The segment of a part of what was heard in a window."""
    end = window.end if part.end is None else min(window.begin + part.end, window.end)
    return TranscriptSegment(
        start=round(min(window.begin + part.start, end), 3),
        end=round(end, 3),
        text=text,
        tokens=part.tokens,
        temperature=heard.temperature,
        mean_logprob=heard.mean_logprob,
        compression=heard.compression,
        no_speech=heard.no_speech,
        window=round(window.begin, 3),
        words=words,
    )
