"""The comparison of ways to a replica, in small: with affinity, every repeated document is found."""

import tempfile
from pathlib import Path

import pytest

from charonia.bench.replicas import Workload, measure


async def test_a_document_is_computed_once(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("s")))
    workload = Workload(documents=8, document=256, question=16, answer=2, clients=1, requests=30)
    prompts = workload.prompts()
    repeats = len(prompts) - len({tuple(prompt[:256]) for prompt in prompts})
    found = await measure(workload, 2, affinity=True)
    assert found.hit_rate == repeats * 256 / sum(map(len, prompts))
    assert 0.5 <= found.busiest < 1
    assert list(Path(tempfile.gettempdir()).iterdir()) == []  # noqa: ASYNC240
