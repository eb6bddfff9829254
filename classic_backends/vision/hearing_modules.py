"""Encoders of sounds in torch: transformers' own modules, with the weights of the encoder alone.

Imported only where one is loaded.
"""

from typing import Any

import torch

from ...core.media import FEATURES
from .tower_module import TowerModule, loading, read_config, read_weights, refuse_missing
from .vision_files import VisionFiles

_PREFIXES = ("model.encoder.", "encoder.")
"""Beginnings of the encoder's names in checkpoints, by the class that wrote them."""


def load_hearing(files: VisionFiles, dtype: torch.dtype) -> TowerModule:
    """Whisper's encoder, in the host's memory. Raises `InvalidArgument` for a checkpoint that lacks some of it."""
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    weights = {
        name.removeprefix(prefix): weight
        for name, weight in read_weights(files).items()
        for prefix in _PREFIXES
        if name.startswith(prefix)
    }
    with loading("encoder", files):
        known: Any = WhisperEncoder
        encoder, report = known.from_pretrained(
            None, config=read_config(files), state_dict=weights, dtype=dtype, output_loading_info=True
        )
    refuse_missing("encoder", files, report["missing_keys"])
    return TowerModule(encoder, FEATURES, encoder, "last_hidden_state")
