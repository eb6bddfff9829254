"""Words of transcripts, beside those that transformers finds in the same tokens."""

from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

from charonia.tokenization.speech_words import split_words
from charonia.tokenization.tokenizer import Tokenizer
from tests.hearing_models import write_whisper_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("words")
    write_whisper_tokenizer(directory)
    return Tokenizer.load(directory)


def expected(tokenizer: Tokenizer, tokens: Sequence[int], language: str) -> list[tuple[str, int, int]]:
    library: Any = SimpleNamespace(decode=lambda ids, **_: tokenizer.decode(ids), eos_token_id=1 << 30)
    words, _, indices = _combine_tokens_into_words(library, [*tokens], language)
    return [(word, places[0], places[-1] + 1) for word, places in zip(words, indices, strict=True)]


TEXTS = (
    " so it goes, and the sound of it is a word.",
    "so it \"goes\" (and on), it's 3.14 -- that's all!?",
    " ¿Qué? ¡no! [it] {goes} on: 'so'... ",
    " 日本語の音。それは言葉、です 🎵",
    " naïve café — so",
    "",
)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("language", ["english", "japanese"])
def test_words_are_the_reference_s(tokenizer: Tokenizer, text: str, language: str) -> None:
    tokens = tokenizer.encode(text, special=False)
    words = split_words(tokens, tokenizer.decode, spaced=language == "english")
    assert [tuple(word) for word in words] == expected(tokenizer, tokens, language)
    assert "".join(word.text for word in words) == text


def test_parts_of_characters_belong_to_words(tokenizer: Tokenizer) -> None:
    """Whatever a decoder says, each token is in one word."""
    drawn = Random(1)
    for _ in range(60):
        tokens = [drawn.randrange(320) for _ in range(drawn.randrange(1, 24))]
        words = split_words(tokens, tokenizer.decode, spaced=bool(drawn.randrange(2)))
        assert [word.first for word in words] == [0, *(word.end for word in words[:-1])]
        assert words[-1].end == len(tokens)
