"""The bench of embedders: contenders say the same of the same texts, and what is not here is said."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from charonia.bench import embedders
from charonia.bench.embedders import draw_texts, installed_contenders, measure
from charonia.bench.random_encoder import write_encoder
from charonia.core.errors import InvalidArgument

OURS, PADDED = "charonia", "onnxruntime, padded"


@pytest.mark.proof
def test_vectors_agree_and_turns_are_counted(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    write_encoder(tmp_path, hidden=64, layers=1)
    lines: list[str] = []
    runs = measure(tmp_path, [OURS, PADDED], texts=3, repeats=2, log=lines.append)
    assert [len(turns) for turns in runs.values()] == [2, 2]
    assert [run.tokens for run in runs[OURS]] == [run.tokens for run in runs[PADDED]]
    assert all(run.cpu > 0 for turns in runs.values() for run in turns)
    assert len(lines) == 4


def test_what_says_something_else_is_no_contender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_encoder(tmp_path, hidden=32, layers=1)
    wrong = {**embedders._CONTENDERS, PADDED: lambda directory: lambda texts: np.zeros((len(texts), 32), np.float32)}
    monkeypatch.setattr(embedders, "_CONTENDERS", wrong)
    with pytest.raises(InvalidArgument, match=rf"vectors of {PADDED} differ from ours by"):
        measure(tmp_path, [OURS, PADDED], texts=2, repeats=1, log=lambda line: None)


def test_lengths_are_drawn_between_the_bounds() -> None:
    lengths = [len(text.split()) + 2 for text in draw_texts(400, seed=3)]
    assert 16 <= min(lengths) < 32
    assert 480 < max(lengths) <= 512


def test_what_is_not_installed_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    lines: list[str] = []
    assert installed_contenders(lines.append) == [OURS]
    assert lines[0] == "sentence-transformers is left out: pip install sentence-transformers"
