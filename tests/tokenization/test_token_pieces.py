"""Single tokens: their text with its leading space, and the bytes of those that are no whole character."""

from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from charonia.tokenization.tokenizer import Tokenizer


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(text=st.text(max_size=20))
def test_the_bytes_of_tokens_are_the_bytes_of_the_text(checkpoint: Path, text: str) -> None:
    tokenizer = Tokenizer.load(checkpoint)
    ids = tokenizer.encode(text, special=False)
    assert b"".join(tokenizer.pieces.piece(token).data for token in ids) == text.encode()


def test_special_and_unknown_tokens(checkpoint: Path) -> None:
    tokenizer = Tokenizer.load(checkpoint)
    assert tokenizer.pieces.piece(1) == ("</s>", b"</s>")
    assert tokenizer.pieces.piece(10**6) == ("", b"")


@pytest.fixture
def fallback() -> Tokenizer:
    """As Llama 2 and Mistral do it: spaces are marked, rare characters are spelt in bytes."""
    vocabulary = {"<s>": 0, "\u2581the": 1, "<0xC3>": 2, "<0xA9>": 3, "s": 4}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend, {}, None)


def test_leading_spaces_and_bytes(fallback: Tokenizer) -> None:
    assert fallback.pieces.piece(1) == (" the", b" the")
    assert fallback.pieces.piece(2) == ("\ufffd", b"\xc3")
    assert fallback.pieces.piece(3).data == b"\xa9"
    assert fallback.pieces.piece(4) == ("s", b"s")


def test_words_are_banned_alone_and_behind_a_space(checkpoint: Path) -> None:
    tokenizer = Tokenizer.load(checkpoint)
    words = tokenizer.word_ids(["fox", " fox"])
    assert sorted(tokenizer.decode(word) for word in words) == [" fox", "fox"]
    assert tokenizer.word_ids([]) == []
    assert [tokenizer.decode(word) for word in tokenizer.word_ids(["\n"])] == ["\n"]  # and no space
