"""What int8 and int4 cost the demo model, on text that its training held out."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from charonia.bench import perplexity

TOKENS = 2500


def test_quantised_it_predicts_the_held_out_text_as_well(root: Path) -> None:
    """Perplexity within 0.5 and 3 % (0.002 and 0.5 % on 20,000 tokens), and one that this model has on such text."""
    demo = root / "examples" / "model_repository" / "demo" / "1"
    plain, eight, four = perplexity.compare(
        demo, perplexity.windows_of(demo, list(perplexity.held_out_modules()), TOKENS)
    )
    assert plain.tokens > TOKENS // 2
    assert 10 < plain.perplexity < 60
    assert len({plain.nats, eight.nats, four.nats}) == 3, "nothing was quantised"
    assert abs(eight.perplexity / plain.perplexity - 1) < 0.005
    assert abs(four.perplexity / plain.perplexity - 1) < 0.03


def test_held_out_is_what_the_training_held_out(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("prepare", root / "examples" / "training" / "prepare.py")
    assert spec
    assert spec.loader
    prepare = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "prepare", prepare)
    spec.loader.exec_module(prepare)
    selection = json.loads((root / "examples" / "training" / "selection.json").read_text())
    origins = [f"stdlib/{number}.py" for number in range(500)]
    assert [perplexity.is_held_out(origin) for origin in origins] == [
        prepare.split_of(origin, selection) == "held_out" for origin in origins
    ]


def test_windows_take_from_every_text(root: Path) -> None:
    demo = root / "examples" / "model_repository" / "demo" / "1"
    windows = perplexity.windows_of(demo, ["a = 1\n" * 1000, "b = 2\n" * 10], 1500)
    assert [len(window) for window in windows][:2] == [512, 50]
    assert sum(map(len, windows)) >= 1500
    assert all(window.dtype == torch.int64 for window in windows)
