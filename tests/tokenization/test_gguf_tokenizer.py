"""Tokenizers out of GGUF metadata give what the tokenizers they were made from give."""

import heapq
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from charonia.core.errors import InvalidArgument
from charonia.core.request import ChatMessage, Conversation
from charonia.tokenization.generation_defaults import read_generation_defaults
from charonia.tokenization.tokenizer import Tokenizer as LoadedTokenizer

TEXTS = (
    "Hello, world! It's 1234567 o'clock; WE'LL see.",
    "  two  spaces\n\n\nand\t tabs  \r\n end  ",
    "Grüße aus MÜNCHEN, naïve café, 東京の天気, 🚣‍♀️ e\u0301",
    "def f(x):\n    return x**2  # 0.5/3 http://a.b/c?d=e\n",
    "",
    " ",
    "a<|user|>b <|end|> c<think>d</think>",
)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPECIAL = ("<|end|>", "<|user|>", "<think>", "</think>")
KINDS = {"<|end|>": CONTROL, "<|user|>": CONTROL, "<think>": USER_DEFINED, "</think>": USER_DEFINED}

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
LLAMA3 = WORDS + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHECKPOINTS: dict[str, Callable[[], Any]] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "llama-bpe": lambda: split(LLAMA3),
    "qwen2": lambda: split(LLAMA3.replace("{1,3}", "")),
    "tekken": lambda: split(TEKKEN),
}
"""The pre-tokenizers of checkpoints, as their tokenizer.json has them."""


def split(pattern: str) -> Any:
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), letters])


def write(path: Path, **metadata: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        name = f"tokenizer.{key}" if key.startswith("chat") else f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level(name: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=name in ("llama-bpe", "tekken")))
    tokenizer.pre_tokenizer = CHECKPOINTS[name]()
    tokenizer.normalizer = normalizers.NFC() if name == "qwen2" else None
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text.replace("<", " ") for text in TEXTS] * 3, trainer)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.add_special_tokens(["<|end|>", "<|user|>"])
    return tokenizer


def bpe_metadata(tokenizer: Tokenizer, name: str) -> dict[str, Any]:
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    tokens = [tokenizer.id_to_token(token) for token in range(tokenizer.get_vocab_size())]
    return {
        "model": "gpt2",
        "pre": name,
        "tokens": tokens,
        "token_type": [KINDS.get(token, NORMAL) for token in tokens],
        "merges": [" ".join(pair) for pair in merges],
        "eos_token_id": 0,
    }


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_byte_level_tokens_are_the_checkpoint_s(name: str, tmp_path: Path) -> None:
    original = byte_level(name)
    metadata = bpe_metadata(original, name) | {"bos_token_id": 0, "add_bos_token": False}
    loaded = LoadedTokenizer.load(write(tmp_path / "model.gguf", **metadata))
    for text in TEXTS:
        ids = original.encode(text).ids
        assert loaded.encode(text) == ids
        assert loaded.decode(ids, special=True) == original.decode(ids, skip_special_tokens=False)
        assert loaded.decode(ids) == original.decode(ids)


@pytest.mark.parametrize(
    ("changes", "around"),
    [
        ({"pre": "llama-bpe", "bos_token_id": 0}, (True, False)),
        ({"pre": "qwen2", "bos_token_id": 0}, (False, False)),
        ({"pre": "qwen2", "bos_token_id": 0, "add_bos_token": True, "add_eos_token": True}, (True, True)),
        ({"pre": "llama-bpe", "add_bos_token": True}, (False, False)),
    ],
)
def test_what_stands_around_a_text_is_what_the_file_says(
    changes: dict[str, Any], around: tuple[bool, bool], tmp_path: Path
) -> None:
    metadata = bpe_metadata(byte_level("llama-bpe"), "llama-bpe") | changes
    loaded = LoadedTokenizer.load(write(tmp_path / "model.gguf", **metadata))
    plain, ids = loaded.encode("some text", special=False), loaded.encode("some text")
    assert ids == [0] * around[0] + plain + [0] * around[1]


PIECES = {"\u2581": -2.0, "\u2581the": -3.0, "the": -4.5, "he": -3.5, "th": -5.0, "\u2581t": -2.5, "in": -6.0}
PIECES |= {"\u2581\u2581": -7.0, "ing": -8.0, "\u2581in": -6.5, "\u2581then": -9.0, "n\u2581": -20.0, "hen": -4.0}


def sentencepiece_metadata(prefix: bool = True) -> dict[str, Any]:
    letters = {letter: -30.0 - number for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz.,!")}
    pieces = PIECES | letters
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "<|user|>", "[INST]"]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces), CONTROL, USER_DEFINED]
    return {
        "model": "llama",
        "tokens": tokens,
        "token_type": kinds,
        "scores": [0.0] * 259 + list(pieces.values()) + [0.0, 0.0],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_space_prefix": prefix,
    }


