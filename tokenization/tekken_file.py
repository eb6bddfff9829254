"""Reads tekken.json, Mistral's own form of a tokenizer: byte-level BPE that merges by the ranks of tokens, whose ids
come behind those of special tokens (mistral-common's `Tekkenizer`)."""

from collections.abc import Mapping
from pathlib import Path

import msgspec
from tokenizers import AddedToken, Tokenizer, processors

from ..core.errors import InvalidArgument
from ..core.regular_files import read_regular
from .byte_level_bpe import LETTER_BYTES, WORD_RULES, build_byte_level
from .checkpoint_files import refuse_lfs_pointer

TEKKEN_FILE = "tekken.json"

_LARGEST_FILE, _MOST_TOKENS, _MOST_SPECIAL, _LONGEST_TOKEN, _MOST_MERGES = 1 << 26, 400_000, 1 << 14, 1 << 10, 1 << 21
"""The limits of the file: bytes, tokens, special ones, bytes of a token, and pairs that make tokens. Those published
have 20 MB, 150,000 tokens and 1,000 special ones."""
_LETTERS = {byte: letter for letter, byte in LETTER_BYTES.items()}
_ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_UNNAMED = ("v3", "v7")
"""Versions whose files need not name their special tokens, which are these."""
_USUAL_SPECIAL_TOKENS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)


class _RankedToken(msgspec.Struct):
    rank: int
    token_bytes: bytes


class _SpecialToken(msgspec.Struct):
    rank: int
    token_str: str


class _TekkenConfig(msgspec.Struct):
    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int
    version: str


class Tekken(msgspec.Struct):
    """What of the file is used."""

    config: _TekkenConfig
    vocab: list[_RankedToken]
    special_tokens: list[_SpecialToken] | None = None

    @property
    def special(self) -> list[str]:
        """The special tokens by their ids. Raises `ValueError`."""
        count, version = self.config.default_num_special_tokens, self.config.version
        if count > _MOST_SPECIAL:
            raise ValueError(f"it has {count} special tokens, and may have {_MOST_SPECIAL}")
        named = dict(enumerate(_USUAL_SPECIAL_TOKENS)) if self.special_tokens is None else {}
        if self.special_tokens is None and version not in _UNNAMED:
            raise ValueError(f"it is of version {version}, and names no special tokens")
        named |= {token.rank: token.token_str for token in self.special_tokens or ()}
        if any(not 0 <= rank < count for rank in named):
            raise ValueError(f"a special token is none of the first {count} tokens")
        return [named.get(rank, f"<SPECIAL_{rank}>") for rank in range(count)]


def read_tekken_file(directory: Path) -> Tekken:
    """Raises `InvalidArgument` for a file that cannot be read."""
    path = directory / TEKKEN_FILE
    refuse_lfs_pointer(path)
    try:
        file = msgspec.json.decode(read_regular(path, _LARGEST_FILE), type=Tekken)
        _ = file.special
    except (OSError, ValueError, RecursionError, InvalidArgument) as error:
        raise InvalidArgument(f"{path} cannot be read: {error}") from error
    return file


def read_tekken(directory: Path) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer, which begins a text with `<s>`, and its special tokens by role. Raises `InvalidArgument`."""
    file = read_tekken_file(directory)
    try:
        special = file.special
        ranks = _ranks(file, len(special))
        letters = {token: "".join(map(_LETTERS.__getitem__, token)) for token in ranks}
        ids = {text: number for number, text in enumerate(special)}
        ids |= {letters[token]: len(special) + rank for token, rank in ranks.items()}
        if len(ids) != len(special) + len(ranks):
            raise ValueError("two of its tokens are the same")
        rule = WORD_RULES["tekken"]._replace(patterns=(file.config.pattern,))
        tokenizer = build_byte_level(ids, _merges(ranks, letters), rule)
        tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special if text])
    except Exception as error:  # the library raises nothing narrower
        raise InvalidArgument(f"{directory / TEKKEN_FILE} cannot be read: {error}") from error
    roles = {role: text for role, text in _ROLES.items() if text in special}
    if begin := roles.get("bos_token"):
        around = [(begin, ids[begin])]
        tokenizer.post_processor = processors.TemplateProcessing(single=[begin, "$A"], special_tokens=around)
    return tokenizer, roles


def _ranks(file: Tekken, special: int) -> dict[bytes, int]:
    """The rank of each token of text; those that a vocabulary of the stated size has no room for are left out."""
    size = file.config.default_vocab_size - special
    if not 256 <= size <= min(_MOST_TOKENS, len(file.vocab)):
        message = f"of its {len(file.vocab)} tokens of text {size} are to be used; it may be 256 to {_MOST_TOKENS}"
        raise ValueError(message)
    ranks = {token.token_bytes: token.rank for token in file.vocab if token.rank < size}
    if sorted(ranks.values()) != list(range(size)):
        raise ValueError(f"its tokens must have the ranks from 0 to {size - 1}")
    if max(map(len, ranks)) > _LONGEST_TOKEN:
        raise ValueError(f"it has a token of more than {_LONGEST_TOKEN} bytes")
    return ranks


def _merges(ranks: Mapping[bytes, int], letters: Mapping[bytes, str]) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token, by its rank: where tokens are merged by rank, any of them may."""
    merges: list[tuple[str, str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [
            (ranks[first], ranks[second], first, second)
            for at in range(1, len(token))
            if (first := token[:at]) in ranks and (second := token[at:]) in ranks
        ]
        merges += [(letters[first], letters[second]) for *_, first, second in sorted(pairs)]
        if len(merges) > _MOST_MERGES:
            raise ValueError(f"more than {_MOST_MERGES} pairs of its tokens make one")
    return merges
