"""Encoders of sounds: their rows are those of transformers, whatever other windows are computed beside them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import WhisperModel

from charonia.classic_backends.vision.vision_files import read_vision_files
from charonia.classic_backends.vision.vision_modules import VisionTower
from charonia.core.errors import InvalidArgument
from charonia.core.media import FEATURES
from tests.hearing_models import write_whisper


@torch.inference_mode()
def test_rows_are_those_of_transformers(tmp_path: Path) -> None:
    directory = write_whisper(tmp_path)
    files = read_vision_files(directory, "auto")
    assert not any("decoder" in weight.name for weight in files.weights)
    windows = [{FEATURES: torch.randn(1, 80, 3000, generator=torch.manual_seed(seed)).numpy()} for seed in range(3)]
    model: Any = WhisperModel.from_pretrained(directory, dtype=torch.float32)
    expected = [model.encoder(torch.tensor(window[FEATURES])).last_hidden_state[0] for window in windows]
    alone = VisionTower(files, "cpu", together=False).encode(windows)
    beside = VisionTower(files, "cpu", together=True).encode(windows)
    for wanted, one, other in zip(expected, alone, beside, strict=True):
        assert torch.equal(one.rows, wanted)
        assert one.rows.shape == (1500, 64)
        torch.testing.assert_close(other.rows, one.rows, rtol=1e-4, atol=1e-4)


def test_an_encoder_that_lacks_something_is_refused(tmp_path: Path) -> None:
    files = read_vision_files(write_whisper(tmp_path), "auto")
    lacking = files._replace(weights=tuple(weight for weight in files.weights if "conv1" not in weight.name))
    with pytest.raises(InvalidArgument, match=r"lacks 2 weights of its encoder: conv1\.bias, conv1\.weight"):
        VisionTower(lacking, "cpu", together=False)
