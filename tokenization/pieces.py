"""What a single token writes: its text, and its bytes where these are no whole character.

Knows nothing of neighbours; a text of many tokens is the detokenizer's business.
"""

import re
from typing import NamedTuple

import tokenizers

_HALF = "\ufffd"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Piece(NamedTuple):
    """A token's text, in which half a character shows as U+FFFD, and its bytes."""

    text: str
    data: bytes


def read_piece(backend: tokenizers.Tokenizer, token: int) -> Piece:
    """Ask the tokenizer for one token; one it does not know writes nothing."""
    once = backend.decode([token], skip_special_tokens=False)
    if _HALF in once:
        return Piece(once, _raw(backend.id_to_token(token) or once))
    # Some decoders take the space from the first token of a text: the second one shows it.
    text = backend.decode([token, token], skip_special_tokens=False)[len(once) :]
    return Piece(text, text.encode())


def _raw(name: str) -> bytes:
    """The bytes that a vocabulary's entry stands for, in either of the two customary spellings."""
    fallback = _BYTE.fullmatch(name)
    if fallback:
        return bytes([int(fallback[1], 16)])
    if all(letter in _BYTES for letter in name):
        return bytes(_BYTES[letter] for letter in name)
    return name.encode()


def _byte_letters() -> dict[str, int]:
    """Byte-level vocabularies write printable bytes as Latin-1 does, all others as the letters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    letters = {chr(0x100 + place): byte for place, byte in enumerate(others)}
    return letters | {chr(byte): byte for byte in printable}


_BYTES = _byte_letters()
