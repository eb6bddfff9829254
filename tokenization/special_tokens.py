"""A checkpoint's special tokens, as transformers would read them from its files."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from .checkpoint_files import read_json

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def named_special_tokens(directory: Path) -> dict[str, str]:
    """The special tokens that have a role: its name, such as `bos_token` -> their text."""
    files = (read_json(directory / "special_tokens_map.json"), read_json(directory / "tokenizer_config.json"))
    merged = {name: content[name] for content in files for name in NAMES if content.get(name) is not None}
    return {name: _text(token) for name, token in merged.items()}


def add_declared_tokens(tokenizer: Tokenizer, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Add the special tokens that tokenizer_config.json (`config`) declares to a bare tokenizer.

    `add_bos_token` and its like go unread: beside a tokenizer.json, whose post-processor decides, transformers too
    ignores them.
    """
    tokenizer.add_tokens([_added(token) for token in _declared(config) if tokenizer.token_to_id(_text(token)) is None])
    special = [*named.values(), *_extra(config)]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])


def _declared(config: Mapping[str, Any]) -> Iterator[Any]:
    by_id = config.get("added_tokens_decoder") or {}
    return (by_id[token_id] for token_id in sorted(by_id, key=int))


def _extra(config: Mapping[str, Any]) -> Iterator[str]:
    for key in ("additional_special_tokens", "extra_special_tokens"):
        tokens = config.get(key) or []
        yield from (_text(token) for token in (tokens.values() if isinstance(tokens, dict) else tokens))


def _added(token: Any) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, special=True)
    flags = {flag: bool(token[flag]) for flag in ("lstrip", "rstrip", "single_word", "normalized") if flag in token}
    return AddedToken(token["content"], special=bool(token.get("special", False)), **flags)


def _text(token: Any) -> str:
    return token if isinstance(token, str) else str(token["content"])
