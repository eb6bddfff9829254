"""One upload, `multipart/form-data` (RFC 7578), streamed to disk while it comes.

A piece of the body is parsed and written in another thread before the next one is taken from the connection, so a
client never gets ahead of the disk, and nothing of a file stays in memory.
"""

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, BinaryIO, cast

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from ...api.http.connection import ClientDisconnected
from ...api.http.error_responses import ApiError
from ...core.errors import InvalidArgument
from ...processes.private_directory import sync_directory
from .records import FilePurpose, StoredFile, lifetime_of, new_id
from .store import FILE_CHARGE, FileStore, charged, write_failed

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

PIECE_BYTES = 1 << 18
"""Bytes of a body that are handed to the thread at a time, at least, but for the last ones."""

MAX_UPLOAD_SECONDS = 3600.0
"""How long one upload may take, however steadily it comes."""

_MOST_PARTS, _MOST_HEADERS, _HEADER_BYTES, _VALUE_BYTES = 16, 16, 4096, 1024
_OVERHEAD = 64 << 10
"""Bytes of an upload that are not the file's: headers and other fields."""

_BOUNDARY_BYTES = 70
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_FIELDS = frozenset({"purpose", _ANCHOR, _SECONDS})


async def receive_file(request: Request, store: FileStore, tenant: str) -> StoredFile:
    """Receive the file of a request, keep it, and return its record. Whatever goes wrong, nothing of it stays.

    Raises:
        InvalidArgument: the form is none, or asks for what is not served.
        ApiError: the file is too long (413), or there is no room for it (413, 507), or it took too long (408).
        BodyTimeout, ClientDisconnected: the client stopped sending.
    """
    limit = store.limits.file_bytes + _OVERHEAD
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        raise _too_large(store)
    if request.headers.get("content-encoding", "identity") != "identity":
        raise InvalidArgument("compressed uploads are not taken: send the file as it is")
    upload = Upload(store, tenant, _boundary(request.headers.get("content-type", "")))
    try:
        upload.charge(FILE_CHARGE)
        async with asyncio.timeout(MAX_UPLOAD_SECONDS):
            await _receive(request, upload, limit)
        now = store.time_ns()
        lifetime = lifetime_of(upload.fields.get(_ANCHOR), _whole(upload.fields.get(_SECONDS)), store.limits.seconds)
        file = StoredFile(
            id=upload.file_id,
            tenant=tenant,
            purpose=FilePurpose.BATCH,
            filename=upload.filename,
            size=upload.size,
            made=now,
            expires_at=now // 10**9 + lifetime,
        )
        await store.in_thread(upload.write_record, file)
    except BaseException as error:
        # Not awaited: this task may be cancelled. The upload's lock keeps it after what another thread writes now.
        store.in_thread_later(upload.discard)
        store.count(tenant, -upload.charged)
        if isinstance(error, TimeoutError):
            raise ApiError(f"the upload took more than {MAX_UPLOAD_SECONDS:g} s", 408, field="file") from None
        raise
    store.count(tenant, charged(file.size) - upload.charged)
    store.add_file(file)
    return file


async def _receive(request: Request, upload: "Upload", limit: int) -> None:
    """Hand over the body in large pieces. Raises as `receive_file`."""
    waiting = bytearray()
    received = 0
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        part: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        received += len(part)
        if received > limit:
            raise _too_large(upload.store)
        waiting += part
        if len(waiting) >= PIECE_BYTES or not more:
            upload.charge(len(waiting))
            await upload.store.in_thread(upload.feed, bytes(waiting))
            waiting.clear()
    await upload.store.in_thread(upload.check_complete)


