"""Builds the tokenizer that a GGUF file's metadata describes.

There are three kinds: byte-level BPE, whose word splitting the file only names, SentencePiece's BPE, which merges the
pair that makes the piece of the highest score, and Gemma 4's, which has its spaces and bytes, but merges of its own.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from ..core.errors import InvalidArgument
from .byte_level_bpe import WORD_RULES, build_byte_level
from .gguf_file import GgufFile

log = logging.getLogger(__name__)

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
"""Kinds of tokens; 1 is a normal one, 5 an unused one."""

_ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "seperator": "sep_token"}
_ROLES |= {"padding": "pad_token", "cls": "cls_token", "mask": "mask_token"}
"""The format's names of special tokens (one is misspelt) and ours."""

_MOST_CHARACTERS = 1 << 23
"""The most characters of a SentencePiece vocabulary: each place in each piece may be where it was merged."""
_SPACE = "\u2581"


class _Vocabulary(NamedTuple):
    """The tokens by their ids, and the kind of each."""

    file: GgufFile
    tokens: Sequence[str]
    kinds: Sequence[int]

    @property
    def ids(self) -> dict[str, int]:
        ids: dict[str, int] = {}
        for token, text in enumerate(self.tokens):
            ids.setdefault(text, token)
        if len(ids) < len(self.tokens):
            message = "%s: %d of its tokens are in the vocabulary twice; text becomes the first of them"
            log.warning(message, self.file.path, len(self.tokens) - len(ids))
        return ids

    def of_kind(self, kind: int) -> list[str]:
        return [text for text, token_kind in zip(self.tokens, self.kinds, strict=True) if token_kind == kind]


def read_gguf_tokenizer(file: GgufFile) -> tuple[Tokenizer, dict[str, str]]:
    """The file's tokenizer, and its special tokens by role, such as `bos_token`. Raises `InvalidArgument` if it has
    none, or one that is unsupported or broken."""
    model = file.text("tokenizer.ggml.model", "none")
    build = _KINDS.get(model)
    if build is None:
        problem = (
            "it has no tokenizer"
            if model == "none"
            else f"its tokenizer {model!r} is not supported; {', '.join(_KINDS)} are"
        )
        raise file.error(f"{problem}: --tokenizer names a checkpoint that has one")
    tokens = file.strings("tokenizer.ggml.tokens")
    kinds = file.numbers("tokenizer.ggml.token_type").tolist() if "tokenizer.ggml.token_type" in file.metadata else []
    if len(kinds) not in (0, len(tokens)):
        raise file.error(f"tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens")
    vocabulary = _Vocabulary(file, tokens, kinds or [1] * len(tokens))
    special_tokens = _named_tokens(file, tokens)
    try:
        tokenizer, begins = build(vocabulary, special_tokens)
        _add_special_tokens(tokenizer, vocabulary, special_tokens)
        _add_ends(tokenizer, file, special_tokens, begins)
    except InvalidArgument:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise file.error(f"its tokenizer can't be built: {error}") from error
    return tokenizer, special_tokens


def _named_tokens(file: GgufFile, tokens: Sequence[str]) -> dict[str, str]:
    special_tokens = {}
    for theirs, ours in _ROLES.items():
        key = f"tokenizer.ggml.{theirs}_token_id"
        if key in file.metadata:
            token = file.number(key)
            if not 0 <= token < len(tokens):
                raise file.error(f"{key} is {token}, but there are {len(tokens)} tokens")
            special_tokens[ours] = tokens[token]
    return special_tokens


def _byte_level(vocabulary: _Vocabulary, special_tokens: Mapping[str, str]) -> tuple[Tokenizer, bool]:
    file = vocabulary.file
    name = file.text("tokenizer.ggml.pre", "")
    rule = WORD_RULES.get(name)
    if rule is None:
        problem = f"its pre-tokenizer {name!r} is not supported (supported: {', '.join(WORD_RULES)})"
        raise file.error(
            f"{problem if name else 'it does not name its pre-tokenizer'}; --tokenizer names another checkpoint"
        )
    return build_byte_level(vocabulary.ids, _merges(file), rule), rule.begins


def _merges(file: GgufFile) -> list[tuple[str, str]]:
    return [_pair(merge) for merge in file.strings("tokenizer.ggml.merges")]


def _pair(merge: str) -> tuple[str, str]:
    first, _, second = merge[1:].partition(" ")  # a space is no letter of theirs, but for the first
    return merge[:1] + first, second


