"""The reader over real processes: what becomes of sounds, and of files that are none."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from charonia.core.errors import InvalidArgument
from charonia.core.media import FEATURES, WINDOW_BOUNDS, MediaSource, PreparedMedium
from charonia.core.media_models import MediaConfig
from charonia.media.limits import MediaLimits
from charonia.media.preparing_process import PreparedAnswer, make_answer
from charonia.media.reader import MediaReader
from charonia.media.sound_file import _SoundDecoder, decode_sound
from charonia.processes.child_process import anonymous_file

from .hostile_sounds import hostile_sounds
from .pictures import context
from .sounds import CODECS, film_with_sound, sound_file, tones, wav, write_extractor

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_extractor(tmp_path_factory.mktemp("checkpoint"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reader(checkpoint: Path) -> AsyncIterator[MediaReader]:
    config = MediaConfig(processes=1, max_seconds=60, cache_bytes=0)
    reader = MediaReader(str(checkpoint), MediaLimits(config, memory=400 << 20), kinds=("audio",))
    await reader.load()
    yield reader
    await reader.unload()
    assert reader.processes == 0


async def prepared(reader: MediaReader, data: bytes) -> PreparedMedium | str:
    try:
        return await reader.prepare(MediaSource("audio", data, field="file"), context())
    except InvalidArgument as error:
        return f"{error.field}: {error.message}"


@pytest.mark.parametrize("form", CODECS)
async def test_every_form_is_heard(reader: MediaReader, form: str) -> None:
    """Two channels of another rate sound as the one that they were made of."""
    medium = await prepared(reader, sound_file(form, tones(1.5, rate=48_000), 48_000, channels=2))
    plain = await prepared(reader, wav(tones(1.5)))
    assert isinstance(medium, PreparedMedium)
    assert isinstance(plain, PreparedMedium)
    assert (medium.kind, medium.inputs[FEATURES].shape, medium.inputs[WINDOW_BOUNDS].shape) == (
        "audio",
        (1, 80, 3000),
        (1, 2),
    )
    assert medium.inputs[WINDOW_BOUNDS][0, 1] == pytest.approx(1.5, abs=0.1)
    begin, end = 20, 120
    apart = np.abs(medium.inputs[FEATURES][0, :12, begin:end] - plain.inputs[FEATURES][0, :12, begin:end])
    assert np.median(apart) < 0.1


@pytest.mark.parametrize("container", ["mp4", "webm"])
@pytest.mark.parametrize(("begin", "pause"), [(0.0, 0.0), (4.0, 0.0), (0.0, 4.0)])
async def test_a_film_may_be_longer_than_its_sound(
    reader: MediaReader, container: str, begin: float, pause: float
) -> None:
    """Which begins late, or pauses, and is whole nevertheless; one that is cut off is told by its container."""
    data = film_with_sound(container, tones(3, rate=48_000), 9.0, begin, pause)
    medium = await prepared(reader, data)
    assert isinstance(medium, PreparedMedium), medium
    assert medium.inputs[WINDOW_BOUNDS][0, 1] == pytest.approx(3, abs=0.1)
    refusal = await prepared(reader, data[: len(data) * 2 // 3])
    assert isinstance(refusal, str)
    assert refusal.startswith("file: file: the sound is " + ("cut off: " if container == "webm" else "broken (MP4)"))


@pytest.mark.parametrize("form", ["flac", "webm"])
async def test_what_a_file_tells_of_its_end_is_compared(
    reader: MediaReader, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, where a track may stop early."""
    data = sound_file(form, tones(3, rate=48_000), 48_000)
    assert len(decode_sound(data, 16_000, MediaLimits())) == pytest.approx(48_000, abs=1600)
    frames = _SoundDecoder._frames
    monkeypatch.setattr(_SoundDecoder, "_frames", lambda decoder: islice(frames(decoder), 20))
    with pytest.raises(InvalidArgument, match=r"cut off: it has [0-2]\.. s of the 3\.0 s that its file tells"):
        decode_sound(data, 16_000, MediaLimits())


