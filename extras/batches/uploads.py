"""One upload, `multipart/form-data` (RFC 7578), streamed to disk while it comes.

A piece of the body is parsed and written in another thread before the next one is taken from the connection, so a
client never gets ahead of the disk, and nothing of a file stays in memory.
"""

import asyncio
import os
from contextlib import suppress
from threading import Lock
from typing import BinaryIO

from starlette.requests import Request

from ...api.http.connection import ClientDisconnected
from ...api.http.error_responses import ApiError
from ...api.http.forms import FormParser, form_boundary
from ...core.errors import InvalidArgument
from ...processes.private_directory import sync_directory
from .records import FilePurpose, StoredFile, lifetime_of, new_id
from .store import FILE_CHARGE, FileStore, charged, write_failed

PIECE_BYTES = 1 << 18
"""Bytes of a body that are handed to the thread at a time, at least, but for the last ones."""

MAX_UPLOAD_SECONDS = 3600.0
"""How long one upload may take, however steadily it comes."""

_VALUE_BYTES = 1024
_OVERHEAD = 64 << 10
"""Bytes of an upload that are not the file's: headers and other fields."""

_FILE, _ANCHOR, _SECONDS = "file", "expires_after[anchor]", "expires_after[seconds]"
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
    upload = Upload(store, tenant, form_boundary(request))
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
        self._discarded = False
        self._name = ""
        self._value = b""
        self._file: BinaryIO | None = None
        self._parser = FormParser(boundary, self)

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
                self._parser.feed(piece)
            except OSError as error:
                raise write_failed(error) from None

    def check_complete(self) -> None:
        """Raises `InvalidArgument` unless the form is whole, and has what it must have."""
        self._parser.check_ended()
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

    def begin_part(self, name: str, filename: bytes | None) -> None:
        self._name, self._value = name, b""
        if name != _FILE:
            return
        if self._file is not None:
            raise InvalidArgument("the form has two parts 'file': send one", field=_FILE)
        self.filename = shown_name(filename or b"")
        path = self.store.part_path(self.file_id)
        self._file = open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")  # noqa: SIM115

    def add_data(self, data: memoryview) -> None:
        if self._name != _FILE:
            self._value += data
            if len(self._value) > _VALUE_BYTES:
                raise InvalidArgument(f"the form's field {self._name!r} is too long")
            return
        assert self._file is not None
        self.size += len(data)
        if self.size > self.store.limits.file_bytes:
            raise _too_large(self.store)
        self._file.write(data)

    def end_part(self) -> None:
        name, value = self._name, self._value.decode(errors="replace")
        if name == _FILE:
            return
        if name not in _FIELDS:
            raise InvalidArgument(f"unknown field of the form: {name!r}", field=name)
        if name in self.fields:
            raise InvalidArgument(f"the form has two fields {name!r}", field=name)
        if name == "purpose" and value != FilePurpose.BATCH:
            raise InvalidArgument(f"purpose must be batch, got {value[:100]!r}: nothing else is served", field=name)
        self.fields[name] = value


def shown_name(filename: bytes) -> str:
    """A client's name of a file as it is shown: its last part, printable, and not longer than file systems take."""
    last = filename.decode(errors="replace").replace("\\", "/").rpartition("/")[2]
    return "".join(character for character in last if character.isprintable())[:255] or "file.jsonl"


def _whole(text: str | None) -> int | str | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 16 else text


def _too_large(store: FileStore) -> ApiError:
    text = f"the file is longer than {store.limits.file_bytes} bytes, the most that one may have (--files-max-bytes)"
    return ApiError(text, 413, "file_too_large", field="file")
