"""Encoders of sounds: those of the engine that has their decoders, by the names that it gives. Imported only where one
is loaded."""

from pkgutil import resolve_name
from typing import Any

import torch

from ...core.media import FEATURES
from .tower_module import TowerFeatures, TowerModule
from .vision_files import VisionFiles


def load_hearing(encoder: str, quantization: str, files: VisionFiles, dtype: torch.dtype, device: str) -> TowerModule:
    """`encoder`, `quantization`: see `TowerSpec`. Raises as the encoder's own function."""
    load: Any = resolve_name(encoder)
    encode = load(files.directory, dtype, torch.device(device), quantization)
    return TowerModule(FEATURES, lambda **inputs: TowerFeatures(encode(inputs[FEATURES])))
