"""The lines of a batch's input file: found, checked, and read one by one. Everything here blocks, and belongs into a
thread. Knows nothing of models and endpoints.
"""

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ...core.errors import describe_validation_error
from .records import MAX_LISTED_ERRORS, BatchError

MAX_LINE_BYTES = 8 << 20
"""Bytes of a line. The interpreter's lock is held while one is parsed: this many take a few milliseconds."""

_READ_BYTES = 1 << 20
_MAX_ID = 512
"""Characters of a custom id."""

_BLANK_LINES = 10
"""Lines of a file for each request that a batch may have: a file of nothing but line breaks is not read to its end."""

_BOM = b"\xef\xbb\xbf"


class BatchLine(msgspec.Struct, frozen=True):
    """One request. `body` stays the client's JSON: its endpoint parses it."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _BodyFields(msgspec.Struct, frozen=True):
    """What is looked for in a body before its endpoint reads it."""

    model: str
    stream: Any = None


class CheckedInput(NamedTuple):
    """The lines of a file: `offsets` in it, with the end of the last one behind; the model that all of them ask; and
    why they cannot be run, if so."""

    offsets: "array[int]"
    model: str
    errors: list[BatchError]


def check_input(path: Path, endpoint: str, most: int) -> CheckedInput:
    """Check every line of a file of at most `most` requests to `endpoint`. The first errors are told, not all.

    Raises:
        OSError: the file cannot be read.
    """
    offsets = array("Q")
    errors = list[BatchError]()
    model = ""
    numbers: dict[str, int] = {}
    for number, offset, text in split_lines(path):
        if not text and number < _BLANK_LINES * most:
            continue
        if len(offsets) == most or not text:
            message = f"the file has more than {most} requests, the most that a batch may have"
            errors.append(BatchError("too_many_requests", message, None, number))
            break
        offsets.append(offset)
        error = None
        line = parse_line(text)
        if isinstance(line, BatchLine):
            fields = _body_fields(line)
            error = fields if isinstance(fields, BatchError) else _line_error(line, fields, endpoint, model, numbers)
            if error is None and isinstance(fields, _BodyFields):
                model = model or fields.model
                numbers[line.custom_id] = number
        else:
            error = line
        if error is not None:
            errors.append(msgspec.structs.replace(error, line=number))
            if len(errors) == MAX_LISTED_ERRORS:
                break
    if not offsets and not errors:
        errors.append(BatchError("empty_file", "the file has no request in it"))
    offsets.append(path.stat().st_size)
    return CheckedInput(offsets, model, errors)


def find_lines(path: Path) -> "array[int]":
    """The offsets of the lines of a file that was checked before, with its end behind them."""
    offsets = array("Q", (offset for _, offset, text in split_lines(path) if text))
    offsets.append(path.stat().st_size)
    return offsets


def read_line(path: Path, offsets: "array[int]", index: int) -> BatchLine:
    """Line number `index` of a checked file.

    Raises:
        OSError: the file cannot be read, or is not the one that was checked.
    """
    with path.open("rb") as file:
        file.seek(offsets[index])
        text = file.read(min(offsets[index + 1] - offsets[index], MAX_LINE_BYTES))
    line = parse_line(text.partition(b"\n")[0])
    if isinstance(line, BatchError):
        raise OSError(f"line {index} of {path} is not what it was: {line.message}")
    return line


def asks_for_stream(line: BatchLine) -> bool:
    fields = _body_fields(line)
    return isinstance(fields, _BodyFields) and bool(fields.stream)


def split_lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Number (from 1 on), offset and text of each line; a blank one has none. Of one that is too long only the
    beginning is there, one byte more than a line may have."""
    number = 0
    offset = 0
    with path.open("rb", buffering=_READ_BYTES) as file:
        while text := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            start = offset
            offset += len(text)
            if len(text) > MAX_LINE_BYTES:
                while not text.endswith(b"\n") and (rest := file.readline(_READ_BYTES)):
                    offset += len(rest)
                    if rest.endswith(b"\n"):
                        break
            yield number, start, b"" if text.strip() in (b"", _BOM) else text


def parse_line(text: bytes) -> BatchLine | BatchError:
    """The request of a line, or what is wrong with it."""
    if len(text) > MAX_LINE_BYTES:
        return BatchError("line_too_long", f"the line has more than {MAX_LINE_BYTES} bytes")
    try:
        return msgspec.json.decode(text.removeprefix(_BOM), type=BatchLine)
    except msgspec.ValidationError as error:
        mismatch = describe_validation_error(error)
        missing = mismatch.reason == "is missing"
        code = "missing_required_parameter" if missing else "invalid_request"
        return BatchError(code, f"{mismatch.path or 'the line'} {mismatch}", mismatch.path or None)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return BatchError("invalid_json_line", "This line is not parseable as valid JSON.")


def _body_fields(line: BatchLine) -> _BodyFields | BatchError:
    try:
        return msgspec.json.decode(line.body, type=_BodyFields)
    except msgspec.ValidationError as error:
        mismatch = describe_validation_error(error)
        param = f"body.{mismatch.path}" if mismatch.path else "body"
        missing = mismatch.reason == "is missing"
        return BatchError("missing_required_parameter" if missing else "invalid_request", f"{param} {mismatch}", param)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return BatchError("invalid_json_line", "This line is not parseable as valid JSON.")


def _line_error(
    line: BatchLine, fields: _BodyFields, endpoint: str, model: str, numbers: dict[str, int]
) -> BatchError | None:
    """What is wrong with a line that is a request by itself: with it, or beside the others."""
    if not 0 < len(line.custom_id) <= _MAX_ID:
        return BatchError("invalid_custom_id", f"custom_id must have 1 to {_MAX_ID} characters", "custom_id")
    if line.custom_id in numbers:
        text = f"The custom_id '{line.custom_id}' for this request is a duplicate of another request, on line"
        text = f"{text} {numbers[line.custom_id]}. The custom_id parameter must be unique for each request in a batch."
        return BatchError("duplicate_custom_id", text, "custom_id")
    if line.method != "POST":
        return BatchError("invalid_method", f"method must be POST, got {line.method[:20]!r}", "method")
    if line.url != endpoint:
        text = (
            f"The URL provided for this request, {line.url[:100]!r}, does not match the batch endpoint, {endpoint!r}."
        )
        return BatchError("mismatched_url", text, "url")
    if model and fields.model != model:
        text = (
            f"The model '{fields.model[:100]}' for this request does not match the rest of the batch, '{model[:100]}'."
        )
        text = f"{text} Each batch must contain requests for a single model."
        return BatchError("mismatched_model", text, "body.model")
    return None
