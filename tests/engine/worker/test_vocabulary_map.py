"""Which tokens of two tokenizers are the same text, whatever they are called and in whatever form."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from charonia.core.errors import InvalidArgument
from charonia.engine.worker.vocabulary_map import map_vocabularies

TEXTS = ("the river and the ferry, the other river", "one obol for the ferry: they are tokens", "naïve café 東京")


def save(directory: Path, tokenizer: Tokenizer, **roles: str) -> tuple[Path, Tokenizer]:
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(roles))
    return directory, tokenizer


@pytest.fixture
def byte_level(tmp_path: Path) -> tuple[Path, Tokenizer]:
    """As GPT-2's: a space is written as Ġ, and every byte is a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|end|>", "<|user|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return save(tmp_path / "bytes", tokenizer, eos_token="<|end|>")


@pytest.fixture
def pieces(tmp_path: Path) -> tuple[Path, Tokenizer]:
    """As Llama 2's: a space is written as ▁, and bytes only stand for what has no token."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=["<unk>", "</s>", "<|user|>"], show_progress=False)
    tokenizer.train_from_iterator(TEXTS[:2], trainer)
    return save(tmp_path / "pieces", tokenizer, eos_token="</s>")


def test_tokens_of_the_same_text_are_each_others(
    byte_level: tuple[Path, Tokenizer], pieces: tuple[Path, Tokenizer]
) -> None:
    (there, theirs), (here, ours) = byte_level, pieces
    found = map_vocabularies(there, here, 330, 350)
    assert (found.own.shape, found.theirs.shape, found.mask.shape) == ((330,), (350,), (1, 11))
    for one, other in (("Ġthe", "▁the"), ("e", "e"), ("Ġ", "▁"), ("<|user|>", "<|user|>"), ("<|end|>", "</s>")):
        target, own = theirs.token_to_id(one), ours.token_to_id(other)
        assert (found.theirs[own], found.own[target]) == (target, own), one
    allowed = np.unpackbits(found.mask.view(np.uint8), bitorder="little")[:350]
    assert allowed.tolist() == (found.theirs >= 0).tolist()
    assert not allowed[ours.token_to_id("<unk>")]
    assert not allowed[ours.get_vocab_size() :].any()


def test_a_token_that_only_the_target_has_is_the_last_piece_of_its_text(
    byte_level: tuple[Path, Tokenizer], tmp_path: Path
) -> None:
    there, theirs = byte_level
    own = Tokenizer.from_file(str(there / "tokenizer.json"))
    shorter = json.loads(own.to_str())
    vocabulary = shorter["model"]["vocab"]
    lost = next(text for text in vocabulary if text.endswith("er") and len(text) > 3)
    shorter["model"]["vocab"] = {"another" if text == lost else text: at for text, at in vocabulary.items()}
    shorter["model"]["merges"] = [pair for pair in shorter["model"]["merges"] if "".join(pair) != lost]
    here, ours = save(tmp_path / "shorter", Tokenizer.from_str(json.dumps(shorter)))
    found = map_vocabularies(there, here, 320, 320)
    piece = int(found.own[theirs.token_to_id(lost)])
    assert ours.encode(theirs.decode([theirs.token_to_id(lost)])).ids[-1] == piece
    assert found.theirs[theirs.token_to_id(lost)] == -1
    assert (found.theirs >= 0).sum() == theirs.get_vocab_size() - 1


def test_too_little_in_common_is_refused_with_the_figure(byte_level: tuple[Path, Tokenizer], tmp_path: Path) -> None:
    words = {f"w{number}": number for number in range(60)} | {"the": 60}
    here, _ = save(tmp_path / "words", Tokenizer(models.WordLevel(words, unk_token="w0")))
    refused = "another vocabulary than .*bytes: 1 of its 61 tokens are in both, and at least 50% must be"
    with pytest.raises(InvalidArgument, match=refused) as refusal:
        map_vocabularies(byte_level[0], here, 320, 61)
    assert refusal.value.field == "speculative_config"
