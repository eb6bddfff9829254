"""Towers that hear: from a sound's samples, what the server prepares and computes is what transformers' processor and
model make of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForMultimodalLM

from charonia.classic_backends.tower.tower import Tower
from charonia.classic_backends.tower.tower_files import read_tower_files
from charonia.media.prompt_sounds import PromptSounds
from tests.hearing_prompts import MODELS_THAT_HEAR, only_ears, prompt_inputs, transformers_form, write_hearing
from tests.media.sounds import tones

SECONDS = (3.337, 0.4, 12.5)


@pytest.mark.parametrize("name", MODELS_THAT_HEAR)
@torch.inference_mode()
def test_rows_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    directory = write_hearing(tmp_path, name)
    token = MODELS_THAT_HEAR[name].token
    sounds = PromptSounds(directory)
    prepared = [sounds.process(tones(seconds, seed)) for seed, seconds in enumerate(SECONDS)]
    kinds: Any = ("image", "audio") if name == "gemma4" else ("audio",)
    tower = Tower(read_tower_files(directory, "auto", kinds), "cpu", together=False)
    made = tower.encode([medium.inputs for medium in prepared])
    with only_ears():
        model: Any = AutoModelForMultimodalLM.from_pretrained(transformers_form(directory, name), dtype=torch.float32)
    for seed, (medium, seconds, own) in enumerate(zip(prepared, SECONDS, made, strict=True)):
        inputs = prompt_inputs(directory, name, token, [tones(seconds, seed)])
        places = int((inputs["input_ids"] == sounds.token_ids[0]).sum())
        assert medium.placeholder.count(token) == places + (name == "gemma3n") == len(own.rows)
        sound = {key: inputs[key] for key in ("input_features", "input_features_mask") if key in inputs}
        if name == "gemma3n":
            rows = _filled(model.model, places, **sound)
            torch.testing.assert_close(own.rows, rows, rtol=2e-5, atol=2e-5)
            continue
        features = model.model.get_audio_features(**sound, return_dict=True)
        rows = features.pooler_output
        if name == "gemma4":
            rows = rows[features.attention_mask]
        torch.testing.assert_close(own.rows, rows.reshape(own.rows.shape), rtol=2e-5, atol=2e-5)


def _filled(model: Any, places: int, input_features: torch.Tensor, input_features_mask: torch.Tensor) -> torch.Tensor:
    """The rows of Gemma 3n's sound, those that fill its places up, and that of the token behind them."""
    made = model.get_audio_features(input_features, ~input_features_mask, return_dict=True)
    heard = made.pooler_output[~made.audio_mel_mask]
    assert 0 < len(heard) < places == 188
    ids = [model.config.text_config.vocab_size - 1] * (places - len(heard)) + [model.config.eoa_token_id]
    return torch.cat([heard, model.embed_audio(input_ids=torch.tensor(ids))])
