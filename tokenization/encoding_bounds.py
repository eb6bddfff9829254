"""Judges by a tokenizer's parts whether encoding takes bounded time and memory for each character.

A normaliser may write much for each letter, and a regular expression may backtrack. Parts that are not known to be
harmless run in a process that may be killed (`bounded_encoder.py`).
"""

import base64
import json
import re
from collections.abc import Iterator, Mapping
from math import inf, prod
from typing import Any, NamedTuple

import tokenizers

from ..core.errors import InvalidArgument
from .byte_level_bpe import published_patterns

MAX_GROWTH = 64
"""The most characters that a bounded tokenizer makes of one. Unicode's compatibility forms make 18."""

_LONGEST_PATTERN = 4096
_MOST_WAYS = 256
_LONGEST_AFFIX = 64
_LONGEST_WORD = 1024
_MOST_ADDED = 1024
_COMPATIBLE, _CANONICAL, _LOWERED, _BERT = 18, 4, 3, 12
_GROWTH = {
    **dict.fromkeys(("NFKC", "NFKD"), _COMPATIBLE),
    **dict.fromkeys(("NFC", "NFD"), _CANONICAL),
    **dict.fromkeys(("Lowercase", "Uppercase"), _LOWERED),
    **dict.fromkeys(("StripAccents", "Strip", "Nmt"), 1),
    "BertNormalizer": _BERT,  # blanks around it, and the parts of an accented letter
    "ByteLevel": 4,
}
"""The most characters that a normaliser makes of one, by its type."""

_CLASS = r"\[\^?(?:\\.|\[:\^?\w+:\]|&&|[^\[\]\\])+\]"
_ITEM = rf"(?:{_CLASS}|\\[pP]\{{\^?\w+\}}|\\[^\dA-Zgk]|\\[DSWHN]|[^\\\[\](){{}}|*+?^$])"
_SIMPLE = re.compile(rf"(?:{_ITEM}(?:\?|\{{\d(?:,\d)?\}})?)*(?:{_ITEM}(?:[*+]|\{{\d,\}}))?")
_FIXED = re.compile(rf"(?:{_ITEM}|\((?:\?(?::|i:|<?[=!]))?(?:{_ITEM}|\|)*\))*")
"""Alternatives of a few characters each, between lookarounds, without repetition."""
_WAYS = re.compile(r"\?|\{\d(?:,(\d))?\}")


class EncodingBounds(NamedTuple):
    growth: float = 1.0
    """The most characters that one of a text becomes."""
    unbounded: tuple[str, ...] = ()
    """The parts that are not known to be harmless, described for people."""


def read_bounds(backend: tokenizers.Tokenizer) -> EncodingBounds:
    """The bounds of a tokenizer. Raises `InvalidArgument` for a decoder without bounds, since decoding runs in the
    event loop for each token."""
    normalizers = [*_parts(backend.normalizer, "normalizers")]
    growths = [_growth(part) for part in normalizers]
    growth = prod(growths)
    unbounded = [
        f"normalizer {_type(part)}" for part, factor in zip(normalizers, growths, strict=True) if factor == inf
    ]
    if not unbounded and growth > MAX_GROWTH:
        unbounded.append(f"a normalizer that makes {growth:g} characters of one, more than {MAX_GROWTH}")
    patterns = filter(None, map(_regex, _parts(backend.pre_tokenizer, "pretokenizers")))
    unbounded += [
        f"the pattern {pattern[:128]!r} of its pre-tokenizer" for pattern in patterns if not is_harmless(pattern)
    ]
    unbounded += _model_risks(backend.model)
    if sum(_added_by(part) for part in _parts(backend.post_processor, "processors")) > _MOST_ADDED:
        unbounded.append(f"a post-processor that adds more than {_MOST_ADDED} tokens")
    _check_decoder(backend)
    return EncodingBounds(min(growth, MAX_GROWTH), tuple(unbounded))


def _state(part: Any) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(part.__getstate__())
    return state


def _parts(part: Any, inside: str) -> Iterator[dict[str, Any]]:
    """The parts that work one after the other, by their fields in tokenizer.json; `inside` is where a sequence has its
    own."""
    waiting = [] if part is None else [_state(part)]
    while waiting:
        state = waiting.pop(0)
        if state.get("type") == "Sequence":
            waiting = [*state.get(inside, ()), *waiting]
        else:
            yield state


def _type(part: Mapping[str, Any]) -> str:
    return str(part.get("type"))


def _regex(part: Mapping[str, Any]) -> str | None:
    pattern = part.get("pattern")
    return str(pattern["Regex"]) if isinstance(pattern, dict) and "Regex" in pattern else None


