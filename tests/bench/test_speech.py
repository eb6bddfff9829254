"""The benchmark of speech: its checkpoint never ends a transcript, and its sounds are such."""

import io
import wave
from pathlib import Path

import numpy as np
import pytest

from charonia.bench.command import log_to, report_console
from charonia.bench.speech import SECONDS, TOKENS, make_sound, measure, parse_speech_peer, write_speech_model
from charonia.core.errors import InvalidArgument
from charonia.tokenization.speech_tokens import read_speech_tokens
from charonia.tokenization.tokenizer import Tokenizer

SHAPE = {"d_model": 32, "layers": 1, "attention_heads": 2, "ffn_dim": 32}


def test_a_checkpoint_never_wants_its_end(tmp_path: Path) -> None:
    write_speech_model(tmp_path, SHAPE)
    tokens = read_speech_tokens(tmp_path, Tokenizer.load(tmp_path), 51865)
    assert (tokens.start, tokens.end, tokens.no_speech, tokens.no_timestamps) == (50258, 50257, 50362, 50363)
    assert tokens.suppressed == (tokens.end,)
    assert len(tokens.languages) == 99
    assert (tokens.translate, tokens.transcribe) == (50358, 50359)


def test_a_sound_is_thirty_seconds_of_its_own_noise() -> None:
    sounds = []
    for seed in ([1, 0], [1, 1], [1, 0]):
        with wave.open(io.BytesIO(make_sound(seed))) as file:
            assert (file.getnchannels(), file.getframerate()) == (1, 16000)
            sounds.append(np.frombuffer(file.readframes(file.getnframes()), "<i2"))
    assert [len(sound) for sound in sounds] == [16000 * SECONDS] * 3
    assert np.array_equal(sounds[0], sounds[2])
    assert not np.array_equal(sounds[0], sounds[1])


def test_a_peer_is_named_with_its_interpreter() -> None:
    for wrong in ("whispercpp=/bin/sh", "ctranslate2", "ctranslate2=/none/python"):
        with pytest.raises(InvalidArgument, match="peer must be ctranslate2=PYTHON"):
            parse_speech_peer(wrong)


@pytest.mark.proof
def test_sounds_are_written_down_by_a_server(tmp_path: Path) -> None:
    write_speech_model(tmp_path, SHAPE)
    runs = measure(tmp_path, tmp_path, [2], 1, 1, None, log_to(report_console()))
    [run] = runs[2]["charonia"]
    assert run.sounds == 2
    assert run.speed > 0
    assert TOKENS == 224