async def test_long_sounds_may_take_more_memory() -> None:
    """As much as the windows of 128 bins that are made of them, and their samples."""
    for seconds in (60.0, 14_400.0):
        limits = MediaLimits(MediaConfig(max_seconds=seconds))
        windows = seconds / 24 + 1
        assert limits.max_output_for("audio") > windows * 3000 * 128 * 4
        assert limits.memory_for("audio") > 2 * windows * 3000 * 128 * 4 + 2 * seconds * 16_000 * 4
        assert (limits.max_output_for("image"), limits.memory_for("image")) == (limits.max_output, limits.memory)


async def test_a_sound_is_as_long_as_it_may_be_and_no_longer(reader: MediaReader) -> None:
    longest = await prepared(reader, wav(tones(60)))
    assert isinstance(longest, PreparedMedium)
    assert len(longest.inputs[FEATURES]) == len(longest.inputs[WINDOW_BOUNDS]) == 3
    refusal = await prepared(reader, wav(tones(60.1)))
    assert refusal == "file: file: the sound is longer than 60 s, the most that one may have (--media-max-seconds)"


async def check_refusals(reader: MediaReader, part: slice) -> None:
    """None of them costs more than its own refusal: the process that begins with them ends with them."""
    [worker] = reader._running
    hostile, sounds = list(hostile_sounds()), 0
    assert len({file.data for file in hostile}) >= 200
    for file in hostile[part]:
        result = await prepared(reader, file.data)
        if isinstance(result, str):
            assert result.startswith(("file: file: the ", "file: file: decoding the ")), file.name
            assert len(result) < 300, file.name
            continue
        sounds += 1
        assert np.isfinite(result.inputs[FEATURES]).all(), file.name
        assert len(result.inputs[FEATURES]) == 1, file.name
    assert len(hostile[part]) / 5 < sounds < len(hostile[part]) / 2
    assert reader._running == {worker}
    assert worker.alive


async def test_hostile_files_are_refused_by_their_fault_or_heard(reader: MediaReader) -> None:
    await check_refusals(reader, slice(None, None, 5))


@pytest.mark.proof
async def test_all_hostile_files(reader: MediaReader) -> None:
    await check_refusals(reader, slice(None))


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"\0" * 99, "the file is no sound that can be read; formats are WAV, FLAC, MP3, Ogg, MP4, WebM"),
        (wav(tones(1))[:9000], "the sound is cut off: 8,956 bytes of the 32,000 that its file tells"),
        (wav(tones(0)), "the sound is empty: it has no samples"),
        (sound_file("flac", tones(1))[:-100], "the sound is broken (FLAC): Invalid data found when processing input"),
    ],
)
async def test_a_fault_is_named(reader: MediaReader, data: bytes, fault: str) -> None:
    assert await prepared(reader, data) == f"file: file: {fault}"


async def test_one_that_takes_too_long_is_ended(reader: MediaReader) -> None:
    [worker] = reader._running
    worker._limits = limits = MediaLimits(MediaConfig(max_seconds=600), seconds=0.001)
    assert limits.seconds_for("audio") == 2 * limits.seconds_for("image")
    assert await prepared(reader, wav(tones(50))) == "file: file: preparing the sound takes more than 0.002 s"
    assert not worker.alive
    assert reader.processes == 0


async def test_a_server_without_the_library_names_it(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, where everything else is as in one that prepares sounds."""
    monkeypatch.setitem(sys.modules, "torch", object())
    monkeypatch.setitem(sys.modules, "av", None)
    monkeypatch.delitem(sys.modules, "charonia.media.sound_file", raising=False)
    limits = MediaLimits(MediaConfig(max_seconds=0.01), max_output=4096)
    memory = anonymous_file("charonia-test")
    await asyncio.to_thread(os.ftruncate, memory, 4096)
    for name in ("TRANSFORMERS_NO_ADVISORY_WARNINGS", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "")
    answer = make_answer(str(checkpoint), limits, memory, ("audio",))
    os.close(memory)
    error = msgspec.msgpack.decode(answer(b""), type=PreparedAnswer).error
    assert error is not None
    assert error.message == "sounds need the package av, which is not installed: pip install '.[media]'"
