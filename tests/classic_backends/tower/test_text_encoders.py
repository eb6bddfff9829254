"""Encoders of texts as towers: their rows are those of transformers, the same bits whatever other texts are encoded."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, BartConfig, M2M100Config, T5Config

from charonia.classic_backends.tower.tower import Tower
from charonia.classic_backends.tower.tower_files import read_tower_files
from charonia.classic_backends.tower.tower_module import OwnParts, load_own_parts
from charonia.core.media import SOURCE

LOAD = partial(load_own_parts, OwnParts("charonia.engine.models.text_encoder:load_text_encoder", "", "none"))
SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(("config", "pickled"), [(BartConfig, False), (M2M100Config, True), (T5Config, False)])
@torch.inference_mode()
def test_rows_are_those_of_transformers(tmp_path: Path, config: Any, pickled: bool) -> None:
    torch.manual_seed(3)
    model: Any = AutoModelForSeq2SeqLM.from_config(config(**SIZES)).eval()
    model.save_pretrained(tmp_path)
    if pickled:
        (tmp_path / "model.safetensors").unlink()
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    files = read_tower_files(tmp_path, "auto", ())
    encoder = sum(weight.numel() for weight in model.get_encoder().parameters())
    assert files.bytes(gpu=False) >= 4 * encoder
    texts = [torch.randint(4, 100, (1, length)) for length in (1, 17, 64, 17)]
    expected = [model.get_encoder()(text).last_hidden_state[0] for text in texts]
    tower = Tower(files, "cpu", together=False, load=LOAD)
    together = tower.encode([{SOURCE: text.numpy()} for text in texts])
    for text, wanted, beside in zip(texts, expected, together, strict=True):
        [alone] = tower.encode([{SOURCE: text.numpy()}])
        torch.testing.assert_close(alone.rows, wanted, rtol=2e-5, atol=2e-5)
        assert torch.equal(beside.rows, alone.rows)
