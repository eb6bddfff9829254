"""The grids of the proof of the analyzer: as large as it says, and none of their configurations like another."""

from pathlib import Path

import pytest

from charonia.extras.optimizer.parameters import ClosedLoop, equivalence, parse_sweeps
from charonia.extras.optimizer.search_space import SearchSpace
from charonia.extras.optimizer.tuned_models import open_models

from .analyze import GRID_POINTS, GRIDS, write_model


@pytest.mark.parametrize("kind", ["mlp", "llm"])
def test_a_grid_has_as_many_configurations_that_differ_as_it_says(kind: str, tmp_path: Path) -> None:
    grid = GRIDS[kind]
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "models" / "mlp" / "1").mkdir(parents=True)
    (tmp_path / "models" / "mlp" / "config.pbtxt").write_text('backend: "onnxruntime"\nmax_batch_size: 32\n')
    write_model(tmp_path / "models", "llm", tmp_path / "checkpoint")
    with open_models(str(tmp_path / "models"), kind) as models:
        parameters = parse_sweeps(grid.sweeps, models)
        space = SearchSpace(parameters, equivalence(parameters, models, ClosedLoop(grid.concurrency)))
    assert space.size == space.combinations == GRID_POINTS == 48
