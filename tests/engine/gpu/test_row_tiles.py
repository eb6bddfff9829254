"""Tiles whose lengths the device alone has are those that the host lays."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from charonia.engine.gpu.row_tiles import lay_recorded_tiles, lay_tiles


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.sampled_from((1, 8, 16)), st.integers(0, 40))
def test_tiles_of_a_recorded_step(lengths: list[int], size: int, more: int) -> None:
    """With some for nobody behind them."""
    rows = np.flatnonzero(lengths)
    right = lay_tiles(rows, np.array(lengths)[rows], size, torch.device("cpu"))
    found = lay_recorded_tiles(torch.tensor(lengths), size, sum(lengths) + more, len(lengths))
    assert torch.equal(found[: len(right)], right)
    assert (found[len(right) :, 0] == -1).all()
