"""Certificates and keys of servers, checked before anything listens, and read again when they change. Knows no
server."""

import logging
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ..core.errors import InvalidArgument

log = logging.getLogger(__name__)


class KeyPair(NamedTuple):
    """The PEM files of a certificate and its private key."""

    certificate: Path
    key: Path

    def reload_into(self, context: ssl.SSLContext) -> None:
        """Let connections from now on be encrypted with what the files hold. Raises `InvalidArgument` as
        `parse_key_pair`; then all is as before."""
        _checked_pair(self.certificate, self.key, "--http-server")
        context.load_cert_chain(self.certificate, self.key)


class TlsFiles(NamedTuple):
    """The contents of PEM files. `root`: certificates that may sign a client's; `mutual`: a client must have one."""

    key: bytes
    certificate: bytes
    root: bytes | None
    mutual: bool
    paths: tuple[Path, Path, Path | None]
    """The paths of the certificate, the key and the root."""

    def read_again(self) -> "TlsFiles":
        """What the files hold now. Raises as `load_tls_files`."""
        return load_tls_files(*self.paths, self.mutual)


def parse_key_pair(certificate: Path | None, key: Path | None, prefix: str) -> KeyPair | None:
    """The pair, or None where neither is given; `prefix` of the flags names them in messages. Raises `InvalidArgument`
    if one is missing, unreadable, or they do not belong together."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise InvalidArgument(f"TLS needs both {prefix}-cert and {prefix}-key")
    return _checked_pair(certificate, key, prefix)


def _checked_pair(certificate: Path, key: Path, prefix: str) -> KeyPair:
    try:
        # A password that is needed and not there must be an error, not a question on the terminal.
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, OSError) as error:
        text = f"{prefix}-cert and {prefix}-key are not a certificate and its key: {error}"
        raise InvalidArgument(text) from None
    return KeyPair(certificate, key)


def load_tls_files(certificate: Path | None, key: Path | None, root: Path | None, mutual: bool) -> TlsFiles:
    """The files of gRPC's flags; raises `InvalidArgument` with the flag of one that is missing, unreadable or wrong."""
    certificate_bytes = _read(certificate, "--grpc-server-cert")
    key_bytes = _read(key, "--grpc-server-key")
    assert certificate is not None
    assert key is not None
    # grpc would only log that it cannot use them, and refuse every client.
    _checked_pair(certificate, key, "--grpc-server")
    root_bytes = None
    if mutual or root is not None:
        root_bytes = _read(root, "--grpc-root-cert")
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=root)
        except (ssl.SSLError, OSError) as error:
            raise InvalidArgument(f"--grpc-root-cert holds no certificate: {error}") from None
    return TlsFiles(key_bytes, certificate_bytes, root_bytes, mutual, (certificate, key, root))


class ChangedFiles:
    """Looks whether files changed, be it in place, or by a link to others, as a cluster changes those that it mounts.
    `reload` is called after a change, and again after the next look where it raised `InvalidArgument`: files change one
    after the other."""

    def __init__(self, paths: Sequence[Path], reload: Callable[[], None]) -> None:
        self._paths = paths
        self._reload = reload
        self._seen = self._stamps()
        self._told = ""

    def look(self) -> None:
        stamps = self._stamps()
        if stamps == self._seen:
            return
        try:
            self._reload()
        except InvalidArgument as error:
            if error.message != self._told:
                log.warning("%s; connections are encrypted as before", error.message)
                self._told = error.message
            return
        self._seen, self._told = stamps, ""
        log.info("read again: %s", ", ".join(map(str, self._paths)))

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _read(path: Path | None, flag: str) -> bytes:
    if path is None:
        raise InvalidArgument(f"TLS on gRPC needs {flag}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"cannot read {flag} {path}: {error.strerror}") from None
