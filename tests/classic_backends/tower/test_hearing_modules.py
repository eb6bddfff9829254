"""Encoders of sounds as towers: their rows are those of transformers, whatever other windows stand beside them."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import WhisperModel

from charonia.classic_backends.tower.tower import Tower
from charonia.classic_backends.tower.tower_files import read_tower_files
from charonia.classic_backends.tower.tower_module import OwnParts, load_own_parts
from charonia.core.errors import InvalidArgument
from charonia.core.media import FEATURES
from tests.hearing_models import write_whisper

LOAD = partial(load_own_parts, OwnParts("charonia.engine.models.sound_encoder:load_sound_encoder", "", "none"))


@torch.inference_mode()
def test_rows_are_those_of_transformers(tmp_path: Path) -> None:
    directory = write_whisper(tmp_path)
    files = read_tower_files(directory, "auto")
    assert not any("decoder" in weight.name for weight in files.weights)
    windows = [{FEATURES: torch.randn(1, 80, 3000, generator=torch.manual_seed(seed)).numpy()} for seed in range(3)]
    model: Any = WhisperModel.from_pretrained(directory, dtype=torch.float32)
    expected = [model.encoder(torch.tensor(window[FEATURES])).last_hidden_state[0] for window in windows]
    alone = Tower(files, "cpu", together=False, load=LOAD).encode(windows)
    beside = Tower(files, "cpu", together=True, load=LOAD).encode(windows)
    for wanted, one, other in zip(expected, alone, beside, strict=True):
        torch.testing.assert_close(one.rows, wanted, rtol=0, atol=2e-5)
        assert one.rows.shape == (1500, 64)
        assert torch.equal(other.rows, one.rows)


def test_features_of_another_shape_are_refused(tmp_path: Path) -> None:
    tower = Tower(read_tower_files(write_whisper(tmp_path), "auto"), "cpu", together=False, load=LOAD)
    with pytest.raises(InvalidArgument, match=r"a window of sound has \[80, 3000\] features, and not \[80, 2000\]"):
        tower.encode([{FEATURES: torch.zeros(1, 80, 2000).numpy()}])
