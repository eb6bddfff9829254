"""Reads tokenizer.json, or what stands in its place, with the special tokens that a checkpoint's other files declare,
as transformers would."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from tokenizers import AddedToken, Tokenizer

from ..core.errors import Internal, InvalidArgument, NotFound, shorten
from ..core.native_calls import NativeCall
from ..core.regular_files import count_bytes, read_regular
from .bounded_encoder import BoundedEncoder, EncodedText, EncoderInput
from .byte_level_bpe import WORD_RULES, build_byte_level
from .checkpoint_files import read_json, refuse_lfs_pointer
from .gguf_file import read_gguf
from .gguf_tokenizer import read_gguf_tokenizer
from .tekken_file import TEKKEN_FILE, read_tekken

_LARGEST_FILE, _MOST_ENTRIES, _MOST_ADDED = 1 << 26, 700_000, 1 << 14
"""The limits of a tokenizer.json: bytes, tokens or merges, and added tokens. The largest published has 33 MB, 262,144
tokens and 515,000 merges, and 6,400 added tokens."""
_QWEN_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
_ADDED_TOKEN = b'"single_word"'

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_tokenizer(checkpoint: Path) -> tuple[Tokenizer, dict[str, str]]:
    return read_gguf_tokenizer(read_gguf(checkpoint)) if checkpoint.is_file() else read_tokenizer_json(checkpoint)


def read_tokenizer_json(directory: Path) -> tuple[Tokenizer, dict[str, str]]:
    """A checkpoint's tokenizer, and its special tokens by role, such as `bos_token`: of its tokenizer.json, or of what
    stands in its place. Raises `NotFound` if there is neither, `InvalidArgument` if a file cannot be read."""
    path = directory / "tokenizer.json"
    read = _read_file(path) if path.is_file() else None
    config = read_json(directory / "tokenizer_config.json")
    tokenizer, usual = (read, {}) if read is not None else _read_other(directory, config)
    special_tokens = usual | read_special_tokens(directory)
    where = directory / "tokenizer_config.json"
    by_role = [(token, "") for token in usual.values()] + [*_tokens_by_role(directory).values()]
    try:
        with NativeCall("the library failed"):
            _add_declared_tokens(tokenizer, config, by_role, f"{where}: ")
    except (TypeError, ValueError, OverflowError, Internal) as error:
        raise InvalidArgument(f"{where}: its added tokens cannot be read: {error}") from error
    if read is None:
        _check_numbers(tokenizer, config, f"{where}: added_tokens_decoder")
    return tokenizer, special_tokens


def _read_file(path: Path) -> Tokenizer:
    refuse_lfs_pointer(path)
    try:
        _check_size(path)
        with NativeCall("the library failed"):
            return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise InvalidArgument(f"{path} cannot be read: {error}") from error


def _read_other(directory: Path, config: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer of a directory without tokenizer.json, without the tokens that other files add."""
    if (directory / TEKKEN_FILE).is_file():
        return read_tekken(directory)
    if config.get("tokenizer_class") in _QWEN_CLASSES and (directory / "vocab.json").is_file():
        return _read_qwen(directory), {}
    others = f"{TEKKEN_FILE}, and vocab.json with merges.txt of {_QWEN_CLASSES[0]}"
    raise NotFound(f"{directory} has no tokenizer.json; of others {others} are read")


def _read_qwen(directory: Path) -> Tokenizer:
    """The tokenizer that Qwen's vocab.json and merges.txt mean, without its added tokens."""
    try:
        ids = msgspec.json.decode(read_regular(directory / "vocab.json", _LARGEST_FILE), type=dict[str, int])
        lines = read_regular(directory / "merges.txt", _LARGEST_FILE).decode().split("\n")
        merges = [(first, second) for first, space, second in (line.partition(" ") for line in lines) if space]
        merges = merges[1:] if lines[0].startswith("#version") else merges
        if max(len(ids), len(merges)) > _MOST_ENTRIES:
            raise InvalidArgument(f"it has {max(len(ids), len(merges))} tokens or merges, and may have {_MOST_ENTRIES}")
        with NativeCall("the library failed"):
            return build_byte_level(ids, merges, WORD_RULES["qwen2"])
    except Exception as error:  # the library raises nothing narrower
        raise InvalidArgument(f"{directory}: vocab.json and merges.txt cannot be read: {error}") from error


def _check_numbers(tokenizer: Tokenizer, config: Mapping[str, Any], where: str) -> None:
    """Raises `InvalidArgument` if an added token is not the one that it is said to be."""
    for number, token in (config.get("added_tokens_decoder") or {}).items():
        text = _text(token, f"{where}.{number}")
        if (own := tokenizer.token_to_id(text)) != int(number):
            raise InvalidArgument(f"{where}.{number} is {shorten(repr(text))}, which is token {own} of the vocabulary")


def read_special_tokens(directory: Path) -> dict[str, str]:
    """A checkpoint's special tokens by role, from its small files. Raises `InvalidArgument` for one that is no text."""
    return {role: _text(token, place) for role, (token, place) in _tokens_by_role(directory).items()}


def _tokens_by_role(directory: Path) -> dict[str, tuple[Any, str]]:
    """The special tokens by role, as texts or objects, each with the place where it stands."""
    tokens: dict[str, tuple[Any, str]] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        file = read_json(directory / name)
        present = (role for role in ROLES if file.get(role) is not None)
        tokens |= {role: (file[role], f"{directory / name}: {role}") for role in present}
    return tokens