class Upload:
    """The parts of one form. `fields`: those that are no file. Methods block, but for `charge`, and take turns: a
    thread may still write while another one discards. Nothing is written once it was discarded."""

    def __init__(self, store: FileStore, tenant: str, boundary: bytes) -> None:
        self.store = store
        self.tenant = tenant
        self.file_id = new_id("file-")
        self.fields: dict[str, str] = {}
        self.filename = ""
        self.size = 0
        self.charged = 0
        self._turn = Lock()
        self._discarded = self._ended = False
        self._parts = 0
        self._name = b""
        self._headers: dict[bytes, bytes] = {}
        self._header, self._value = b"", b""
        self._file: BinaryIO | None = None
        callbacks: dict[str, Callable[..., None]] = {
            "on_part_begin": self._begin_part,
            "on_header_field": self._add_header_name,
            "on_header_value": self._add_header_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._add_data,
            "on_part_end": self._end_part,
            "on_end": self._end,
        }
        self._parser = MultipartParser(
            boundary,
            cast("MultipartCallbacks", callbacks),
            max_header_count=_MOST_HEADERS,
            max_header_size=_HEADER_BYTES,
        )

    def charge(self, size: int) -> None:
        """Count bytes against the room of the tenant and of all, in the event loop. Raises `StorageFull`."""
        self.store.charge(self.tenant, size)
        self.charged += size

    def feed(self, piece: bytes) -> None:
        """Parse a piece of the body, and write what is the file's. Raises as `receive_file`."""
        with self._turn:
            if self._discarded:
                return
            try:
                self._parser.write(piece)
            except FormParserError as error:
                raise InvalidArgument(f"the body is not valid multipart/form-data: {error}") from None
            except OSError as error:
                raise write_failed(error) from None

    def check_complete(self) -> None:
        """Raises `InvalidArgument` unless the form is whole, and has what it must have."""
        if not self._ended:
            raise InvalidArgument("the form is cut off: its last boundary is missing")
        if "purpose" not in self.fields:
            raise InvalidArgument("purpose is missing: send purpose=batch", field="purpose")
        if self._file is None:
            raise InvalidArgument("file is missing: send the part 'file', with a filename", field="file")
        if not self.size:
            raise InvalidArgument("the file is empty", field="file")

    def write_record(self, file: StoredFile) -> None:
        """Let the file be there. Raises `StorageFull`."""
        with self._turn:
            if self._file is None or self._discarded:
                return
            try:
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
                self.store.part_path(self.file_id).replace(self.store.path(self.file_id))
                sync_directory(self.store.path(self.file_id).parent)
            except OSError as error:
                raise write_failed(error) from None
            self.store.write_file(file)

    def discard(self) -> None:
        """Remove whatever was written."""
        with self._turn:
            self._discarded = True
            if self._file is not None:
                with suppress(OSError):
                    self._file.close()  # writes what is buffered, for which there may be no room
            self.store.part_path(self.file_id).unlink(missing_ok=True)
            self.store.write_file_away(self.file_id)

    # What the parser calls

    def _begin_part(self) -> None:
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise InvalidArgument(f"the form has more than {_MOST_PARTS} parts")
        self._headers.clear()

    def _add_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header = self._value = b""

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"")
        if self._name != b"file":
            return
        if self._file is not None:
            raise InvalidArgument("the form has two parts 'file': send one", field="file")
        self.filename = shown_name(options.get(b"filename", b""))
        path = self.store.part_path(self.file_id)
        self._file = open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")  # noqa: SIM115

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._name != b"file":
            self._value += data[start:end]
            if len(self._value) > _VALUE_BYTES:
                raise InvalidArgument(f"the form's field {_text(self._name)[:100]!r} is too long")
            return
        assert self._file is not None
        self.size += end - start
        if self.size > self.store.limits.file_bytes:
            raise _too_large(self.store)
        self._file.write(memoryview(data)[start:end])

    def _end_part(self) -> None:
        if self._name == b"file":
            return
        name, value = _text(self._name)[:100], _text(self._value)
        self._value = b""
        if name not in _FIELDS:
            raise InvalidArgument(f"unknown field of the form: {name!r}", field=name)
        if name in self.fields:
            raise InvalidArgument(f"the form has two fields {name!r}", field=name)
        if name == "purpose" and value != FilePurpose.BATCH:
            raise InvalidArgument(f"purpose must be batch, got {value[:100]!r}: nothing else is served", field=name)
        self.fields[name] = value

    def _end(self) -> None:
        self._ended = True


def shown_name(filename: bytes) -> str:
    """A client's name of a file as it is shown: its last part, printable, and not longer than file systems take."""
    last = _text(filename).replace("\\", "/").rpartition("/")[2]
    return "".join(character for character in last if character.isprintable())[:255] or "file.jsonl"


def _whole(text: str | None) -> int | str | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 16 else text


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _boundary(content_type: str) -> bytes:
    """Raises `InvalidArgument` unless the header says that the body is a form, and how its parts are parted."""
    kind, options = parse_options_header(content_type)
    boundary: bytes = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 0 < len(boundary) <= _BOUNDARY_BYTES:
        raise InvalidArgument("files are uploaded as multipart/form-data, with a boundary of at most 70 characters")
    return boundary


def _too_large(store: FileStore) -> ApiError:
    text = f"the file is longer than {store.limits.file_bytes} bytes, the most that one may have (--files-max-bytes)"
    return ApiError(text, 413, "file_too_large", field="file")
