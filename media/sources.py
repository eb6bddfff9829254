"""The files of media: from within a request, from a directory of the server's, or from the web."""

import asyncio
import base64
import binascii
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ..core.errors import CharoniaError, InvalidArgument, shorten
from ..core.media import MediaSource
from ..core.regular_files import read_regular
from .addresses import Resolve
from .limits import MediaLimits
from .web_fetch import Connect, WebFetch, connect_to, resolve_host

_FETCHES = 8
"""Files that are fetched at a time."""
_READS = 2
"""Files that are read or decoded at a time."""
_GRACE = 1.0
"""Seconds beyond its own deadline after which a fetch is ended from outside."""


class MediaFiles:
    """Gets the files of media, in one event loop, until `close`. Raises `InvalidArgument` for a `path` that is no
    directory."""

    def __init__(self, limits: MediaLimits, resolve: Resolve = resolve_host, connect: Connect = connect_to) -> None:
        config = limits.config
        self._max_bytes, self._seconds = config.max_bytes, limits.fetch_seconds
        self._directory = Path(config.path).resolve() if config.path else None
        if self._directory is not None and not self._directory.is_dir():
            raise InvalidArgument(f"media_path: {config.path} is no directory", field="media_path")
        self._domains = frozenset(name for domain in config.domains if (name := domain.strip().lower().rstrip(".")))
        self._resolve, self._connect = resolve, connect
        self._fetching = ThreadPoolExecutor(_FETCHES, "media-fetch")
        self._reading = ThreadPoolExecutor(_READS, "media-read")

    async def read(self, source: MediaSource) -> bytes:
        """The file of a medium. Raises `InvalidArgument` by the source's field if it may not be had, is not there, too
        large, or takes too long."""
        try:
            if source.data:
                return self._checked(source.data)
            return self._checked(await self._read_url(source.url))
        except CharoniaError as error:
            raise InvalidArgument(f"{source.field}: {error.message}", field=source.field) from error

    async def _read_url(self, url: str) -> bytes:
        scheme = url[:8].partition(":")[0].lower()
        loop = asyncio.get_running_loop()
        if scheme == "data":
            return await loop.run_in_executor(self._reading, decode_data_url, url, self._max_bytes)
        if scheme == "file":
            return await loop.run_in_executor(self._reading, self._read_file, url)
        if scheme not in ("http", "https"):
            raise InvalidArgument(f"{shorten(url)!r} is no URL with data:, http:, https: or file:")
        if not self._domains:
            raise InvalidArgument("this server fetches nothing: send a data: URL (--media-domains names hosts)")
        seconds = self._seconds
        fetch = WebFetch(url, self._domains, self._max_bytes, seconds, self._resolve, self._connect)
        try:
            async with asyncio.timeout(seconds + _GRACE):
                return await loop.run_in_executor(self._fetching, fetch.run)
        except TimeoutError:
            raise InvalidArgument(f"fetching it takes more than {seconds:g} s") from None
        finally:
            fetch.abort()

    def _read_file(self, url: str) -> bytes:
        if self._directory is None:
            raise InvalidArgument("this server reads no files for clients: send a data: URL (--media-path)")
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
            raise InvalidArgument("a file: URL has a path alone")
        try:
            path = Path(unquote(parts.path)).resolve(strict=True)  # follows links: what counts is where they lead
            if not path.is_relative_to(self._directory):
                raise FileNotFoundError
            return read_regular(path, self._max_bytes)
        except (OSError, ValueError, InvalidArgument):  # one message: clients are not told what else is there
            message = f"there is no such file of at most {self._max_bytes:,} bytes below --media-path"
            raise InvalidArgument(message) from None

    def _checked(self, data: bytes) -> bytes:
        if not data:
            raise InvalidArgument("the file is empty")
        if len(data) > self._max_bytes:
            raise InvalidArgument(_too_large(len(data), self._max_bytes))
        return data

    def close(self) -> None:
        for threads in (self._fetching, self._reading):
            threads.shutdown(wait=False, cancel_futures=True)


def decode_data_url(url: str, max_bytes: int) -> bytes:
    """The content of a `data:` URL. Raises `InvalidArgument` unless it is base64 of at most `max_bytes`."""
    head, comma, text = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidArgument("a data: URL must be data:TYPE;base64, and the file in base64")
    if len(text) // 4 * 3 > max_bytes + 3:
        raise InvalidArgument(_too_large(len(text) // 4 * 3, max_bytes))
    text = unquote(text) if "%" in text else text
    try:
        try:
            return base64.b64decode(text, validate=True)
        except binascii.Error:
            return base64.b64decode("".join(text.split()), validate=True)  # some write lines
    except ValueError as error:
        raise InvalidArgument(f"the data are not in base64: {error}") from error


def _too_large(size: int, most: int) -> str:
    return f"the file has {size:,} bytes, and may have {most:,} (--media-max-bytes)"
