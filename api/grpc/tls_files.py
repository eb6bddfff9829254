"""What encrypts gRPC, read and checked before anything is loaded. Free of grpc, which takes its time to import."""

import ssl
from pathlib import Path
from typing import NamedTuple

from ...cli.grpc_options import GrpcOptions
from ...core.errors import InvalidArgument
from ..tls import KeyPair, check_key_pair


class TlsFiles(NamedTuple):
    """The contents of PEM files; `root`: who may sign a client's certificate."""

    key: bytes
    certificate: bytes
    root: bytes | None


def load_tls_files(options: GrpcOptions) -> TlsFiles | None:
    """What TLS needs; None without it.

    Raises:
        InvalidArgument: a file is missing, unreadable or not what it should be; the message names the flag.
    """
    if not options.encrypted:
        return None
    certificate = _read(options.grpc_server_cert, "--grpc-server-cert")
    key = _read(options.grpc_server_key, "--grpc-server-key")
    assert options.grpc_server_cert
    assert options.grpc_server_key
    # grpc would only log that it cannot use them, and refuse every client.
    check_key_pair(KeyPair(options.grpc_server_cert, options.grpc_server_key), "--grpc-server")
    root = None
    if options.mutual or options.grpc_root_cert is not None:
        root = _read(options.grpc_root_cert, "--grpc-root-cert")
        _check_root(options)
    return TlsFiles(key, certificate, root)


def _read(path: Path | None, flag: str) -> bytes:
    if path is None:
        raise InvalidArgument(f"TLS on gRPC needs {flag}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"cannot read {flag} {path}: {error.strerror}") from None


def _check_root(options: GrpcOptions) -> None:
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=options.grpc_root_cert)
    except (ssl.SSLError, OSError) as error:
        raise InvalidArgument(f"--grpc-root-cert holds no certificate: {error}") from None
