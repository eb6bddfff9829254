"""Which sequences an encoder computes together: of similar length, so that little is padded, and not too many tokens.

Pure logic over lengths.
"""

from collections.abc import Iterator, Sequence

_LEAST_FILLED = 0.75
"""Of the tokens of a batch, how many at least are no padding, unless it is so small that it makes no odds."""

_SMALL = 256
"""Tokens of a batch, padding included, below which a longer row costs less than another pass."""


def batch_by_length(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Indices of `lengths` in batches, each index in exactly one; the longest come first.

    No batch has more than `budget` tokens, padding included, but a single sequence may alone.
    """
    batch: list[int] = []
    longest = tokens = 0
    for index in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        if batch and not _fits(longest, len(batch) + 1, tokens + lengths[index], budget):
            yield batch
            batch, tokens = [], 0
        if not batch:
            longest = lengths[index]
        batch.append(index)
        tokens += lengths[index]
    if batch:
        yield batch


def _fits(longest: int, rows: int, tokens: int, budget: int) -> bool:
    padded = longest * rows
    return padded <= budget and (padded <= _SMALL or tokens >= _LEAST_FILLED * padded)
