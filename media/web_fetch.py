"""Fetches a file of the web for a client without becoming its way into this network.

The addresses of a host are looked up once and checked, and the connection is made to a checked one: no second answer
of a name server comes between. Blocks; for a thread.
"""

import http.client
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias
from urllib.parse import urljoin

from ..core.errors import InvalidArgument, shorten
from .addresses import Resolve, WebTarget, parse_web_url, public_addresses

_MAX_REDIRECTS = 3
_PIECE = 1 << 16
_REDIRECTS = frozenset((301, 302, 303, 307, 308))

Connect: TypeAlias = Callable[[str, int, float], socket.socket]
"""Opens a connection to an address and port, within seconds. Raises `OSError`."""


def resolve_host(host: str, port: int) -> list[str]:
    """The addresses of a host by the system's resolver."""
    return [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def connect_to(address: str, port: int, seconds: float) -> socket.socket:
    return socket.create_connection((address, port), seconds)


class WebFetch:
    """One file's fetching, in a thread; `abort` ends it from another one."""

    def __init__(
        self,
        url: str,
        domains: frozenset[str],
        max_bytes: int,
        seconds: float,
        resolve: Resolve = resolve_host,
        connect: Connect = connect_to,
    ) -> None:
        self._url, self._domains = url, domains
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._resolve, self._connect = resolve, connect
        self._socket: socket.socket | None = None
        self._aborted = False

    def abort(self) -> None:
        """End the fetching, from any thread: it raises."""
        self._aborted = True
        if (connection := self._socket) is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def run(self) -> bytes:
        """The file. Raises `InvalidArgument` if the URL, or one that it redirects to, is not allowed, or answers with
        too much, too slowly, or no file."""
        deadline = time.monotonic() + self._seconds
        url = self._url
        for _ in range(_MAX_REDIRECTS + 1):
            target = parse_web_url(url, self._domains)
            try:
                content, location = self._get(target, deadline)
            except (OSError, http.client.HTTPException) as error:
                if self._aborted or time.monotonic() >= deadline:
                    raise InvalidArgument(f"fetching it takes more than {self._seconds:g} s") from error
                raise InvalidArgument(f"{shorten(target.host)} cannot be fetched from: {error}") from error
            if location is None:
                return content
            url = urljoin(url, location)
        raise InvalidArgument(f"{shorten(self._url)!r} redirects more than {_MAX_REDIRECTS} times")

    def _get(self, target: WebTarget, deadline: float) -> tuple[bytes, str | None]:
        """The file, or where to look instead."""
        connection = http.client.HTTPConnection(target.host, target.port)
        connection.default_port = target.port  # so Host has no port: `parse_web_url` lets the scheme's own pass alone
        connection.auto_open = 0  # it would look the host up again
        connection.sock = opened = self._open(target, deadline)
        try:
            if self._aborted:
                raise TimeoutError
            headers = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "charonia"}
            connection.request("GET", target.path, headers=headers)
            response = connection.getresponse()
            if response.status in _REDIRECTS and (location := response.headers.get("Location")):
                return b"", location
            if response.status != 200:
                raise InvalidArgument(f"{shorten(target.host)} answers with status {response.status}")
            return self._read(response, opened, deadline), None
        finally:
            self._socket = None
            connection.close()
            opened.close()

    def _open(self, target: WebTarget, deadline: float) -> socket.socket:
        """A connection to the first address that takes one."""
        failure: OSError = TimeoutError("no time is left")
        for address in public_addresses(target, self._resolve):
            if (left := deadline - time.monotonic()) <= 0:
                break
            try:
                plain = self._connect(address, target.port, left)
            except OSError as error:
                failure = error
                continue
            self._socket = plain
            if target.url.scheme == "http":
                return plain
            try:
                self._socket = ssl.create_default_context().wrap_socket(plain, server_hostname=target.host)
                return self._socket
            except BaseException:
                plain.close()
                raise
        raise failure

    def _read(self, response: http.client.HTTPResponse, connection: socket.socket, deadline: float) -> bytes:
        declared = response.headers.get("Content-Length", "")
        if declared.isdigit() and int(declared) > self._max_bytes:
            raise self._too_large()
        pieces: list[bytes] = []
        size = 0
        while piece := response.read1(_PIECE):
            pieces.append(piece)
            size += len(piece)
            if size > self._max_bytes:
                raise self._too_large()
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
        if response.length:
            raise http.client.IncompleteRead(b"", response.length)
        return b"".join(pieces)

    def _too_large(self) -> InvalidArgument:
        return InvalidArgument(f"the file has more than {self._max_bytes:,} bytes (--media-max-bytes)")
