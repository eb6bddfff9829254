"""What a checkpoint's extractor makes of sounds is what transformers makes of them, bit for bit; where long ones are
cut."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from charonia.core.errors import InvalidArgument
from charonia.media.sound_processor import SoundProcessor
from charonia.media.sound_windows import Window, cut_windows
from charonia.processes.limited_process import CallLimits, LimitedProcess

from .extractor_answers import ComparedSound, compare_extractors
from .sounds import RATE, tones, write_extractor

LONGEST = 30 * RATE


@pytest.mark.parametrize("bins", [80, pytest.param(128, marks=pytest.mark.proof)])
def test_features_are_those_of_transformers(tmp_path: Path, bins: int) -> None:
    process = LimitedProcess("charonia-test", compare_extractors, str(write_extractor(tmp_path, bins)))
    answer = process.call(b"", CallLimits(60.0, 2 << 30))
    process.close()
    sounds = msgspec.msgpack.decode(answer, type=list[ComparedSound])
    assert all(sound.equal for sound in sounds)
    assert [sound.shape for sound in sounds] == [(1, bins, 3000)] * 4 + [(2, bins, 3000)]
    assert [sound.bounds[-1][1] for sound in sounds] == [0.1, 3.0, 29.98, 30.0, 47.5]
    assert sounds[-1].bounds[0][1] == sounds[-1].bounds[1][0]


def test_a_checkpoint_without_an_extractor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="has no extractor of features of sounds: no preprocessor_config"):
        SoundProcessor(tmp_path)


def test_features_with_noise_are_refused(tmp_path: Path) -> None:
    file = write_extractor(tmp_path) / "preprocessor_config.json"
    file.write_text(file.read_text().replace("{", '{"dither": 0.1, ', 1))
    with pytest.raises(InvalidArgument, match=r"preprocessor_config\.json: dither is not served"):
        SoundProcessor(tmp_path)


def test_a_long_sound_is_cut_where_it_is_silent() -> None:
    sound = tones(80)
    sound[27 * RATE : 27 * RATE + RATE // 2] = 0
    sound[10 * RATE : 11 * RATE] = 0  # a window is as long as it may be
    sound[53 * RATE : 53 * RATE + RATE // 4] *= 0.01
    windows = cut_windows(sound, RATE, LONGEST)
    assert len(windows) == 3
    assert 27 * RATE < windows[0].end < 27.5 * RATE
    assert 53 * RATE < windows[1].end < 53.25 * RATE


@pytest.mark.parametrize("seconds", [0.01, 30, 30.01, 31, 95])
def test_windows_have_every_sample_once(seconds: float) -> None:
    for sound in (tones(seconds), np.zeros(int(seconds * RATE), np.float32)):
        windows = cut_windows(sound, RATE, LONGEST)
        assert [window.begin for window in windows] == [0, *(window.end for window in windows[:-1])]
        assert windows[-1].end == len(sound)
        assert all(0 < end - begin <= LONGEST for begin, end in windows)
    assert cut_windows(tones(30), RATE, LONGEST) == [Window(0, LONGEST)]
