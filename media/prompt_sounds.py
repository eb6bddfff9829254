"""Sounds that stand in prompts: their features as the checkpoint's processor makes them, and how many places they take.

Runs in a process that may be killed, without torch. Transformers' own processors of Voxtral and Qwen3-ASR want torch:
what they do besides extracting features is done here.
"""

from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..core.errors import InvalidArgument
from ..core.media import FEATURE_MASK, FEATURES
from ..core.published_form import flat_config
from ..core.regular_files import read_regular
from .processor import ProcessedMedium, read_json

_FILES = ("preprocessor_config.json", "processor_config.json")
_LARGEST_TOKENIZER = 1 << 26
_PART = "feature_extractor"
"""The member of a processor's file that has the extractor's settings."""

Samples = NDArray[np.float32]
Inputs = dict[str, NDArray[Any]]


class _SoundSettings(NamedTuple):
    """What a checkpoint's files say of its sounds."""

    config: Mapping[str, Any]
    """config.json"""
    extractor: Any
    """Transformers', of the family."""
    token: str
    """The text of the token at the places of a sound."""
    ends: tuple[str, str]
    """Texts before the first and behind the last of them."""


class _Features(NamedTuple):
    inputs: Inputs
    places: int


class PromptSounds:
    """The loaded extractor of a checkpoint. Raises `InvalidArgument` for one that has none."""

    def __init__(self, checkpoint: Path) -> None:
        config = flat_config(read_json(checkpoint / "config.json"))
        self._family = family = _FAMILIES[str(config["model_type"])]
        settings = _extractor_settings(checkpoint)
        try:
            extractor = family.extractor().from_dict(settings)
            token_id = int(config.get("audio_token_id") or family.token_id)
            token, *ends = _token_texts(checkpoint, (token_id, *(config.get(name) for name in family.ends)))
            begin, end = (*ends, "", "")[:2]
            around = f"{family.margin}{begin}", f"{end}{family.margin}"
            self._settings = _SoundSettings(config, extractor, token, around)
            self._most = int((config.get("text_config") or {}).get("max_position_embeddings") or 0)
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise InvalidArgument(f"{checkpoint}: its extractor of features cannot be loaded: {error}") from error
        self.rate = int(extractor.sampling_rate)
        """Samples a second."""
        self.token = token
        self.token_ids: tuple[int, ...] = (token_id,)
        written = f"{type(extractor).__name__} {extractor.to_json_string()} {token} {config.get('audio_config')}"
        self.settings = sha256(written.encode()).digest()

    def process(self, samples: Samples) -> ProcessedMedium:
        """The features of a sound and what stands for it. Raises `InvalidArgument` for one too short or too long."""
        longest = self._family.longest
        if longest and len(samples) > longest * self.rate:
            seconds = len(samples) / self.rate
            raise InvalidArgument(f"the sound has {seconds:.1f} seconds, and the model hears {longest} at a time")
        features = self._family.features(self._settings, samples)
        if not features.places:
            raise InvalidArgument(f"the sound is too short: it has {len(samples)} samples at {self.rate} Hz")
        if self._most and features.places > self._most:
            message = f"the sound takes {features.places} tokens of a prompt, and the model reads {self._most}"
            raise InvalidArgument(message)
        begin, end = self._settings.ends
        placeholder = f"{begin}{self.token * features.places}{end}"
        return ProcessedMedium(features.inputs, placeholder, seconds=len(samples) / self.rate)


def _voxtral(settings: _SoundSettings, samples: Samples) -> _Features:
    """Whisper's windows, the last one filled up with silence, each of equally many places."""
    audio = settings.config["audio_config"]
    positions = int(audio.get("max_source_positions", 1500))
    extractor, frames = settings.extractor, 2 * positions
    extracted = _extract(extractor, samples, pad_to_multiple_of=frames * int(extractor.hop_length))[FEATURES][0]
    windows = np.ascontiguousarray(extracted.reshape(len(extracted), -1, frames).swapaxes(0, 1))
    places = positions * int(audio.get("hidden_size", 1280)) // int(audio.get("intermediate_size", 5120))
    return _Features({FEATURES: windows}, len(windows) * places)


