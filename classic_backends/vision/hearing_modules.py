"""What transformers' encoders make of sounds that stand in prompts, by family. Imported only where one is loaded."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .tower_module import TowerFeatures

_MOST_WINDOWS = 8
"""Windows of a sound that are computed at a time where each is attended to by itself; a second takes 6 MB."""


def sound_features(family: str, model: Any) -> Callable[..., TowerFeatures]:
    """What makes rows of sounds, by the processor's inputs: those of each sound, or of each of its windows."""
    rows = _ROWS[family]
    return lambda **inputs: TowerFeatures(rows(model, **inputs))


def _voxtral(model: Any, input_features: Tensor) -> list[Tensor]:
    return [model.get_audio_features(window[None], return_dict=True).pooler_output for window in input_features]


def _qwen3_asr(model: Any, input_features: Tensor, input_features_mask: Tensor) -> list[Tensor]:
    size = int(model.config.audio_config.n_window_infer) * _MOST_WINDOWS
    sounds = []
    for sound, whole in zip(input_features, input_features_mask, strict=True):
        parts = zip(torch.split(sound[None], size, -1), torch.split(whole[None], size, -1), strict=True)
        rows = [model.get_audio_features(part, mask, return_dict=True).pooler_output for part, mask in parts]
        sounds.append(torch.cat(rows))
    return sounds


def _gemma4(model: Any, input_features: Tensor, input_features_mask: Tensor) -> list[Tensor]:
    made = model.get_audio_features(input_features, input_features_mask.bool(), return_dict=True)
    return [rows[mask.bool()] for rows, mask in zip(made.pooler_output, made.attention_mask, strict=True)]


_ROWS: Mapping[str, Callable[..., list[Tensor]]] = {"gemma4": _gemma4, "qwen3_asr": _qwen3_asr, "voxtral": _voxtral}
