"""Encoding takes a stated time and memory at most; what fails fails by name, and the next text is read."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from charonia.core.errors import Internal, InvalidArgument
from charonia.tokenization import bounded_encoder, tokenizer
from charonia.tokenization.bounded_encoder import BoundedEncoder, EncodedText
from charonia.tokenization.tokenizer import AsyncTokenizer
from charonia.tokenization.tokenizer import Tokenizer as OwnTokenizer
from charonia.tokenization.tokenizer_json import EncoderTokenizer

EVIL = "(a+)+[bc]"


def change(checkpoint: Path, **parts: Any) -> Path:
    """The checkpoint with other parts in its tokenizer."""
    path = str(checkpoint / "tokenizer.json")
    backend = Tokenizer.from_file(path)
    for name, part in parts.items():
        setattr(backend, name, part)
    backend.save(path)
    return checkpoint


def rewrite(checkpoint: Path, **fields: Any) -> Path:
    path = checkpoint / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return checkpoint


@pytest.fixture
def evil(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> OwnTokenizer:
    """One whose pre-tokenizer goes back for ever over a row of a's."""
    monkeypatch.setattr(bounded_encoder, "_SECONDS", 1.0)
    splits = [pre_tokenizers.Split(Regex(EVIL), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    return OwnTokenizer.load(change(checkpoint, pre_tokenizer=pre_tokenizers.Sequence(splits)))


async def test_a_pattern_that_backtracks_costs_its_request_and_no_other(evil: OwnTokenizer) -> None:
    assert not evil.bounded
    plain = AsyncTokenizer(evil)
    assert evil.decode(await plain.prompt_ids("the lazy dog")) == "the lazy dog"
    with pytest.raises((InvalidArgument, Internal), match=r"encoding the text takes|the tokenizer failed"):
        await plain.prompt_ids("a" * 5000)
    assert evil.decode(await plain.call(evil.encode, "the lazy dog")) == "the lazy dog"


def test_what_runs_apart_says_the_same(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    here, apart = BoundedEncoder(backend, "here"), BoundedEncoder(backend, "there")
    monkeypatch.setattr(apart, "unbounded", ("for a test",))
    for given in (["the lazy dog", "été 日本語", ""], [("the", "dog")]):
        for special in (True, False):
            assert apart.encode(given, special) == here.encode(given, special)
    assert (apart.may_run_apart, here.may_run_apart) == (True, False)


def test_a_normalizer_that_grows_fails_the_load_if_the_checkpoints_own_example_is_too_much(checkpoint: Path) -> None:
    grown = normalizers.Replace("a", "b" * (1 << 22))
    with pytest.raises(InvalidArgument, match=r"tokenizer\.json: an example of .* characters: .* more than \d+ MiB"):
        OwnTokenizer.load(change(checkpoint, normalizer=grown))


def test_a_text_that_grows_is_bounded_by_its_length(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_encoder, "_LEAST_MEMORY", 1 << 26)
    loaded = OwnTokenizer.load(change(checkpoint, normalizer=normalizers.Replace("@", "b" * (1 << 20))))
    assert loaded.decode(loaded.encode("the lazy dog")) == "the lazy dog"
    with pytest.raises(InvalidArgument, match=r"encoding the text takes more than \d+ MiB"):
        loaded.encode("@" * 1000)


def test_a_long_text_of_a_normalizer_that_grows_a_little_runs_apart(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_encoder, "_MOST_GROWN", 1 << 11)
    encoder = BoundedEncoder(
        Tokenizer.from_file(str(change(checkpoint, normalizer=normalizers.NFKC()) / "tokenizer.json")), "here"
    )
    assert encoder.bounded
    assert encoder.may_run_apart
    [_, expected] = encoder.encode(["the", "the dog " * 8])
    assert encoder._apart is None
    assert encoder.encode(["the dog " * 200])[0].ids[:16] == expected.ids[:16]
    assert encoder._apart is not None


@pytest.mark.parametrize(
    "fields",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAEAAP////////////////8AAAAA"}},
        {"post_processor": {"type": "BertProcessing", "sep": ["</s>", 1], "cls": ["<s>"]}},
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}},
        {"model": {"type": "Unigram", "unk_id": 9, "vocab": [["a", 0.0]]}},
    ],
)
def test_a_tokenizer_that_the_library_breaks_over_fails_the_load_by_name(
    checkpoint: Path, fields: dict[str, Any]
) -> None:
    with pytest.raises(InvalidArgument, match=r"tokenizer\.json"):
        OwnTokenizer.load(rewrite(checkpoint, **fields))


class PanicException(BaseException):
    """As pyo3's."""


class Panics:
    """A backend whose every method panics."""

    def __getattr__(self, name: str) -> Any:
        def panic(*_: object, **__: object) -> Any:
            raise PanicException(f"in {name}")

        return panic


def test_every_call_of_the_library_that_panics_is_an_error_by_name(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = OwnTokenizer.load(checkpoint)
    encoder = EncoderTokenizer.load(checkpoint, 16)
    backend: Any = Panics()
    for holder in (loaded, loaded._encoder, encoder._encoder):
        monkeypatch.setattr(holder, "_backend", backend)
    with pytest.raises(Internal, match="in decode"):
        tokenizer.read_token_piece(backend, 5)
    for work in (
        lambda: loaded.encode("a"),
        lambda: loaded.encode("a" * 5000),
        lambda: loaded.decode([5]),
        lambda: encoder.encode(["a"]),
        lambda: loaded.token_id("eos_token"),
        lambda: loaded.added_tokens(5),
        lambda: tokenizer._read_bytes(backend, 5),
    ):
        with pytest.raises(Internal, match=r"^the tokenizer failed: PanicException: in "):
            work()


def test_an_encoder_reads_pairs_as_before(checkpoint: Path) -> None:
    encoder = EncoderTokenizer.load(checkpoint, 4)
    [text] = encoder.encode(["the lazy dog the lazy dog"])
    assert isinstance(text, EncodedText)
    assert len(text.ids) == len(text.segments) == 4