def _qwen3_asr(settings: _SoundSettings, samples: Samples) -> _Features:
    """Frames filled up to whole chunks of the encoder's, each of which three convolutions make eight times shorter."""
    extractor = settings.extractor
    shortest = int(getattr(extractor, "min_length", 8000))
    samples = np.pad(samples, (0, max(0, shortest - len(samples))))
    extracted = _extract(extractor, samples)[FEATURES]
    chunk = 2 * int(settings.config["audio_config"].get("n_window", 50))
    length = extracted.shape[-1]
    padded = -(-length // chunk) * chunk
    mask = (np.arange(padded) < length).astype(np.int64)[None]
    features = np.pad(extracted, ((0, 0), (0, 0), (0, padded - length)))
    places = length // chunk * _thrice_halved(chunk) + _thrice_halved(length % chunk)
    return _Features({FEATURES: features, FEATURE_MASK: mask}, places)


def _gemma4(settings: _SoundSettings, samples: Samples) -> _Features:
    """A place is what two convolutions make of four frames, unless the first of them is padding."""
    inputs = settings.extractor([samples], return_tensors="np")
    mask = np.asarray(inputs[FEATURE_MASK])
    places = int(mask[0, ::2][::2].sum())
    return _Features({FEATURES: np.asarray(inputs[FEATURES], np.float32), FEATURE_MASK: mask.astype(np.int64)}, places)


def _gemma3n(settings: _SoundSettings, samples: Samples) -> _Features:
    """As many places for each sound; one more takes the row of the token that ends it."""
    inputs = settings.extractor([samples], return_tensors="np")
    mask = np.asarray(inputs[FEATURE_MASK]).astype(np.int64)
    places = int(settings.config.get("audio_soft_tokens_per_image", 188)) + 1 if mask.any() else 0
    return _Features({FEATURES: np.asarray(inputs[FEATURES], np.float32), FEATURE_MASK: mask}, places)


def _thrice_halved(length: int) -> int:
    for _ in range(3):
        length = (length + 1) // 2
    return length


def _extract(extractor: Any, samples: Samples, **others: Any) -> Mapping[str, Any]:
    """What Whisper's extractor makes of a sound at its own length."""
    rate = extractor.sampling_rate
    extracted: Mapping[str, Any] = extractor(
        samples, sampling_rate=rate, padding=True, truncation=False, return_tensors="np", **others
    )
    return extracted


def _whisper_extractor() -> Any:
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor


def _gemma4_extractor() -> Any:
    from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor

    return Gemma4AudioFeatureExtractor


def _gemma3n_extractor() -> Any:
    from transformers.models.gemma3n.feature_extraction_gemma3n import Gemma3nAudioFeatureExtractor

    return Gemma3nAudioFeatureExtractor


class _Family(NamedTuple):
    extractor: Callable[[], Any]
    """The class of its extractor; of Qwen3-ASR that of Whisper, whose features are the same."""
    features: Callable[[_SoundSettings, Samples], _Features]
    token_id: int
    """The token of a sound's places where config.json does not say it."""
    ends: tuple[str, ...] = ()
    """The fields of config.json with the tokens before and behind a sound that its chat template does not have."""
    longest: int = 0
    """Seconds of a sound that its encoder hears; 0 where it hears any."""
    margin: str = ""
    """A text on both sides of all that."""


_FAMILIES: Mapping[str, _Family] = {
    "gemma3n": _Family(_gemma3n_extractor, _gemma3n, 262273, ("boa_token_id",), longest=30, margin="\n\n"),
    "gemma4": _Family(_gemma4_extractor, _gemma4, 258881, ("boa_token_id", "eoa_token_index"), longest=30),
    "qwen3_asr": _Family(_whisper_extractor, _qwen3_asr, 151676),
    "voxtral": _Family(_whisper_extractor, _voxtral, 24),
}


def _extractor_settings(checkpoint: Path) -> dict[str, Any]:
    for name in _FILES:
        written = read_json(checkpoint / name)
        settings: dict[str, Any] = written.get(_PART, written)
        if f"{_PART}_type" in settings:
            return settings
    raise InvalidArgument(f"{checkpoint} has no extractor of features of sounds: no {' or '.join(_FILES)}")


def _token_texts(checkpoint: Path, ids: tuple[int | None, ...]) -> list[str]:
    """The text of each token; empty for none. Raises `ValueError` for one that the tokenizer lacks."""
    text_of = _special_tokens(checkpoint)
    texts = ["" if number is None else text_of(number) for number in ids]
    known = [text for text in texts if text is not None]
    if len(known) < len(ids):
        raise ValueError(f"its tokenizer lacks a token of sounds, of {ids}")
    return known


class _NamedTokens(msgspec.Struct):
    """What of Mistral's tekken.json tells of special tokens."""

    special_tokens: list[dict[str, Any]] = []


def _special_tokens(checkpoint: Path) -> Callable[[int], str | None]:
    """Tells the text of a special token, by tokenizer.json or what stands in its place."""
    if (file := checkpoint / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(file)).id_to_token
    if (file := checkpoint / "tekken.json").is_file():
        named = msgspec.json.decode(read_regular(file, _LARGEST_TOKENIZER), type=_NamedTokens).special_tokens
        return {token["rank"]: str(token["token_str"]) for token in named}.get
    added = read_json(checkpoint / "tokenizer_config.json").get("added_tokens_decoder") or {}
    return {int(number): str(token["content"]) for number, token in added.items()}.get
