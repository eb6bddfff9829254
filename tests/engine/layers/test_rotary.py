"""Tables of cosines and sines grow with what is served, and say what they would have said at once."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from charonia.engine.checkpoint.model_spec import RopeSpec
from charonia.engine.layers import rotary
from charonia.engine.layers.rotary import FusedRotary, TorchRotary
from charonia.engine.models import interfaces
from charonia.engine.models.interfaces import default_length

from ..models.test_models import logits, prompts

ROPE = RopeSpec()


def test_a_table_grows_by_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = FusedRotary(ROPE, 16, 1000)
    assert whole.covered == 1000
    monkeypatch.setattr(rotary, "_COVERED_FIRST", 8)
    monkeypatch.setattr(rotary, "_PIECE", 64)
    grown = FusedRotary(ROPE, 16, 1000)
    assert grown.covered == 64
    place = grown.cos_sin.data_ptr()
    angles = grown(torch.tensor([3, 700]))
    assert grown.covered == 704
    assert torch.equal(angles.cos_sin[:704], whole.cos_sin[:704])
    grown.cover(10**9)
    assert torch.equal(grown.cos_sin, whole.cos_sin)
    assert grown.cos_sin.data_ptr() == place  # programs know it
    pieces = TorchRotary(ROPE, 16, 1000, torch.float32, torch.device("cpu"))
    assert torch.equal(pieces(torch.arange(1000)).cos[:, 0, :8], whole.cos_sin[:, 0])


def test_a_table_of_twenty_million_positions_takes_what_is_served() -> None:
    table = FusedRotary(ROPE, 128, 20_000_000)
    assert table.covered <= 1 << 15
    table(torch.tensor([40_000]))
    assert table.covered < 1 << 16


def test_a_program_sees_positions_that_its_table_had_not(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = logits(checkpoint("llama"), prompts(), torch.float32)
    monkeypatch.setattr(rotary, "_COVERED_FIRST", 4)
    monkeypatch.setattr(rotary, "_PIECE", 4)
    assert torch.equal(logits(checkpoint("llama"), prompts(), torch.float32), right)


def test_a_checkpoint_that_claims_endless_texts_is_served_by_a_length_that_fits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert default_length(131_072) == 131_072
    assert not caplog.records
    assert default_length(20_000_000) == interfaces._LONGEST_BY_DEFAULT
    assert "of the 20000000 that config.json claims" in caplog.text
