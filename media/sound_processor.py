"""The features of a sound by the configuration of the checkpoint's extractor: transformers' numbers to the bit, made
for many frames at a time.

Runs in a process that may be killed, without torch: where that is loaded, transformers' sums are of 32 bits and not of
64, and its features differ by about a millionth.
"""

from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.errors import InvalidArgument
from ..core.media import FEATURES, WINDOW_BOUNDS
from .processor import ProcessedMedium
from .sound_windows import cut_windows

_FILE = "preprocessor_config.json"
_FRAMES = 256
"""Frames that are transformed at a time: what is made of them stays in a processor's caches."""
_LEAST_POWER = 1e-10


class SoundProcessor:
    """A loaded extractor. Raises `InvalidArgument` for a checkpoint that has none."""

    def __init__(self, checkpoint: Path) -> None:
        if not (checkpoint / _FILE).is_file():
            raise InvalidArgument(f"{checkpoint} has no extractor of features of sounds: no {_FILE}")
        from transformers import WhisperFeatureExtractor

        try:
            self._extractor: Any = WhisperFeatureExtractor.from_pretrained(checkpoint, local_files_only=True)
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise InvalidArgument(f"{checkpoint}: its extractor of features cannot be loaded: {error}") from error
        self.rate = int(self._extractor.sampling_rate)
        """Samples a second."""
        self.longest = int(self._extractor.n_samples)
        """Samples of a window, at most."""
        if self._extractor.dither:
            raise InvalidArgument(f"{checkpoint / _FILE}: dither is not served: its noise would be another each time")
        self.token = ""
        self.token_ids: tuple[int, ...] = ()
        settings = f"{type(self._extractor).__name__} {self._extractor.to_json_string()}"
        self.settings = sha256(settings.encode()).digest()

    def process(self, samples: NDArray[np.float32]) -> ProcessedMedium:
        """The features of each window [windows, bins, frames], and the samples where it begins and ends [windows, 2].
        A window is prepared by itself, whatever stands beside it."""
        windows = cut_windows(samples, self.rate, self.longest)
        shape = (len(windows), self._extractor.feature_size, self._extractor.nb_max_frames)
        features = np.empty(shape, np.float32)
        for index, window in enumerate(windows):
            features[index] = self._log_mel(samples[window.begin : window.end])
        bounds = np.array(windows, np.int64) / self.rate
        return ProcessedMedium({FEATURES: features, WINDOW_BOUNDS: bounds})

    def _log_mel(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """The logarithms [bins, frames] of the energies of a window, filled up with silence, which is not transformed:
        a transform of zeros is zeros."""
        from transformers.audio_utils import window_function

        size, hop = self._extractor.n_fft, self._extractor.hop_length
        padded = np.pad(np.pad(samples, (0, self.longest - len(samples))), size // 2, mode="reflect").astype(np.float64)
        frames = np.lib.stride_tricks.sliding_window_view(padded, size)[::hop]
        is_short = len(samples) < self.longest - size  # else the end mirrors it
        sounding = (len(samples) + size // 2) // hop + 1 if is_short else len(frames)
        spectrum = np.zeros((len(frames), size // 2 + 1), np.complex64)
        window = window_function(size, "hann")
        for first in range(0, sounding, _FRAMES):
            some = slice(first, min(first + _FRAMES, sounding))
            spectrum[some] = np.fft.rfft(frames[some] * window)
        powers = np.abs(spectrum, dtype=np.float64) ** 2.0
        energies = np.maximum(_LEAST_POWER, np.dot(self._extractor.mel_filters.T, powers.T))
        logarithms = np.log10(energies).astype(np.float32)[:, :-1]
        scaled: NDArray[np.float32] = (np.maximum(logarithms, logarithms.max() - 8.0) + 4.0) / 4.0
        return scaled
