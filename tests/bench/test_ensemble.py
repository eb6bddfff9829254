"""The bench of ensembles: graphs whose steps fit together, and medians of turns made by hand."""

from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from charonia.bench.ensemble import (
    CHAIN,
    GRAPH,
    LLM,
    SCRIPTED,
    GraphLoad,
    write_chain,
    write_graphs,
)
from charonia.bench.trial import TrialVerdict, show_verdicts
from charonia.core.backends import ignore_progress
from charonia.core.model import ModelConfig
from charonia.core.tensor import TensorSpec
from charonia.ensembles.ensemble_plan import plan_ensemble
from charonia.repository.builder import ModelBuilder
from charonia.repository.gateway import InProcessGateway
from charonia.repository.model_source import read_model
from charonia.telemetry.shared_state import ModelServices

COUNTING = ModelConfig(
    LLM,
    "1",
    "charonia",
    decoupled=True,
    inputs=(TensorSpec("text_input", "BYTES", (1,), True), TensorSpec("stream", "BOOL", (1,), True)),
    outputs=(TensorSpec("text_output", "BYTES", (-1,)),),
)


@pytest.mark.parametrize(("name", "stages"), [(GRAPH, 2), (SCRIPTED, 2), (CHAIN, 1)])
def test_the_graphs_fit_their_models(tmp_path: Path, name: str, stages: int) -> None:
    write_graphs(tmp_path, script=True)
    write_chain(tmp_path)

    def config(model: str, version: str = "") -> ModelConfig:
        if model == LLM:
            return COUNTING
        source = read_model(tmp_path / model)
        services = ModelServices(InProcessGateway(), cast(Any, None))
        factory = ModelBuilder(auto_complete=False).prepare(source, source.versions[0], services)
        return factory.build(ignore_progress).config

    plan = plan_ensemble(config(name), config)
    assert (len(plan.stages), len(list(plan.steps))) == (stages, 3)


def test_verdicts_are_told_beside_their_bars() -> None:
    console = Console(record=True, width=100)
    show_verdicts(
        console, [TrialVerdict("one", 61.0, 60.0, at_least=False), TrialVerdict("two", 0.5, 0.4, at_least=True)]
    )
    said = console.export_text()
    assert "at most 60" in said
    assert "missed" in said
    assert "at least 0.4" in said


def test_a_quick_load_is_small() -> None:
    assert GraphLoad(quick=True).sized().streams < GraphLoad().sized().streams
