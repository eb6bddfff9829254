"""What transformers' encoders make of sounds that stand in prompts, by family. Imported only where one is loaded."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...core.media import FEATURES
from .host_products import compute_on_host
from .tower_files import TowerFiles
from .tower_module import TowerFeatures, TowerModule, loading, read_config, read_weights, refuse_missing

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
    for sound, sound_mask in zip(input_features, input_features_mask, strict=True):
        parts = zip(torch.split(sound[None], size, -1), torch.split(sound_mask[None], size, -1), strict=True)
        rows = [model.get_audio_features(part, mask, return_dict=True).pooler_output for part, mask in parts]
        sounds.append(torch.cat(rows))
    return sounds


def _gemma4(model: Any, input_features: Tensor, input_features_mask: Tensor) -> list[Tensor]:
    outputs = model.get_audio_features(input_features, input_features_mask.bool(), return_dict=True)
    return [rows[mask.bool()] for rows, mask in zip(outputs.pooler_output, outputs.attention_mask, strict=True)]


def load_gemma3n_ear(files: TowerFiles, dtype: torch.dtype, device: str) -> TowerModule:
    """The encoder of sounds of a Gemma 3n alone: transformers' whole model wants the library of its images' tower."""
    from transformers.models.gemma3n import modeling_gemma3n as gemma3n

    class Gemma3nEar(gemma3n.Gemma3nPreTrainedModel):  # type: ignore[no-untyped-call]
        """The parts of `Gemma3nModel` that a sound goes through."""

        get_audio_features = gemma3n.Gemma3nModel.get_audio_features

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.audio_tower = gemma3n.Gemma3nAudioEncoder(config.audio_config)
            self.embed_audio = gemma3n.Gemma3nMultimodalEmbedder(config.audio_config, config.text_config)
            self.post_init()  # type: ignore[no-untyped-call]

    weights = {name.removeprefix("model."): tensor for name, tensor in read_weights(files).items()}
    with loading(files):
        loaded: Any = Gemma3nEar
        ear, report = loaded.from_pretrained(
            None, config=read_config(files), state_dict=weights, dtype=dtype, output_loading_info=True
        )
    refuse_missing(files, report["missing_keys"])
    ear.requires_grad_(False).to(device).eval()
    if device == "cpu":
        compute_on_host(ear, ())
    return TowerModule(FEATURES, sound_features(files.family, ear))


def _gemma3n(model: Any, input_features: Tensor, input_features_mask: Tensor) -> list[Tensor]:
    """As many rows for each sound, whatever its length: what is missing is the embedding of the last token. The row
    behind them is that of the token that ends a sound, which is none of the language part's."""
    config = model.config
    outputs = model.get_audio_features(input_features, ~input_features_mask.bool(), return_dict=True)
    ids = [config.text_config.vocab_size - 1, config.eoa_token_id]
    missing, end = model.embed_audio(input_ids=torch.tensor(ids, device=input_features.device))
    rows = outputs.pooler_output.where(~outputs.audio_mel_mask.unsqueeze(-1), missing)
    rest = missing.expand(len(rows), config.audio_soft_tokens_per_image - rows.shape[1], -1)
    return [*torch.cat((rows, rest, end.expand(len(rows), 1, -1)), 1)]


_ROWS: Mapping[str, Callable[..., list[Tensor]]] = {
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
    "qwen3_asr": _qwen3_asr,
    "voxtral": _voxtral,
}