def _sentencepiece(vocabulary: _Vocabulary, special_tokens: Mapping[str, str]) -> tuple[Tokenizer, bool]:
    file = vocabulary.file
    scores = file.numbers("tokenizer.ggml.scores").tolist()
    size = len(vocabulary.tokens)
    if len(scores) != size:
        raise file.error(f"tokenizer.ggml.scores has {len(scores)} entries for {size} tokens")
    if sum(map(len, vocabulary.tokens)) > _MOST_CHARACTERS:
        raise file.error(f"its vocabulary has more than {_MOST_CHARACTERS} characters")
    ids = vocabulary.ids
    pieces = [
        (-score, text)
        for text, score, kind in zip(vocabulary.tokens, scores, vocabulary.kinds, strict=True)
        if kind not in (_UNKNOWN, _CONTROL, _BYTE)
    ]
    pieces.sort(key=lambda piece: piece[0])
    merges = [
        (text[:at], text[at:])
        for _, text in pieces
        for at in range(1, len(text))
        if text[:at] in ids and text[at:] in ids
    ]
    prefixed = file.flag("tokenizer.ggml.add_space_prefix", True)
    return _of_pieces(vocabulary, special_tokens, merges, prefixed), True


def _gemma4(vocabulary: _Vocabulary, special_tokens: Mapping[str, str]) -> tuple[Tokenizer, bool]:
    return _of_pieces(vocabulary, special_tokens, _merges(vocabulary.file), prefixed=False), True


def _of_pieces(
    vocabulary: _Vocabulary, special_tokens: Mapping[str, str], merges: list[tuple[str, str]], prefixed: bool
) -> Tokenizer:
    """BPE of a whole text whose spaces are letters, `prefixed` with one; letters in no piece become bytes."""
    unknown = special_tokens.get("unk_token") or next(iter(vocabulary.of_kind(_UNKNOWN)), None)
    tokenizer = Tokenizer(models.BPE(vocabulary.ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefixed else spaces
    parts: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefixed else parts)
    return tokenizer


_KINDS = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _gemma4}
"""tokenizer.ggml.model -> what builds its tokenizer, and says whether a text begins with bos."""


def _add_special_tokens(tokenizer: Tokenizer, vocabulary: _Vocabulary, special_tokens: Mapping[str, str]) -> None:
    own = vocabulary.of_kind(_USER_DEFINED)
    if isinstance(tokenizer.normalizer, normalizers.Sequence):  # a prefix would become part of each: these are merged
        own = [text for text in own if _SPACE not in text]
    tokenizer.add_tokens([AddedToken(text, normalized=_SPACE in text) for text in own if text])
    special = dict.fromkeys([*vocabulary.of_kind(_CONTROL), *vocabulary.of_kind(_UNKNOWN), *special_tokens.values()])
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special if text])


def _add_ends(tokenizer: Tokenizer, file: GgufFile, special_tokens: Mapping[str, str], begins: bool) -> None:
    """Put bos before a text and eos after it, as the file says."""
    bos, eos = special_tokens.get("bos_token"), special_tokens.get("eos_token")
    bos = bos if file.flag("tokenizer.ggml.add_bos_token", begins) else None
    eos = eos if file.flag("tokenizer.ggml.add_eos_token", False) else None
    around = [(text, tokenizer.token_to_id(text)) for text in (bos, eos) if text]
    if around:
        single = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=around)


_ENDS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<turn|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "<｜end▁of▁sentence｜>",
)
"""Tokens that end an answer. A file names one or two, and checkpoints have more."""

_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
_SAMPLING |= {"penalty_repeat": "repetition_penalty"}


def read_gguf_generation(file: GgufFile, added: Mapping[str, int]) -> dict[str, Any]:
    """The fields of generation_config.json that the file has; `added` is the ids of tokens that are no part of text.
    Raises `InvalidArgument` for a token that is no number."""
    keys = [f"tokenizer.ggml.{role}_token_id" for role in ("eos", "eot", "eom")]
    declared = [file.number(key) for key in keys if key in file.metadata]
    ends = dict.fromkeys([*declared, *(added[text] for text in _ENDS if text in added)])
    sampling = {ours: file.metadata.get(f"general.sampling.{theirs}") for theirs, ours in _SAMPLING.items()}
    unsupported = [
        key for key in file.metadata if key.startswith("general.sampling.") and key.split(".")[-1] not in _SAMPLING
    ]
    if unsupported:
        log.warning("%s: its own defaults of sampling are not applied: %s", file.path, ", ".join(sorted(unsupported)))
    return {"eos_token_id": list(ends)} | {name: value for name, value in sampling.items() if value is not None}
