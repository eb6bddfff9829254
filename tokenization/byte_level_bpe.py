"""Byte-level BPE, whose vocabulary has a letter for each byte: how published ones split text into words, and how one is
built of its tokens and merges."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(0x100) if byte not in _PRINTABLE]
LETTER_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + at): byte for at, byte in enumerate(_OTHERS)}
"""The letters of byte-level vocabularies and their bytes: printable bytes are Latin-1, all others are letters from 256
on."""

_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cases(suffix: str) -> str:
    """A pattern of words whose capitals come first, each with the optional `suffix`."""
    first = r"[^\r\n\p{L}\p{N}]?"
    return f"{first}{_UPPER}*{_LOWER}+{suffix}|{first}{_UPPER}+{_LOWER}*{suffix}"


class WordRule(NamedTuple):
    """How text becomes words before byte-level BPE."""

    patterns: tuple[str, ...] = ()
    """Each splits what the patterns before it left."""
    gpt2: bool = False
    """GPT-2's own pattern splits last."""
    composed: bool = False
    """Characters are composed first (NFC)."""
    whole: bool = False
    """A word in the vocabulary is one token, whatever the merges."""
    begins: bool = False
    """A text begins with bos, unless the file says otherwise."""


_LLAMA3 = WordRule((rf"{_SUFFIXES}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}",))
_QWEN2 = WordRule((rf"{_SUFFIXES}|{_LETTERS}|\p{{N}}|{_REST}",), composed=True)
_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORD_RULES: Mapping[str, WordRule] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "mellum"), WordRule(gpt2=True)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), WordRule((r"\p{N}",), gpt2=True)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _LLAMA3._replace(whole=True, begins=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _LLAMA3),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2._replace(composed=False),
    "deepseek-coder": WordRule(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "tekken": WordRule((rf"{_cases('')}|\p{{N}}|{_SLASHES}",), whole=True, begins=True),
    "gpt-4o": WordRule((rf"{_cases(f'{_SUFFIXES}?')}|\p{{N}}{{1,3}}|{_SLASHES}",)),
}
"""The rule of each tokenizer.ggml.pre, from the tokenizer.json of checkpoints with that name."""


def published_patterns() -> frozenset[str]:
    return frozenset(pattern for rule in WORD_RULES.values() for pattern in rule.patterns)


def build_byte_level(ids: Mapping[str, int], merges: Sequence[tuple[str, str]], rule: WordRule) -> Tokenizer:
    """A tokenizer without special tokens. Raises `Exception`, as the library does, if merges and tokens do not fit."""
    tokenizer = Tokenizer(models.BPE(dict(ids), list(merges), ignore_merges=rule.whole))
    splits: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.gpt2)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, letters])
    if rule.composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
