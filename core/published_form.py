"""Checkpoints as their authors publish them, in the form that transformers' classes have: Qwen3-ASR's config.json holds
its parts in `thinker_config`, under other names, and its tensors have others, too."""

from collections.abc import Mapping
from typing import Any

_THINKER, _TIED = "thinker_config", "tie_word_embeddings"
_PARTS = {"audio_config": "qwen3_asr_encoder", "text_config": "qwen3"}
"""The parts of such a config, and their `model_type` elsewhere."""
_TENSORS = {
    "thinker.audio_tower.proj1.": "model.multi_modal_projector.linear_1.",
    "thinker.audio_tower.proj2.": "model.multi_modal_projector.linear_2.",
    "thinker.audio_tower.": "model.audio_tower.",
    "thinker.model.": "model.language_model.",
    "thinker.lm_head.": "lm_head.",
}
"""Beginnings of names as published, and elsewhere."""


def flat_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A parsed config.json in the form of transformers; one that has it stays as it is."""
    thinker = config.get(_THINKER)
    if config.get("model_type") != "qwen3_asr" or not isinstance(thinker, dict):
        return dict(config)
    parts = {
        name: part | {"model_type": kind}
        for name, kind in _PARTS.items()
        if isinstance(part := thinker.get(name), dict)
    }
    flat = {**thinker, **config, **parts, _TIED: parts.get("text_config", {}).get(_TIED, False)}
    del flat[_THINKER]
    return flat


def flat_name(tensor: str) -> str:
    """The name of a tensor in that form; all others keep theirs."""
    for published, name in _TENSORS.items():
        if tensor.startswith(published):
            return name + tensor.removeprefix(published)
    return tensor
