"""The checkpoint's own extractor of a sound's features: transformers', by the checkpoint's configuration, over numpy.

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
from .sound_windows import cut_windows

_FILE = "preprocessor_config.json"


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
        settings = f"{type(self._extractor).__name__} {self._extractor.to_json_string()}"
        self.settings = sha256(settings.encode()).digest()
        """SHA-256 of what decides, beside the sound, on the result."""

    def process(self, samples: NDArray[np.float32]) -> dict[str, NDArray[np.generic]]:
        """The features of each window [windows, bins, frames], and the samples where it begins and ends [windows, 2].
        A window is prepared by itself, whatever stands beside it."""
        windows = cut_windows(samples, self.rate, self.longest)
        shape = (len(windows), self._extractor.feature_size, self._extractor.nb_max_frames)
        features = np.empty(shape, np.float32)
        for index, window in enumerate(windows):
            cut = samples[window.begin : window.end]
            features[index] = self._extractor(cut, sampling_rate=self.rate, return_tensors="np").input_features[0]
        bounds = np.array(windows, np.int64) / self.rate
        return {FEATURES: features, WINDOW_BOUNDS: bounds}
