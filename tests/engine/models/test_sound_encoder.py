"""Whisper's encoder by our products: its rows are those of transformers' in float32, near them in other precisions, and
the same bits beside whatever other windows."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import WhisperConfig, WhisperForConditionalGeneration

from charonia.engine.checkpoint.model_spec import CheckpointError
from charonia.engine.models.sound_encoder import load_sound_encoder

HOST = torch.device("cpu")
POSITIONS, BINS = 300, 16


def write_sound_encoder(directory: Path, positions: int = POSITIONS) -> Any:
    """A model in `directory`, and as transformers has it."""
    torch.manual_seed(5)
    config = WhisperConfig(
        vocab_size=64,
        d_model=96,
        encoder_layers=3,
        decoder_layers=1,
        encoder_attention_heads=6,
        decoder_attention_heads=2,
        encoder_ffn_dim=160,
        decoder_ffn_dim=32,
        max_source_positions=positions,
        num_mel_bins=BINS,
        init_std=0.1,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        decoder_start_token_id=1,
    )
    model = WhisperForConditionalGeneration(config).eval()
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            weight.data.normal_(std=0.1)
    model.save_pretrained(directory)
    return model.model


class Written(NamedTuple):
    directory: Path
    model: Any


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    directory = tmp_path_factory.mktemp("whisper")
    return Written(directory, write_sound_encoder(directory))


@pytest.fixture(scope="module")
def directory(written: Written) -> Path:
    return written.directory


@pytest.fixture(scope="module")
def features() -> Tensor:
    return torch.randn(3, BINS, 2 * POSITIONS, generator=torch.manual_seed(1))


@pytest.fixture(scope="module")
def expected(written: Written, features: Tensor) -> Tensor:
    with torch.inference_mode():
        rows: Tensor = written.model.encoder(features).last_hidden_state
    return rows


@pytest.mark.parametrize(
    ("dtype", "quantization", "most"),
    [(torch.float32, "none", 2e-6), (torch.float32, "int8", 0.05), (torch.bfloat16, "none", 0.02)],
)
def test_rows_are_near_those_of_transformers(
    directory: Path, features: Tensor, expected: Tensor, dtype: torch.dtype, quantization: str, most: float
) -> None:
    """By the root of the mean square, as a part of the rows' own."""
    encoder = load_sound_encoder(directory, dtype, HOST, quantization)
    rows = encoder(features)
    assert rows.dtype == dtype
    error = (rows.float() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < most
    if most < 1e-5:
        torch.testing.assert_close(rows, expected, rtol=0, atol=2e-5)
    for number in (2, 0):
        assert torch.equal(encoder(features[number : number + 1])[0], rows[number])
    assert torch.equal(encoder(features[[1, 2]]), rows[[1, 2]])


def test_halves_are_computed_in_single_precision(directory: Path, features: Tensor) -> None:
    rows = load_sound_encoder(directory, torch.float16, HOST, "none")(features[:1].half())
    assert rows.dtype == torch.float32


@pytest.mark.parametrize("bins", ["many", 0])
def test_a_config_without_a_width_of_frames_is_refused(directory: Path, tmp_path: Path, bins: object) -> None:
    config = json.loads((directory / "config.json").read_text()) | {"num_mel_bins": bins}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="num_mel_bins must be a positive whole number"):
        load_sound_encoder(tmp_path, torch.float32, HOST, "none")


def test_what_a_checkpoint_lacks_is_named(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    weights = load_file(directory / "model.safetensors")
    save_file({name: weight for name, weight in weights.items() if "conv1" not in name}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor model\.conv1\.weight is missing"):
        load_sound_encoder(tmp_path, torch.float32, HOST, "none")
