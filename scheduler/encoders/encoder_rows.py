"""Rows that an encoder has made and a prompt brings along: in place of embeddings, or for layers to attend to.

A prompt without any has no spans and no rows. Knows no tensors: rows are bytes.
"""

from collections.abc import Iterable
from hashlib import shake_128
from math import prod

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...core.errors import InvalidArgument


class EmbeddedSpan(msgspec.Struct, array_like=True, frozen=True):
    """Neighbouring places of a prompt whose input is not their token's embedding but a row of its own, such as the part
    of an image that an encoder has made of it. The token ids at these places say nothing."""

    start: int
    """The first place."""
    length: int
    """How many there are."""
    digest: bytes
    """What the rows depend on, hashed: equal digests have equal rows, grids and `deepstack`."""
    rows: bytes
    """[length, hidden] in `dtype`, one row after the other."""
    dtype: str
    """torch's name of it."""
    grid: tuple[int, int, int] = (0, 0, 0)
    """The places by time, height and width, in whose order they stand; zeros where positions have one dimension."""
    bidirectional: bool = False
    """Whether its places see one another, and not only those before them. Then one step computes all of them."""
    deepstack: bytes = b""
    """[layers, length, hidden] in `dtype`: rows that are added to the places' states after each of the first layers."""

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def shift(self) -> int:
        """What it adds to the positions of what follows: these go on behind the largest of its grid's, and not behind
        as many as it has places."""
        return max(self.grid) - self.length if any(self.grid) else 0

    def without_rows(self) -> "EmbeddedSpan":
        return msgspec.structs.replace(self, rows=b"", deepstack=b"")

    def identities(self) -> NDArray[np.int32]:
        """What stands for the places where tokens are compared: int32 [length] made of the digest, each below 0 as no
        token id is."""
        numbers = np.frombuffer(shake_128(self.digest).digest(4 * self.length), np.int32)
        negative: NDArray[np.int32] = numbers | np.int32(-(2**31))
        return negative


class EncoderRows(msgspec.Struct, array_like=True, frozen=True):
    """What an encoder made of the sound or the text that a decoder says something of: each of its layers attends to
    all of it, beside its own tokens."""

    length: int
    """How many rows there are."""
    digest: bytes
    """What the rows depend on, hashed: equal digests have equal rows."""
    rows: bytes
    """[length, width] in `dtype`, one row after the other."""
    dtype: str
    """torch's name of it."""
    tokens: int = 0
    """Tokens of the text that was encoded; 0 for a sound."""


def check_spans(spans: Iterable[EmbeddedSpan], prompt: int, step_tokens: int) -> None:
    """Raises `InvalidArgument` where the spans are none of a prompt of so many tokens, or one step, which has room for
    `step_tokens` of them, could never compute all places of one that see one another."""
    end = 0
    for span in spans:
        where = f"the {span.length} places from {span.start} on that are no tokens"
        if span.length < 1 or not end <= span.start <= span.end <= prompt:
            raise InvalidArgument(f"{where} lie outside of the prompt, or in others of the kind", field="prompt")
        if any(span.grid) and prod(span.grid) != span.length:
            raise InvalidArgument(f"{where} are not those of a grid of {span.grid}", field="prompt")
        if span.bidirectional and span.length > step_tokens:
            room = f"are computed in one step, which has room for {step_tokens}: max_num_batched_tokens is too low"
            raise InvalidArgument(f"{where} {room}", field="prompt")
        end = span.end


def spans_from(spans: tuple[EmbeddedSpan, ...], computed: int) -> tuple[tuple[EmbeddedSpan, ...], int]:
    """The spans of which some place comes after so many tokens, and the sum of `shift` of those before them."""
    behind = [span for span in spans if span.end <= computed]
    return spans[len(behind) :], sum(span.shift for span in behind)


def chunk_of_spans(spans: Iterable[EmbeddedSpan], start: int, count: int, most: int) -> int:
    """How many of `count` tokens from `start` on a step computes that has room for `most`. The chunk ends before places
    that see one another or, if it begins there, behind them; it is 0 where they are too many for the step."""
    end = start + count
    for span in spans:
        if span.bidirectional and span.start < end < span.end:
            if start < span.start:
                return span.start - start
            whole = span.end - start
            return whole if whole <= most else 0
    return count