def pieces_of(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE by its definition (arXiv 1808.06226): again and again the neighbours whose joint piece has
    the highest score become one, the leftmost first; letters that are in no piece are bytes."""
    parts = list(text)
    while True:
        pairs = [
            (-scores[first + second], place)
            for place, (first, second) in enumerate(itertools.pairwise(parts))
            if first + second in scores
        ]
        if not pairs:
            break
        _, place = heapq.nsmallest(1, pairs)[0]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return [each for part in parts for each in ([part] if part in scores else fallback(part))]


def fallback(letter: str) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in letter.encode()]


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_are_merged_by_score_and_unknown_letters_are_bytes(prefix: bool, tmp_path: Path) -> None:
    metadata = sentencepiece_metadata(prefix)
    loaded = LoadedTokenizer.load(write(tmp_path / "model.gguf", **metadata))
    ids = {token: number for number, token in enumerate(metadata["tokens"])}
    scores = {token: score for token, score in zip(metadata["tokens"], metadata["scores"], strict=True) if score}
    for text in ("then the thing", "in  the   hen", "thethethe", "naïve 東京 theü", " the", "then ", "x"):
        spelt = ("\u2581" if prefix else "") + text.replace(" ", "\u2581")
        expected = [ids[piece] for piece in pieces_of(spelt, scores)]
        assert loaded.encode(text, special=False) == expected
        assert loaded.encode(text) == [1, *expected]
        assert loaded.decode(expected) == text
    assert loaded.encode("<|user|>[INST]", special=False) == [len(ids) - 2, len(ids) - 1]
    assert loaded.decode([len(ids) - 2, len(ids) - 1]) == "[INST]"


def test_user_defined_spaces_are_one_token_where_nothing_is_put_before_a_text(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata(prefix=False)
    at = metadata["tokens"].index("\u2581\u2581")
    metadata["token_type"][at], metadata["scores"][at] = USER_DEFINED, -1000.0
    loaded = LoadedTokenizer.load(write(tmp_path / "model.gguf", **metadata))
    the = metadata["tokens"].index("the")
    assert loaded.encode("  the", special=False) == [at, the]
    assert loaded.decode([at, the]) == "  the"


def test_gemma4_merges_spaces_and_bytes_as_its_checkpoint_does(tmp_path: Path) -> None:
    first = ["<pad>", "<bos>", "<unk>", "<|turn>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted(set("abcdefghijklmnopqrstuvwxyz.,!\n\u2581"))
    pairs = [("t", "h"), ("\u2581", "th"), ("\u2581th", "e"), ("i", "n"), ("\n", "\n"), ("\u2581", "\u2581")]
    tokens = [*first, *letters, *(one + other for one, other in pairs)]
    original = Tokenizer(
        models.BPE(
            {token: number for number, token in enumerate(tokens)},
            pairs,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    original.normalizer = normalizers.Replace(" ", "\u2581")
    original.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    original.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    metadata = {
        "model": "gemma4",
        "tokens": tokens,
        "token_type": [CONTROL, CONTROL, UNKNOWN, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(tokens) - 260)],
        "scores": [-1000.0] * len(tokens),
        "merges": [" ".join(pair) for pair in pairs],
        "bos_token_id": 1,
        "unknown_token_id": 2,
        "add_space_prefix": False,
        "add_bos_token": True,
    }
    loaded = LoadedTokenizer.load(write(tmp_path / "model.gguf", **metadata))
    for text in ("then  in the\n\n\nthing", " the", "naïve 東京 the", "x ", ""):
        ids = original.encode(text).ids
        assert loaded.encode(text) == [1, *ids]
        assert loaded.decode(ids) == text
    assert loaded.encode("<|turn>the", special=False)[0] == 3


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model": "none"}, "it has no tokenizer: --tokenizer names a checkpoint that has one"),
        ({"model": "t5"}, "its tokenizer 't5' is not supported"),
        ({"pre": "martian"}, r"its pre-tokenizer 'martian' is not supported \(supported: gpt-2, .*qwen2"),
        ({"pre": ""}, "it does not name its pre-tokenizer; --tokenizer"),
        ({"token_type": [1, 2]}, "token_type has 2 entries for"),
        ({"eos_token_id": 1 << 20}, "eos_token_id is 1048576, but there are"),
        ({"merges": ["nobody knows"]}, "its tokenizer can't be built"),
        ({"model": "llama"}, "its metadata has no tokenizer.ggml.scores"),
        ({"model": "llama", "scores": [0.5]}, "scores has 1 entries for"),
    ],
)
def test_a_tokenizer_that_is_broken_or_not_supported_is_refused_by_name(
    changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "model.gguf", **bpe_metadata(byte_level("gpt-2"), "gpt-2") | changes)
    with pytest.raises(InvalidArgument, match=told):
        LoadedTokenizer.load(path)


def test_the_template_and_the_ends_of_a_text_are_the_file_s(tmp_path: Path) -> None:
    metadata = bpe_metadata(byte_level("gpt-2"), "gpt-2") | {"eot_token_id": 5, "bos_token_id": 0}
    template = "{{ bos_token }}{{ messages[0].content }}{% if tools %}!{% endif %}"
    path = write(tmp_path / "model.gguf", **metadata, chat_template=template)
    loaded = LoadedTokenizer.load(path)
    conversation = Conversation((ChatMessage("user", "hello"),))
    assert loaded.decode(loaded.prompt_ids(conversation), special=True) == "<|end|>hello"
    assert read_generation_defaults(path, loaded).eos == (0, 5)
