"""The special tokens of checkpoints that write down sounds."""

import json
from pathlib import Path

import pytest

from charonia.core.errors import InvalidArgument
from charonia.tokenization.speech_tokens import read_speech_tokens
from charonia.tokenization.tokenizer import Tokenizer
from tests.hearing_models import LANGUAGES, write_whisper_tokenizer

VOCAB = 4096


def test_the_tokenizer_names_what_the_configuration_does_not(tmp_path: Path) -> None:
    ids = write_whisper_tokenizer(tmp_path)
    tokens = read_speech_tokens(tmp_path, Tokenizer.load(tmp_path), VOCAB)
    assert (tokens.start, tokens.end) == (ids["<|startoftranscript|>"], ids["<|endoftext|>"])
    assert (tokens.first_time, tokens.no_speech) == (ids["<|0.00|>"], ids["<|nospeech|>"])
    assert tokens.languages == {code: ids[f"<|{code}|>"] for code in LANGUAGES}
    assert (tokens.translate, tokens.transcribe) == (ids["<|translate|>"], ids["<|transcribe|>"])
    assert tokens.suppressed == tokens.suppressed_first == ()
    assert tokens.most_initial is None


def test_the_configuration_comes_first(tmp_path: Path) -> None:
    ids = write_whisper_tokenizer(tmp_path)
    generation = {
        "suppress_tokens": [5, 6, -1, VOCAB],
        "begin_suppress_tokens": [7],
        "max_initial_timestamp_index": 50,
        "lang_to_id": {"<|en|>": ids["<|en|>"], "<|xx|>": 3},
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    tokens = read_speech_tokens(tmp_path, Tokenizer.load(tmp_path), VOCAB)
    assert (tokens.suppressed, tokens.suppressed_first, tokens.most_initial) == ((5, 6), (7,), 50)
    assert tokens.languages == {"en": ids["<|en|>"]}


def test_a_model_of_english_alone_has_no_languages(tmp_path: Path) -> None:
    write_whisper_tokenizer(tmp_path, multilingual=False)
    (tmp_path / "generation_config.json").write_text('{"is_multilingual": false}')
    assert not read_speech_tokens(tmp_path, Tokenizer.load(tmp_path), VOCAB).languages


def test_what_lacks_is_named(tmp_path: Path) -> None:
    write_whisper_tokenizer(tmp_path)
    with pytest.raises(InvalidArgument, match=r"has no token <\|notimestamps\|>, which transcripts need"):
        read_speech_tokens(tmp_path, Tokenizer.load(tmp_path), 300)
    (tmp_path / "generation_config.json").write_text('{"suppress_tokens": "all"}')
    with pytest.raises(InvalidArgument, match="suppress_tokens must be a list of token ids"):
        read_speech_tokens(tmp_path, Tokenizer.load(tmp_path), VOCAB)
