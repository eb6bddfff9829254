"""Memory of a model that was unloaded comes back: `tests/proofs/reload.py` with a small one, a few times."""

from itertools import pairwise
from pathlib import Path

from ..proofs import reload

SIZES = (512, 3072, 4096, 512)
"""16 million weights, 65 MB."""


def test_unloading_gives_memory_back(tmp_path: Path) -> None:
    done = reload.reload(tmp_path / "models", SIZES, rounds=4)
    weights = 4 * sum(wide * out for wide, out in pairwise(SIZES))
    assert all(each.loaded - each.unloaded > 0.9 * weights for each in done.rounds), "the model was not there"
    assert done.growth <= 0.05, done
