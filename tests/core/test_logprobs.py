"""Scores of prompts: what is written is read, from any position on."""

import numpy as np
import pytest

from charonia.core.logprobs import Logprobs, PromptLogprobs, RankedLogprobs


def scores(count: int, most: int, first: int = 3) -> PromptLogprobs:
    """Every number its own."""
    chosen, ranks = -np.arange(count, dtype=np.float32) - 0.5, np.arange(count, dtype=np.int32) + 1
    ids = np.arange(count * most, dtype=np.int32).reshape(count, most)
    return PromptLogprobs.from_arrays(first, chosen, ranks, ids, -ids.astype(np.float32) / 4)


def test_columns_are_read_token_by_token() -> None:
    assert scores(2, 2).to_list() == [
        RankedLogprobs(Logprobs(-0.5, [0, 1], [0.0, -0.25]), 1),
        RankedLogprobs(Logprobs(-1.5, [2, 3], [-0.5, -0.75]), 2),
    ]


@pytest.mark.parametrize("most", [0, 1, 3])
@pytest.mark.parametrize("skipped", range(5))
def test_those_from_a_position_on(most: int, skipped: int) -> None:
    whole = scores(4, most)
    rest = whole.from_position(3 + skipped)
    assert (rest.start, rest.end) == (3 + skipped, 7)
    assert rest.to_list() == whole.to_list()[skipped:]
    assert bool(rest) == (skipped < 4)