def _check_size(path: Path) -> None:
    """Raises `InvalidArgument` for a file that takes the library long to read, since that holds the GIL."""
    content = read_regular(path, _LARGEST_FILE)
    if count_bytes(content, _ADDED_TOKEN) > _MOST_ADDED:
        raise InvalidArgument(f"it has more than {_MOST_ADDED} added tokens")
    # Each token of the vocabulary has a colon; a merge has a comma, or two and a bracket of its own.
    commas, colons, brackets = (count_bytes(content, mark) for mark in (b",", b":", b"["))
    merges = (commas - colons) // (2 if brackets > (commas - colons) // 4 else 1)
    for name, count in (("tokens", colons), ("merges", merges)):
        if count > _MOST_ENTRIES:
            raise InvalidArgument(f"it has about {count} {name}, and may have {_MOST_ENTRIES}")


def _add_declared_tokens(
    tokenizer: Tokenizer, config: Mapping[str, Any], by_role: Sequence[tuple[Any, str]], where: str
) -> None:
    """Add the tokens of tokenizer_config.json, and the special ones, each with its place. What a token strips beside it
    comes from added_tokens_decoder, then from the tokenizer itself, then from the object that declares it."""
    # `add_bos_token` and its like go unread: beside a tokenizer.json, whose post-processor decides, transformers too
    # ignores them.
    by_id = config.get("added_tokens_decoder") or {}
    if not isinstance(by_id, dict) or not all(number.isdecimal() and int(number) < 1 << 32 for number in by_id):
        raise InvalidArgument(f"{where}added_tokens_decoder must be an object of tokens by their ids")
    if len(by_id) > _MOST_ADDED:
        raise InvalidArgument(f"{where}added_tokens_decoder has {len(by_id)} tokens, and may have {_MOST_ADDED}")
    declared = [_added(by_id[number], f"{where}added_tokens_decoder.{number}") for number in sorted(by_id, key=int)]
    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    tokenizer.add_tokens([token for token in declared if token != known.get(token.content)])
    known |= {token.content: token for token in declared}
    special = [*by_role]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        tokens = config.get(key) or []
        if not isinstance(tokens, dict | list) or len(tokens) > _MOST_ADDED:
            raise InvalidArgument(f"{where}{key} must be a list of at most {_MOST_ADDED} tokens")
        listed = tokens.values() if isinstance(tokens, dict) else tokens
        special += [(token, f"{where}{key}") for token in listed]
    found: dict[str, AddedToken] = {}
    for token, place in special:
        text = _text(token, place)
        found[text] = known.get(text) or found.get(text) or _added(token, place, special=True)
        found[text].special = True
    tokenizer.add_special_tokens([*found.values()])


def _added(token: Any, where: str, special: bool = False) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, special=True)
    text = _text(token, where)
    flags = {flag: bool(token[flag]) for flag in ("lstrip", "rstrip", "single_word", "normalized") if flag in token}
    return AddedToken(text, special=special or bool(token.get("special", False)), **flags)


def _text(token: Any, where: str) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise InvalidArgument(f"{where} must be a text, or an object with its content, got {shorten(repr(token))}")
    return text


class EncoderTokenizer:
    """A checkpoint's tokenizer.json for encoder models. Inputs longer than `length` tokens, special ones included, are
    cut; of a pair, the longer text first. Thread-safe."""

    def __init__(
        self, backend: tokenizers.Tokenizer, length: int, lowercase: bool = False, where: str = "tokenizer.json"
    ) -> None:
        self._lowercase = lowercase
        backend.no_padding()
        backend.enable_truncation(length, strategy="longest_first")
        self._backend = backend
        self._encoder = BoundedEncoder(backend, where)

    @classmethod
    def load(
        cls, directory: Path, length: int, lowercase: bool = False, marks: Sequence[str] = ()
    ) -> "EncoderTokenizer":
        """Read a checkpoint directory, and try its tokenizer out. `marks`: texts whose first word, or which as a whole,
        are tokens even if the tokenizer would part them. Raises as `read_tokenizer_json` and `BoundedEncoder.try_out`.
        """
        backend, _ = read_tokenizer_json(directory)
        for mark in marks:
            for token in (mark, *mark.split(None, 1)[:1]):
                if token and backend.token_to_id(token) is not None:
                    backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
                    break
        tokenizer = cls(backend, length, lowercase, str(directory / "tokenizer.json"))
        tokenizer._encoder.try_out("")
        return tokenizer

    def token_id(self, token: str) -> int | None:
        """The id of a token by its text, or None."""
        return self._backend.token_to_id(token)

    def encode(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None, special: bool = True
    ) -> list[EncodedText]:
        """The tokens of each text, or of each text with the one at the same index of `pairs`, and what the model wants
        around them if `special`. Raises `InvalidArgument` if one is not Unicode, or exceeds the limits of
        `BoundedEncoder.encode`."""
        if self._lowercase:
            texts = [text.lower() for text in texts]
            pairs = pairs and [text.lower() for text in pairs]
        inputs: list[EncoderInput] = list(texts) if pairs is None else list(zip(texts, pairs, strict=True))
        try:
            return self._encoder.encode(inputs, special)
        except (UnicodeEncodeError, TypeError) as error:  # lone surrogates
            raise InvalidArgument("a text is not valid Unicode", field="input") from error