def _growth(normalizer: Mapping[str, Any]) -> float:
    match normalizer:
        case {"type": "Replace", "content": str(content)}:
            pattern = _regex(normalizer)
            if pattern is not None:
                return 1 + len(content) if is_harmless(pattern) else inf
            replaced = len(normalizer["pattern"].get("String", ""))
            return max(1.0, len(content) / replaced) if replaced else 1 + len(content)
        case {"type": "Prepend", "prepend": str(prefix)}:  # to each piece between added tokens
            return 1 + len(prefix)
        case {"type": "Precompiled", "precompiled_charsmap": str(encoded)}:
            return _longest_replacement(base64.b64decode(encoded))
    return _GROWTH.get(_type(normalizer), inf)


def _longest_replacement(charsmap: bytes) -> float:
    """The length of the longest text in SentencePiece's compiled map: the size of its trie in 4 bytes, the trie, and
    zero-terminated texts."""
    texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :]
    return max((len(text.decode(errors="replace")) for text in texts.split(b"\0")), default=1) or 1


def _model_risks(model: Any) -> Iterator[str]:
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        affix = getattr(model, name, None)
        if isinstance(affix, str) and len(affix) > _LONGEST_AFFIX:
            yield f"a {name} of {len(affix)} characters"
    longest = getattr(model, "max_input_chars_per_word", 0)
    if longest > _LONGEST_WORD:
        yield f"words of {longest} characters (max_input_chars_per_word)"


def _added_by(processor: Mapping[str, Any]) -> int:
    """The tokens that a template puts around a text; a repeated text exceeds any limit."""
    if _type(processor) != "TemplateProcessing":
        return 0
    special = {name: len(token.get("ids", ())) for name, token in (processor.get("special_tokens") or {}).items()}
    added = 0
    for form in ("single", "pair"):
        pieces = processor.get(form) or ()
        names = [piece["SpecialToken"]["id"] for piece in pieces if "SpecialToken" in piece]
        added += sum(special.get(name, 1) for name in names)
        texts = [piece["Sequence"]["id"] for piece in pieces if "Sequence" in piece]
        added += _MOST_ADDED * (len(texts) - len(set(texts))) * 2
    return added


def _check_decoder(backend: tokenizers.Tokenizer) -> None:
    for part in _parts(backend.decoder, "decoders"):
        pattern = _regex(part)
        if pattern is not None and not is_harmless(pattern):
            raise InvalidArgument(
                f"the pattern {pattern[:128]!r} of its decoder is not supported: it may take too long"
            )
        for name, value in part.items():
            if isinstance(value, str) and name != "type" and len(value) > MAX_GROWTH:
                raise InvalidArgument(
                    f"{name} of its decoder {_type(part)} has {len(value)} characters, and may have {MAX_GROWTH}"
                )


def is_harmless(pattern: str) -> bool:
    """Whether a regular expression is known to find all matches in linear time: each alternative is one that published
    checkpoints have, or a few characters, the last of which may repeat."""
    if len(pattern) > _LONGEST_PATTERN:
        return False
    parts = _alternatives(pattern)
    harmless = (part in _HARMLESS or _BESIDE.get(part) in parts or _is_simple(part) for part in parts)
    return pattern in published_patterns() or all(harmless)


def _is_simple(part: str) -> bool:
    if _FIXED.fullmatch(part):
        return True
    group = re.fullmatch(r"\((?:\?i:|\?:)?(.*)\)\??", part)
    if group is not None:
        return all(_is_simple(inner) and not inner.endswith(("*", "+", ",}")) for inner in _alternatives(group[1]))
    ways = prod(int(match[1] or 0) + 2 for match in _WAYS.finditer(part))
    return ways <= _MOST_WAYS and _SIMPLE.fullmatch(part) is not None


def _alternatives(pattern: str) -> list[str]:
    """The alternatives of a pattern, except those within groups and classes."""
    parts = []
    depth = start = at = 0
    in_class = False
    while at < len(pattern):
        letter = pattern[at]
        if letter == "\\":
            at += 1
        elif in_class:
            in_class = letter != "]"
        elif letter == "[":
            in_class = True
        elif letter in "()":
            depth += 1 if letter == "(" else -1
        elif letter == "|" and not depth:
            parts.append(pattern[start:at])
            start = at + 1
        at += 1
    return [*parts, pattern[start:]]


_BLANKS = r"\s+"
_BESIDE = dict.fromkeys((r"\s*[\r\n]+", r"\s*[\r\n]", r"\s*\n+"), _BLANKS)
"""An alternative, and the one that must be beside it: it consumes what the first gives up after backtracking, which
would be tried again from each of its characters."""
_HARMLESS = frozenset(
    (
        r"\s+(?!\S)",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r" ?[^\s\p{L}\p{N}]++[\r\n]*",
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
        r" ?[\p{P}\p{S}]+[\r\n]*",
        r"[^\r\n\p{L}\p{N}]?+\p{L}+",
    )
)
"""Alternatives of checkpoints on the hub that end in something other than their repetition and cannot fail there."""
