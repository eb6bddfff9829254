"""Bodies that are forms, `multipart/form-data` (RFC 7578): parsed while they come, or whole into texts and files."""

from collections.abc import Mapping
from io import BytesIO
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request
from starlette.routing import Route

from ...core.errors import InvalidArgument
from ..size_limits import form_too_large
from .connection import offload_if_large, receive_body

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

_MOST_PARTS, _MOST_HEADERS, _HEADER_BYTES, _VALUE_BYTES = 64, 16, 4096, 1 << 16
_BOUNDARY_BYTES = 70
_LONGEST_NAME = 100


class FormRoute(Route):
    """A route whose bodies are forms with a file."""


class FormParts(Protocol):
    """Gets the parts of a form, one after the other. What it raises ends the parsing."""

    def begin_part(self, name: str, filename: bytes | None) -> None:
        """`filename`: what its sender calls it, if it is a file."""

    def add_data(self, data: memoryview) -> None:
        """More of the part, which may come in any number of pieces."""

    def end_part(self) -> None: ...


class FormParser:
    """Parses one form, in pieces of any size."""

    def __init__(self, boundary: bytes, parts: FormParts) -> None:
        self._parts = parts
        self._count = 0
        self._headers: dict[bytes, bytes] = {}
        self._header = self._value = b""
        self._ended = False
        callbacks = {
            "on_part_begin": self._begin_part,
            "on_header_field": self._add_header_name,
            "on_header_value": self._add_header_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": lambda data, start, end: parts.add_data(memoryview(data)[start:end]),
            "on_part_end": parts.end_part,
            "on_end": self._end,
        }
        self._parser = MultipartParser(
            boundary,
            cast("MultipartCallbacks", callbacks),
            max_header_count=_MOST_HEADERS,
            max_header_size=_HEADER_BYTES,
        )

    def feed(self, piece: bytes | bytearray) -> None:
        """Parse the next piece. Raises `InvalidArgument` for what is no form, and what the parts raise."""
        try:
            self._parser.write(cast("bytes", piece))
        except FormParserError as error:
            raise InvalidArgument(f"the body is not valid multipart/form-data: {error}") from None

    def check_ended(self) -> None:
        """Raises `InvalidArgument` unless the form is whole."""
        if not self._ended:
            raise InvalidArgument("the form is cut off: its last boundary is missing")

    # What the parser calls

    def _begin_part(self) -> None:
        self._count += 1
        if self._count > _MOST_PARTS:
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
        name = options.get(b"name", b"").decode(errors="replace")[:_LONGEST_NAME]
        if not name:
            raise InvalidArgument("the form has a part without a name")
        self._parts.begin_part(name, options.get(b"filename"))

    def _end(self) -> None:
        self._ended = True


class Form(NamedTuple):
    """The parts of a form: `texts` by name, in order, and `files`."""

    texts: Mapping[str, list[str]]
    files: Mapping[str, bytes]


async def read_form(request: Request, limit: int) -> Form:
    """The form of a request, of at most `limit` bytes.

    Raises `InvalidArgument` for a body that is longer, as soon as that is known, that is no form, or cut off;
    `ClientDisconnected` if the client leaves.
    """
    boundary = form_boundary(request)
    announced = request.headers.get("content-length", "").encode()
    body = await receive_body(request, announced, limit, form_too_large)
    return await offload_if_large(len(body), _parse, body, boundary)


def form_boundary(request: Request) -> bytes:
    """What parts the form of a request. Raises `InvalidArgument` unless its headers say that the body is one, as it
    is."""
    if request.headers.get("content-encoding", "identity") != "identity":
        raise InvalidArgument("compressed forms are not taken: send the file as it is")
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary: bytes = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 0 < len(boundary) <= _BOUNDARY_BYTES:
        raise InvalidArgument("the body must be multipart/form-data, with a boundary of at most 70 characters")
    return boundary


def _parse(body: bytes | bytearray, boundary: bytes) -> Form:
    parts = _WholeParts()
    parser = FormParser(boundary, parts)
    parser.feed(body)
    parser.check_ended()
    return Form(parts.texts, parts.files)


class _WholeParts:
    """`FormParts` that are kept in memory."""

    def __init__(self) -> None:
        self.texts: dict[str, list[str]] = {}
        self.files: dict[str, bytes] = {}
        self._name = ""
        self._is_file = False
        self._data = BytesIO()

    def begin_part(self, name: str, filename: bytes | None) -> None:
        self._name, self._is_file = name, filename is not None
        if self._is_file and name in self.files:
            raise InvalidArgument(f"{name}: the form has two such files", field=name)
        self._data = BytesIO()

    def add_data(self, data: memoryview) -> None:
        self._data.write(data)
        if not self._is_file and self._data.tell() > _VALUE_BYTES:
            message = f"{self._name} has more than {_VALUE_BYTES:,} bytes, and is no file"
            raise InvalidArgument(message, field=self._name)

    def end_part(self) -> None:
        data = self._data.getvalue()
        if self._is_file:
            self.files[self._name] = data
            return
        try:
            self.texts.setdefault(self._name, []).append(data.decode())
        except UnicodeDecodeError:
            raise InvalidArgument(f"{self._name} is not valid UTF-8", field=self._name) from None
