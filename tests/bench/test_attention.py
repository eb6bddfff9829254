"""The attention bench on a case small enough to run at every commit."""

import pytest
import torch

from charonia.bench.attention import BYTES, AttentionCase, step
from charonia.engine.cpu import library


def test_operations_are_those_of_the_keys_seen() -> None:
    """Two tokens on top of three see four and five keys; each key and value is one multiplication and one sum a head's
    dimension."""
    assert AttentionCase(1, 3, 2).operations == (4 + 5) * 2 * 2 * 14 * 64 * 24
    assert AttentionCase(8, 3, 2).operations == 8 * AttentionCase(1, 3, 2).operations


def test_bytes_of_a_token() -> None:
    assert BYTES["auto"] == 2 * 2 * 2 * 64 * 24
    assert BYTES["int8"] == 2 * 2 * (64 + 4) * 24


@pytest.mark.skipif(library.level() is None, reason="no C extension here")
@pytest.mark.parametrize("contender", [("native", "auto"), ("native", "int8"), ("cpu", "auto")])
def test_a_step_runs(contender: tuple[str, str]) -> None:
    before = torch.get_num_threads()
    step(AttentionCase(2, 20, 3), *contender)()
    assert torch.get_num_threads() == before
