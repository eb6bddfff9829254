"""Reads tokenizer.json, with the special tokens that a checkpoint's other files declare, as transformers would."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Tokenizer

from ..core.errors import InvalidArgument, NotFound
from .checkpoint_files import read_json, refuse_lfs_pointer
from .gguf_file import read_gguf
from .gguf_tokenizer import read_gguf_tokenizer

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_tokenizer(checkpoint: Path) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer of a checkpoint, or of a file in GGUF: see `read_tokenizer_json` and `read_gguf_tokenizer`."""
    return read_gguf_tokenizer(read_gguf(checkpoint)) if checkpoint.is_file() else read_tokenizer_json(checkpoint)


def read_tokenizer_json(directory: Path) -> tuple[Tokenizer, dict[str, str]]:
    """A checkpoint's tokenizer, and its special tokens that have a role: a name such as `bos_token` -> the text.

    Raises `NotFound` if there is no tokenizer.json, `InvalidArgument` if a file cannot be read.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise NotFound(f"{directory} has no tokenizer.json, the only tokenizer format supported")
    refuse_lfs_pointer(path)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise InvalidArgument(f"{path} cannot be read: {error}") from error
    config = read_json(directory / "tokenizer_config.json")
    files = read_json(directory / "special_tokens_map.json"), config
    named = {name: _text(file[name]) for file in files for name in ROLES if file.get(name) is not None}
    _add_declared_tokens(tokenizer, config, named)
    return tokenizer, named


def _add_declared_tokens(tokenizer: Tokenizer, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    # `add_bos_token` and its like go unread: beside a tokenizer.json, whose post-processor decides, transformers too
    # ignores them.
    by_id = config.get("added_tokens_decoder") or {}
    declared = [by_id[token_id] for token_id in sorted(by_id, key=int)]
    tokenizer.add_tokens([_added(token) for token in declared if tokenizer.token_to_id(_text(token)) is None])
    special = [*named.values()]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        tokens = config.get(key) or []
        special += [_text(token) for token in (tokens.values() if isinstance(tokens, dict) else tokens)]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])


def _added(token: Any) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, special=True)
    flags = {flag: bool(token[flag]) for flag in ("lstrip", "rstrip", "single_word", "normalized") if flag in token}
    return AddedToken(token["content"], special=bool(token.get("special", False)), **flags)


def _text(token: Any) -> str:
    return token if isinstance(token, str) else str(token["content"])


class EncodedText(NamedTuple):
    """The tokens of one text or pair; `segments` tells the two of a pair apart, as BERT's models want it."""

    ids: Sequence[int]
    segments: Sequence[int]


class EncoderTokenizer:
    """A checkpoint's tokenizer.json, cutting what is longer than `length` tokens, special ones included. Of a pair, the
    longer one is cut first. Thread-safe."""

    def __init__(self, backend: tokenizers.Tokenizer, length: int, lowercase: bool = False) -> None:
        self._backend = backend
        self._lowercase = lowercase
        backend.no_padding()
        backend.enable_truncation(length, strategy="longest_first")

    @classmethod
    def load(cls, directory: Path, length: int, lowercase: bool = False) -> "EncoderTokenizer":
        """Read a checkpoint directory; raises as `read_tokenizer_json` does."""
        backend, _ = read_tokenizer_json(directory)
        return cls(backend, length, lowercase)

    def encode(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> list[EncodedText]:
        """The tokens of each text, or of each text and the one in the same place of `pairs`.

        Raises `InvalidArgument` if one is not Unicode.
        """
        if self._lowercase:
            texts = [text.lower() for text in texts]
            pairs = pairs and [text.lower() for text in pairs]
        given = list(texts) if pairs is None else list(zip(texts, pairs, strict=True))
        try:
            made = self._backend.encode_batch(given)
        except (UnicodeEncodeError, TypeError) as error:  # lone surrogates
            raise InvalidArgument("a text is not valid Unicode", field="input") from error
        return [EncodedText(each.ids, each.type_ids) for each in made]
