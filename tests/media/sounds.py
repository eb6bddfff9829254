"""Sounds and their files, made by the library that reads them."""

import io
import json
import wave
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float32]
RATE = 16_000
CODECS = {
    "wav": ("wav", "pcm_s16le", "s16"),
    "wav-float": ("wav", "pcm_f32le", "flt"),
    "flac": ("flac", "flac", "s16"),
    "mp3": ("mp3", "libmp3lame", "fltp"),
    "ogg-opus": ("ogg", "libopus", "flt"),
    "m4a": ("ipod", "aac", "fltp"),
    "m4a-alac": ("ipod", "alac", "s16p"),
    "webm": ("webm", "libopus", "flt"),
}
"""By form: FFmpeg's names of the container, the codec, and its samples."""


def tones(seconds: float, seed: int = 0, rate: int = RATE) -> Samples:
    """A sound with a pitch that wanders, so that no two moments are the same."""
    times = np.arange(int(seconds * rate)) / rate
    pitch = 200.0 + 40 * seed + 150 * np.sin(1.3 * times)
    sound: Samples = (0.4 * np.sin(2 * np.pi * np.cumsum(pitch) / rate)).astype(np.float32)
    return sound


def wav(samples: Samples, rate: int = RATE) -> bytes:
    target = io.BytesIO()
    with wave.open(target, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    return target.getvalue()


def sound_file(form: str, samples: Samples, rate: int = RATE, channels: int = 1) -> bytes:
    """A file of a form in `CODECS`, all channels alike."""
    container, codec, layout = CODECS[form]
    target = io.BytesIO()
    with av.open(target, "w", format=container) as file:
        stream: Any = file.add_stream(codec, rate=rate, layout="mono" if channels == 1 else "stereo")
        stream.codec_context.format = layout
        frame = av.AudioFrame.from_ndarray(np.tile(samples, (channels, 1)), "fltp", stream.layout.name)
        frame.sample_rate = rate
        resampler = av.AudioResampler(layout, stream.layout, rate, stream.codec_context.frame_size or 1024)
        for part in (*resampler.resample(frame), *resampler.resample(None)):
            part.pts = None
            file.mux(stream.encode(part))
        file.mux(stream.encode(None))
    return target.getvalue()


def film_with_sound(container: str, samples: Samples, pictures: float, begin: float = 0.0, pause: float = 0.0) -> bytes:
    """A film of so many seconds of pictures. Its sound begins at a time of it, and pauses in its middle."""
    target = io.BytesIO()
    with av.open(target, "w", format=container) as file:
        video: Any = file.add_stream("libvpx" if container == "webm" else "mpeg4", rate=10)
        video.width, video.height, video.pix_fmt = 32, 32, "yuv420p"
        audio: Any = file.add_stream("libopus" if container == "webm" else "aac", rate=48_000, layout="mono")
        audio.codec_context.format = "flt" if container == "webm" else "fltp"
        for number in range(int(pictures * 10)):
            file.mux(video.encode(av.VideoFrame.from_ndarray(np.full((32, 32, 3), number % 200, np.uint8), "rgb24")))
        file.mux(video.encode(None))
        step = 960 if container == "webm" else 1024
        for start in range(0, len(samples), step):
            frame = av.AudioFrame.from_ndarray(samples[None, start : start + step], "fltp", "mono")
            frame.sample_rate = 48_000
            frame.pts = start + int(48_000 * (begin + (pause if 2 * start > len(samples) else 0.0)))
            frame.time_base = Fraction(1, 48_000)
            file.mux(audio.encode(frame))
        file.mux(audio.encode(None))
    return target.getvalue()


def film(frames: int = 3) -> bytes:
    """A file with pictures and without sound."""
    target = io.BytesIO()
    with av.open(target, "w", format="mp4") as file:
        stream: Any = file.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for number in range(frames):
            picture = np.full((32, 32, 3), 20 * number, np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(picture, "rgb24")))
        file.mux(stream.encode(None))
    return target.getvalue()


def write_extractor(directory: Path, bins: int = 80) -> Path:
    """The file of a checkpoint that says how features are made of sounds."""
    directory.mkdir(parents=True, exist_ok=True)
    extractor = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": bins}
    (directory / "preprocessor_config.json").write_text(json.dumps(extractor))
    return directory
