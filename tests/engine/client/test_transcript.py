"""What becomes of the tokens that are heard in a window."""

import pytest

from charonia.engine.client.transcript import HeardWindow, SoundWindow, TimedTokens, segment_of, split_times, words_of
from charonia.tokenization.speech_words import SpokenWord

FIRST = 100
"""The token that is the time 0."""


def at(seconds: float) -> int:
    return FIRST + round(seconds / 0.02)


@pytest.mark.parametrize(
    ("tokens", "parts"),
    [
        ([at(0), 1, 2, at(1.5), at(1.5), 3, at(4)], [(0.0, 1.5, 4), (1.5, 4.0, 3)]),
        ([at(0.5), 1, 2], [(0.5, None, 3)]),
        ([at(0), 1, at(2), at(2.5), 3], [(0.0, 2.0, 3), (2.5, None, 2)]),
        ([1, 2], [(0.0, None, 2)]),
        ([at(0), at(0)], []),
        ([at(0), 1, at(2), at(2)], [(0.0, 2.0, 3)]),
        ([], []),
        ([at(3), 1, at(2)], [(3.0, 3.0, 3)]),  # which the rules of times exclude
    ],
)
def test_parts_go_from_time_to_time(tokens: list[int], parts: list[tuple[float, float | None, int]]) -> None:
    split = split_times(tokens, FIRST)
    assert [(part.start, part.end, len(part.tokens)) for part in split] == parts
    assert all(tuple(tokens[part.first : part.first + len(part.tokens)]) == part.tokens for part in split)
    assert [token for part in split for token in part.tokens if token < FIRST] == [
        token for token in tokens if token < FIRST
    ]


def heard(text: str = "some words", logprob: float = -0.5, no_speech: float = 0.0) -> HeardWindow:
    return HeardWindow((1,), text, 0.0, logprob, no_speech)


def test_what_makes_no_sense_is_heard_again() -> None:
    assert heard().makes_sense
    assert heard("").makes_sense
    assert not heard("again and " * 40).makes_sense
    assert heard("again and " * 40).compression > 2.4
    assert not heard(logprob=-1.1).makes_sense
    assert not heard(logprob=-1.1, no_speech=0.5).makes_sense


def test_silence_is_both_unlikely_words_and_likely_silence() -> None:
    silence = heard(logprob=-1.1, no_speech=0.7)
    assert silence.is_silence
    assert silence.makes_sense
    assert not heard(logprob=-0.9, no_speech=0.9).is_silence


def test_a_segment_lies_within_its_window() -> None:
    window = SoundWindow(27.5, 40.0)
    for part, times in (
        (TimedTokens(1.0, 2.5, (5, 6)), (28.5, 30.0)),
        (TimedTokens(1.0, None, (5, 6)), (28.5, 40.0)),
        (TimedTokens(1.0, 29.0, (5, 6)), (28.5, 40.0)),
        (TimedTokens(20.0, 29.0, (5, 6)), (40.0, 40.0)),
    ):
        segment = segment_of(part, " words", window, heard())
        assert (segment.start, segment.end) == times
        assert (segment.text, segment.tokens, segment.window) == (" words", (5, 6), 27.5)


def test_a_word_is_said_until_its_last_token_was_heard() -> None:
    words = [SpokenWord(" so", 0, 1), SpokenWord(" goes,", 1, 3), SpokenWord(" ", 3, 4), SpokenWord(" on", 4, 5)]
    timed = words_of(words, [1, 2, 3, 5, 6], [5, 10, 20, 35, 40, 50, 9000], SoundWindow(27.5, 40.0))
    assert [(word.text, word.start, word.end) for word in timed] == [
        (" so", 27.6, 27.7),
        (" goes,", 27.7, 28.2),
        (" on", 28.5, 40.0),
    ]
    [first] = words_of(words[:1], [0], [5], SoundWindow(27.5, 40.0))
    assert (first.start, first.end) == (27.5, 27.6)
