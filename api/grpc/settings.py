"""The settings of the gRPC endpoint, its TLS files read and checked before any model is loaded.

Free of grpc, which takes its time to import.
"""

import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ...core.errors import InvalidArgument
from ..tls import KeyPair, check_key_pair


class TlsFiles(NamedTuple):
    """The contents of PEM files. `root`: certificates that may sign a client's; `mutual`: a client must have one."""

    key: bytes
    certificate: bytes
    root: bytes | None
    mutual: bool


class GrpcSettings(NamedTuple):
    """`compression` of responses: none, low, medium or high. `channel_options`: grpc's, by its names."""

    address: str
    tls: TlsFiles | None = None
    compression: str = "none"
    channel_options: Sequence[tuple[str, int]] = ()


def load_tls_files(certificate: Path | None, key: Path | None, root: Path | None, mutual: bool) -> TlsFiles:
    """Raises `InvalidArgument` for a file that is missing, unreadable or not what it should be, naming its flag."""
    certificate_bytes, key_bytes = _read(certificate, "--grpc-server-cert"), _read(key, "--grpc-server-key")
    assert certificate is not None
    assert key is not None
    # grpc would only log that it cannot use them, and refuse every client.
    check_key_pair(KeyPair(certificate, key), "--grpc-server")
    root_bytes = None
    if mutual or root is not None:
        root_bytes = _read(root, "--grpc-root-cert")
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=root)
        except (ssl.SSLError, OSError) as error:
            raise InvalidArgument(f"--grpc-root-cert holds no certificate: {error}") from None
    return TlsFiles(key_bytes, certificate_bytes, root_bytes, mutual)


def _read(path: Path | None, flag: str) -> bytes:
    if path is None:
        raise InvalidArgument(f"TLS on gRPC needs {flag}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"cannot read {flag} {path}: {error.strerror}") from None
