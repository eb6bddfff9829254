"""What a server that takes configurations is asked for. It is a stand-in: real ones are in e2e/test_analyze.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from charonia.bench.load.driver import LoopMode, RequestOptions
from charonia.bench.load.plan import Prompts
from charonia.bench.load.worker import LoadRun, LoadTarget, WorkerOutcome
from charonia.bench.server_process import ServerAddress
from charonia.extras.optimizer import measured_server
from charonia.extras.optimizer.measured_server import MeasuredServer
from charonia.extras.optimizer.tuned_models import TunedModels
from charonia.repository.config_io import complete_fields

LOAD = LoadRun(
    target=LoadTarget(host="", port=0, door="completions", manner=RequestOptions("llm")),
    jobs=[],
    prompts=Prompts(seed=10),
    pace=LoopMode(),
)


def test_a_load_has_no_prompts_of_one_before_it_that_may_be_cached(
    monkeypatch: pytest.MonkeyPatch, opened: Callable[[str], TunedModels], repository: Path
) -> None:
    seeds: list[int] = []

    def run_here(load: LoadRun, watch: Any) -> WorkerOutcome:
        seeds.append(load.prompts.seed)
        return WorkerOutcome([], 0.0, 1.0)

    monkeypatch.setattr(measured_server, "run_here", run_here)
    monkeypatch.setattr(measured_server, "ask_server", lambda *_, **__: [])
    monkeypatch.setattr(MeasuredServer, "address", ServerAddress("", 0, 0, pid=1))
    server = MeasuredServer(repository, opened("llm").models)
    for size, times in ((1, 2), (1, 1), (2, 2)):
        server.load({"llm": complete_fields({"max_batch_size": size})})
        for _ in range(times):
            server.put(LOAD, print)
    assert seeds == [10, 11, 12, 10, 11]
