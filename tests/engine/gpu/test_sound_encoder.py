"""Whisper's encoder on the path of a GPU, interpreted: windows together, as transformers computes them."""

from pathlib import Path

import pytest
import torch

from charonia.engine.attention.triton_attention import TritonAttention
from charonia.engine.models.sound_encoder import SoundEncoder, load_sound_encoder
from tests.engine.models.test_sound_encoder import BINS, HOST, write_sound_encoder

POSITIONS = 40


@pytest.mark.proof
@torch.inference_mode()
def test_rows_are_those_of_transformers(interpreted: None, tmp_path: Path) -> None:
    model = write_sound_encoder(tmp_path, POSITIONS)
    features = torch.randn(2, BINS, 2 * POSITIONS, generator=torch.manual_seed(1))
    encoder = load_sound_encoder(tmp_path, torch.float32, HOST, "none")
    assert isinstance(encoder, SoundEncoder)
    assert isinstance(encoder._attention, TritonAttention)
    expected = model.encoder(features).last_hidden_state
    torch.testing.assert_close(encoder(features), expected, rtol=0, atol=2e-5)
