"""The text of single tokens, and their bytes where these are no whole character.

A text of many tokens is the detokenizer's business.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

import tokenizers

_HALF = "\ufffd"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(0x100) if byte not in _PRINTABLE]
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + place): byte for place, byte in enumerate(_OTHERS)}
"""Letter -> byte of byte-level vocabularies: printable bytes are Latin-1, all others stand from letter 256 on."""


class TokenPiece(NamedTuple):
    """A token's text, in which half a character shows as U+FFFD, and its bytes."""

    text: str
    data: bytes


def read_token_piece(backend: tokenizers.Tokenizer, token: int) -> TokenPiece:
    """The piece of one token; an unknown one has no text."""
    once = backend.decode([token], skip_special_tokens=False)
    if _HALF in once:
        return TokenPiece(once, _raw(backend.id_to_token(token) or once))
    # Some decoders take the space from the first token of a text: the second one shows it.
    text = backend.decode([token, token], skip_special_tokens=False)[len(once) :]
    return TokenPiece(text, text.encode())


class TokenBytes(dict[int, bytes]):
    """The bytes that each token of a byte-level vocabulary adds to a text: none for tokens that decoding leaves out,
    and for those that are `hidden`."""

    def __init__(self, backend: tokenizers.Tokenizer, hidden: Iterable[int] = ()) -> None:
        super().__init__(dict.fromkeys(hidden, b""))
        self._backend = backend

    def __missing__(self, token: int) -> bytes:
        name = self._backend.id_to_token(token)
        data = self[token] = b"" if name is None else _letters(name)
        return data


def _raw(name: str) -> bytes:
    """The bytes of a vocabulary's entry, in either of the two customary spellings."""
    fallback = _BYTE.fullmatch(name)
    return bytes([int(fallback[1], 16)]) if fallback else _letters(name)


def _letters(name: str) -> bytes:
    """The bytes of an entry that has a letter for each byte; an added token may be spelt otherwise and stands for
    itself."""
    try:
        return bytes([_BYTES[letter] for letter in name])
    except KeyError:
        return name.encode()
