"""What runs in a process without torch: a checkpoint's features of sounds as the server has them beside transformers'
own."""

import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from charonia.core.media import FEATURES, WINDOW_BOUNDS
from charonia.processes.limited_process import Answer

from .sounds import RATE, tones

SECONDS = (0.1, 3.0, 29.98, 30.0, 47.5)


class ComparedSound(msgspec.Struct):
    """One sound; `equal`: its windows' features are transformers', bit for bit."""

    equal: bool
    shape: tuple[int, ...]
    bounds: list[list[float]]


def compare_extractors(checkpoint: str) -> Answer:
    sys.modules["torch"] = None  # type: ignore[assignment]
    return lambda message: msgspec.msgpack.encode([_compare(Path(checkpoint), seconds) for seconds in SECONDS])


def _compare(checkpoint: Path, seconds: float) -> ComparedSound:
    from transformers import AutoFeatureExtractor

    from charonia.media.sound_processor import SoundProcessor

    samples = tones(seconds)
    inputs = SoundProcessor(checkpoint).process(samples).inputs
    bounds = inputs[WINDOW_BOUNDS].tolist()
    extractor: Any = AutoFeatureExtractor.from_pretrained(checkpoint)
    wanted = [
        extractor(samples[round(begin * RATE) : round(end * RATE)], sampling_rate=RATE, return_tensors="np")[FEATURES]
        for begin, end in bounds
    ]
    features = inputs[FEATURES]
    return ComparedSound(
        features.dtype == wanted[0].dtype and np.array_equal(features, np.concatenate(wanted)), features.shape, bounds
    )
