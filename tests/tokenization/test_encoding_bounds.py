"""What a tokenizer may cost is judged by its parts; what is not known to be harmless counts as unbounded."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from charonia.core.errors import InvalidArgument
from charonia.tokenization.byte_level_bpe import published_patterns
from charonia.tokenization.encoding_bounds import MAX_GROWTH, is_harmless, read_bounds

PUBLISHED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"\p{N}",
    r"\d{1,3}",
    " {2,}",
    "(sin|cos)",
    r"(?<=\p{L}\p{L})(?:ing|ed|s)(?!\p{L})",
)
HOSTILE = (
    r"(a+)+b",
    r"(a|aa)+$",
    r"a*a*a*b",
    r"\s+$",
    r"\s*[\r\n]+",  # alone, it looks at each blank of a run again
    r"(\w+)\1",
    r"(?=a*b)a",
    r"[^\s]*\d",
    "a{0,9}a{0,9}a{0,9}a{0,9}b",
    "a" * 5000,
)


def test_patterns_of_published_checkpoints_are_harmless() -> None:
    assert [pattern for pattern in (*PUBLISHED, *published_patterns()) if not is_harmless(pattern)] == []


@pytest.mark.parametrize("pattern", HOSTILE)
def test_a_pattern_that_may_go_back_is_not(pattern: str) -> None:
    assert not is_harmless(pattern)


def made(**parts: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


@pytest.mark.parametrize(
    ("parts", "growth"),
    [
        ({}, 1),
        ({"normalizer": normalizers.NFC()}, 4),
        ({"normalizer": normalizers.Sequence([normalizers.Prepend("_"), normalizers.Replace(" ", "_")])}, 2),
        ({"normalizer": normalizers.Replace("ab", "x" * 20)}, 10),
        ({"normalizer": normalizers.Replace(Regex("[ab]"), "xyz")}, 4),
        ({"normalizer": normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])}, 54),
        ({"pre_tokenizer": pre_tokenizers.ByteLevel()}, 1),
    ],
)
def test_growth_is_what_the_normalizers_make_of_a_character(parts: dict[str, Any], growth: float) -> None:
    assert read_bounds(made(**parts)) == (growth, ())


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"normalizer": normalizers.Replace("a", "b" * 1000)}, "a normalizer that makes 1000 characters of one"),
        ({"normalizer": normalizers.Replace(Regex("(a+)+b"), "")}, "normalizer Replace"),
        ({"pre_tokenizer": pre_tokenizers.Split(Regex("(a+)+b"), "isolated")}, r"the pattern '\(a\+\)\+b'"),
        ({"model": models.BPE(continuing_subword_prefix="#" * 100)}, "a continuing_subword_prefix of 100"),
        (
            {"model": models.WordPiece({"[UNK]": 0}, unk_token="[UNK]", max_input_chars_per_word=10**9)},
            "words of 1000000000 characters",
        ),
        (
            {"post_processor": processors.TemplateProcessing("$A $A $A", special_tokens=[])},
            "a post-processor that adds",
        ),
    ],
)
def test_what_is_unbounded_is_named(parts: dict[str, Any], reason: str) -> None:
    bounds = read_bounds(made(**parts))
    assert bounds.growth <= MAX_GROWTH
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(", ".join(bounds.unbounded))


@pytest.mark.parametrize(
    "decoder", [decoders.Replace(Regex("(a+)+b"), ""), decoders.Sequence([decoders.Replace("a", "b" * 1000)])]
)
def test_a_decoder_without_bounds_is_refused(decoder: Any) -> None:
    with pytest.raises(InvalidArgument, match="of its decoder"):
        read_bounds(made(decoder=decoder))


def test_the_demo_models_are_bounded(root: Path) -> None:
    for path in root.glob("examples/**/tokenizer.json"):
        assert read_bounds(Tokenizer.from_str(json.dumps(json.loads(path.read_text())))).unbounded == ()
