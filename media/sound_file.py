"""Reads the file of a sound: of six containers, told by their first bytes, mixed to one channel and resampled.

Runs in a process that may be killed. FFmpeg's library is never left to guess a container: some of those that it knows
name other files, which it would open.
"""

import io
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import av
import numpy as np
from av.error import EOFError as EndOfFile
from av.error import FFmpegError
from numpy.typing import NDArray

from ..core.errors import InvalidArgument
from .limits import MediaLimits

Samples = NDArray[np.float32]

_OPTIONS = {
    "protocol_whitelist": "none",  # no container may lead to another file
    "codec_whitelist": "flac,mp3,mp3float,opus,libopus,vorbis,libvorbis,aac,alac,pcm_s16le,pcm_s24le,pcm_s32le,pcm_u8,"
    "pcm_s16be,pcm_s24be,pcm_s32be,pcm_s8,pcm_f32le,pcm_f64le,pcm_f32be,pcm_f64be,pcm_alaw,pcm_mulaw,adpcm_ms,"
    "adpcm_ima_wav",
    "probesize": str(1 << 20),
}
_LOUDEST = 1000.0
_SEGMENT = b"\x18\x53\x80\x67"
_MISSING_SECONDS, _MISSING_SHARE = 0.5, 0.02
"""What a file may be shorter than it says: encoders pad the beginning and the end."""


class _Container(NamedTuple):
    name: str
    form: str
    """FFmpeg's name of it."""
    refuse_cut: Callable[[bytes], None]
    """Raises `InvalidArgument` if the file ends before its container does."""
    tells_duration: bool
    """Whether what it says of its duration is exact."""


def decode_sound(data: bytes, rate: int, limits: MediaLimits) -> Samples:
    """The samples of a sound in one channel, `rate` a second.

    Raises:
        InvalidArgument: it is no sound in a container that is read, is broken or cut off, or exceeds the limits.
    """
    container = _container_of(data)
    container.refuse_cut(data)
    try:
        with av.open(io.BytesIO(data), "r", format=container.form, options=_OPTIONS, metadata_errors="ignore") as file:
            if not file.streams.audio:
                raise InvalidArgument("the file has no sound, only pictures or texts")
            stream = file.streams.audio[0]
            if stream.codec_context is None:
                raise InvalidArgument(f"the sound is broken ({container.name}), or of a codec that is not read")
            decoder = _SoundDecoder(file, stream, rate)
            samples = _collect(decoder.decode(), rate, limits)
            if container.tells_duration:
                _refuse_short(decoder.end, _told_end(file, stream))
    except InvalidArgument:
        raise
    except MemoryError as error:
        raise InvalidArgument("decoding the sound takes more memory than it may") from error
    except Exception as error:  # decoders raise whatever a broken file makes them meet
        text = error.strerror if isinstance(error, FFmpegError) else str(error)
        raise InvalidArgument(f"the sound is broken ({container.name}): {text or type(error).__name__}") from error
    if not len(samples):
        raise InvalidArgument("the sound is empty: it has no samples")
    if not max(samples.max(), -samples.min()) <= _LOUDEST:  # nor is one that is no number
        message = f"the sound has samples that are no numbers, or more than {_LOUDEST:g} times as loud as the loudest"
        raise InvalidArgument(message)
    return samples


class _SoundDecoder:
    """Decodes and resamples one track of a file."""

    def __init__(self, file: Any, stream: Any, rate: int) -> None:
        self._file = file
        self._stream = stream
        self._resampler = av.AudioResampler(format="flt", layout="mono", rate=rate)
        self.end = 0.0
        """Seconds at which the last frame ends by the file's own times, gaps included."""

    def decode(self) -> Iterator[Samples]:
        """The resampled frames, one after the other."""
        frames = 0
        for frame in self._frames():
            frames += 1
            begin = self.end if frame.time is None else frame.time
            self.end = max(self.end, begin + frame.samples / frame.sample_rate)
            frame.pts = None  # gaps are no silence
            for resampled in self._resampler.resample(frame):
                yield resampled.to_ndarray()[0]
        if frames:
            for resampled in self._resampler.resample(None):
                yield resampled.to_ndarray()[0]

    def _frames(self) -> Iterator[Any]:
        failures = frames = 0
        for packet in self._file.demux(self._stream):
            try:
                decoded = packet.decode()
            except EndOfFile:
                break
            except FFmpegError:
                # What stands before, between and behind the frames of an MP3, such as tags, is met as a broken packet.
                failures += 1
                if self._stream.codec_context.name not in ("mp3", "mp3float") or failures > 2 + frames // 100:
                    raise
                continue
            frames += len(decoded)
            yield from decoded


