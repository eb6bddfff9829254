"""Bodies that are forms, `multipart/form-data` (RFC 7578): texts by name, and files."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from ...core.errors import InvalidArgument
from ..size_limits import check_form_size
from .connection import offload_if_large, receive_body

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

_MOST_PARTS, _MOST_HEADERS, _HEADER_BYTES, _VALUE_BYTES = 64, 16, 4096, 1 << 16
_BOUNDARY_BYTES = 70
_LONGEST_NAME = 100


class FormFile(NamedTuple):
    """A file, and what its sender calls it."""

    name: str
    data: bytes


class Form(NamedTuple):
    """The parts of a form: `texts` by name, in order, and `files`."""

    texts: Mapping[str, list[str]]
    files: Mapping[str, FormFile]


async def read_form(request: Request, limit: int) -> Form:
    """The form of a request, of at most `limit` bytes.

    Raises `InvalidArgument` for a body that is longer, as soon as that is known, that is no form, or cut off;
    `ClientDisconnected` if the client leaves.
    """
    if request.headers.get("content-encoding", "identity") != "identity":
        raise InvalidArgument("compressed forms are not taken: send the file as it is")
    boundary = _boundary(request.headers.get("content-type", ""))
    announced = request.headers.get("content-length", "").encode()
    body = await receive_body(request, announced, partial(check_form_size, limit=limit))
    return await offload_if_large(len(body), _parse, body, boundary)


def _boundary(content_type: str) -> bytes:
    """Raises `InvalidArgument` unless the header says that the body is a form, and how its parts are parted."""
    kind, options = parse_options_header(content_type)
    boundary: bytes = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 0 < len(boundary) <= _BOUNDARY_BYTES:
        message = "the body must be multipart/form-data, with a boundary of at most 70 characters"
        raise InvalidArgument(message)
    return boundary


def _parse(body: bytes | bytearray, boundary: bytes) -> Form:
    parts = _Parts()
    callbacks: dict[str, Callable[..., None]] = {
        "on_part_begin": parts.begin,
        "on_header_field": parts.add_header_name,
        "on_header_value": parts.add_header_value,
        "on_header_end": parts.end_header,
        "on_headers_finished": parts.end_headers,
        "on_part_data": parts.add_data,
        "on_part_end": parts.end,
        "on_end": parts.finish,
    }
    parser = MultipartParser(
        boundary,
        cast("MultipartCallbacks", callbacks),
        max_header_count=_MOST_HEADERS,
        max_header_size=_HEADER_BYTES,
    )
    try:
        parser.write(bytes(body))
    except FormParserError as error:
        raise InvalidArgument(f"the body is not valid multipart/form-data: {error}") from None
    if not parts.finished:
        raise InvalidArgument("the form is cut off: its last boundary is missing")
    return Form(parts.texts, parts.files)


class _Parts:
    """What the parser calls for each part of a form, one after the other."""

    def __init__(self) -> None:
        self.texts: dict[str, list[str]] = {}
        self.files: dict[str, FormFile] = {}
        self.finished = False
        self._count = 0
        self._headers: dict[bytes, bytes] = {}
        self._header = self._value = b""
        self._name, self._filename = "", b""
        self._is_file = False
        self._pieces: list[bytes] = []
        self._size = 0

    def begin(self) -> None:
        self._count += 1
        if self._count > _MOST_PARTS:
            raise InvalidArgument(f"the form has more than {_MOST_PARTS} parts")
        self._headers, self._pieces, self._size = {}, [], 0

    def add_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def end_header(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header = self._value = b""

    def end_headers(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode(errors="replace")[:_LONGEST_NAME]
        self._is_file = b"filename" in options
        self._filename = options.get(b"filename", b"")
        if not self._name:
            raise InvalidArgument("the form has a part without a name")

    def add_data(self, data: bytes, start: int, end: int) -> None:
        self._size += end - start
        if not self._is_file and self._size > _VALUE_BYTES:
            message = f"{self._name} has more than {_VALUE_BYTES:,} bytes, and is no file"
            raise InvalidArgument(message, field=self._name)
        self._pieces.append(data[start:end])

    def end(self) -> None:
        data, self._pieces = b"".join(self._pieces), []
        if self._is_file:
            if self._name in self.files:
                raise InvalidArgument(f"{self._name}: the form has two such files", field=self._name)
            self.files[self._name] = FormFile(self._filename.decode(errors="replace"), data)
            return
        try:
            self.texts.setdefault(self._name, []).append(data.decode())
        except UnicodeDecodeError:
            raise InvalidArgument(f"{self._name} is not valid UTF-8", field=self._name) from None

    def finish(self) -> None:
        self.finished = True
