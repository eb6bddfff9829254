"""What random checkpoints are, as the packages read them whose formats they have."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from charonia.bench import checkpoint

from ..checkpoints import CONFIGS


def test_w8a8_is_the_plain_checkpoint_but_for_its_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(checkpoint.SHAPES, "lfm2-1.2b", CONFIGS["lfm2"] | {"dtype": "float32"})
    checkpoint.write_shape(tmp_path / "plain", shape="lfm2-1.2b")
    checkpoint.write_shape(tmp_path / "int8", shape="lfm2-1.2b", w8a8=True)
    plain, small = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("plain", "int8"))
    ids = torch.arange(1, 33)[None]
    with torch.inference_mode():
        right, rounded = plain(ids).logits, small(ids).logits
    assert 0 < (right - rounded).abs().max() < 0.1 * right.abs().max()