def _told_end(file: Any, stream: Any) -> float:
    """The second at which the track ends, as its file says; 0 where it says so only of all tracks together."""
    if stream.duration:
        return float(((stream.start_time or 0) + stream.duration) * stream.time_base)
    return float(file.duration / av.time_base) if file.duration and len(file.streams) == 1 else 0.0


def _collect(parts: Iterator[Samples], rate: int, limits: MediaLimits) -> Samples:
    most = int(limits.config.max_seconds * rate)
    kept: list[Samples] = []
    count = 0
    for part in parts:
        count += len(part)
        if count > most:
            message = f"the sound is longer than {limits.config.max_seconds:g} s, the most that one may have"
            raise InvalidArgument(f"{message} (--media-max-seconds)")
        kept.append(part)
    return np.concatenate(kept) if kept else np.zeros(0, np.float32)


def _refuse_short(end: float, told_end: float) -> None:
    if told_end - end > max(_MISSING_SECONDS, _MISSING_SHARE * told_end):
        raise InvalidArgument(f"the sound is cut off: it has {end:.1f} s of the {told_end:.1f} s that its file tells")


def _container_of(data: bytes) -> _Container:
    for container, begins in _CONTAINERS:
        if begins(data):
            return container
    names = ", ".join(container.name for container, _ in _CONTAINERS)
    raise InvalidArgument(f"the file is no sound that can be read; formats are {names}")


def _is_mp3(data: bytes) -> bool:
    """Whether it begins with tags, or with the head of a frame of MPEG's layers 1 to 3."""
    return data[:3] == b"ID3" or (len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0 and data[1] & 0x06 != 0)


def _takes_any(data: bytes) -> None:
    """A container without an end of its own."""


def _refuse_cut_wav(data: bytes) -> None:
    """The chunks of a WAV tell their sizes; a file that was written to a pipe has the largest there is."""
    place = 12
    while place + 8 <= len(data):
        kind, size = data[place : place + 4], struct.unpack_from("<I", data, place + 4)[0]
        if kind == b"data":
            if size not in (0, 0xFFFFFFFF) and size < 0x7FFFFFFF and place + 8 + size > len(data):
                rest = len(data) - place - 8
                raise InvalidArgument(f"the sound is cut off: {rest:,} bytes of the {size:,} that its file tells")
            return
        place += 8 + size + size % 2
    raise InvalidArgument("the sound is broken (WAV): it has no samples")


def _refuse_cut_ogg(data: bytes) -> None:
    """The pages of an Ogg tell their sizes."""
    place = 0
    while data[place : place + 4] == b"OggS":
        head = place + 27
        segments = data[head : head + data[place + 26]] if head <= len(data) else b""
        end = head + len(segments) + sum(segments)
        if head > len(data) or len(segments) < data[place + 26] or end > len(data):
            raise InvalidArgument("the sound is cut off: its last page is not whole")
        place = end


def _refuse_cut_webm(data: bytes) -> None:
    """The segment of a WebM, behind its head, tells its size, unless it was written to a pipe."""
    size, place = _ebml_size(data, 4)
    place += size
    if data[place : place + 4] == _SEGMENT:
        size, begin = _ebml_size(data, place + 4)
        if begin + size > len(data):
            rest = len(data) - begin
            raise InvalidArgument(f"the sound is cut off: {rest:,} bytes of the {size:,} that its file tells")


def _ebml_size(data: bytes, place: int) -> tuple[int, int]:
    """The size of an EBML element and where its content begins; 0 where it is not known, or not there."""
    length = 9 - data[place].bit_length() if place < len(data) else 0
    field = data[place : place + length]
    size = int.from_bytes(field, "big") & ((1 << 7 * length) - 1)
    is_known = length <= len(field) and size != (1 << 7 * length) - 1
    return size if is_known else 0, place + length


_CONTAINERS: tuple[tuple[_Container, Callable[[bytes], bool]], ...] = (
    (
        _Container("WAV", "wav", _refuse_cut_wav, False),
        lambda data: data[:4] == b"RIFF" and data[8:12] == b"WAVE",
    ),
    (_Container("FLAC", "flac", _takes_any, True), lambda data: data[:4] == b"fLaC"),
    (_Container("MP3", "mp3", _takes_any, False), _is_mp3),
    (_Container("Ogg", "ogg", _refuse_cut_ogg, False), lambda data: data[:4] == b"OggS"),
    (_Container("MP4", "mov", _takes_any, True), lambda data: data[4:8] == b"ftyp"),
    (_Container("WebM", "matroska", _refuse_cut_webm, True), lambda data: data[:4] == b"\x1aE\xdf\xa3"),
)
