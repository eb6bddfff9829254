"""A server's certificate and its key, checked before anything listens. Knows no server."""

import ssl
from pathlib import Path
from typing import NamedTuple

from ..core.errors import InvalidArgument


class KeyPair(NamedTuple):
    """The PEM files of a certificate and its private key."""

    certificate: Path
    key: Path


def parse_key_pair(certificate: Path | None, key: Path | None, prefix: str) -> KeyPair | None:
    """The pair, or None where neither is given; `prefix` of the flags names them in messages.

    Raises:
        InvalidArgument: one is missing, unreadable, or they do not belong together.
    """
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise InvalidArgument(f"TLS needs both {prefix}-cert and {prefix}-key")
    check_key_pair(KeyPair(certificate, key), prefix)
    return KeyPair(certificate, key)


def check_key_pair(pair: KeyPair, prefix: str) -> None:
    """Raises `InvalidArgument` for files that are not a certificate and its key."""
    try:
        # A password that is needed and not there must be an error, not a question on the terminal.
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(*pair, password="")
    except (ssl.SSLError, OSError) as error:
        text = f"{prefix}-cert and {prefix}-key are not a certificate and its key: {error}"
        raise InvalidArgument(text) from None
