"""The limits of requests, and the errors of what exceeds them, in tritonserver's words."""

from ..core.errors import InvalidArgument

MAX_JSON_BYTES = 64 * 1024 * 1024
"""Bytes of a request's body in JSON, unless a flag says otherwise."""

MAX_RAW_BYTES = 32 * 1024 * 1024
"""Bytes of a request's raw tensors, over HTTP and gRPC alike, unless a flag says otherwise."""

MAX_RESPONSE_BYTES = 1 << 30
"""Bytes of the tensors that a response may have, unless a flag says otherwise."""

BODY_TIMEOUT = 60.0
"""Seconds of silence within a request's body after which it is given up, unless a flag says otherwise."""

SLOW_BODY_SECONDS, SLOW_BODY_BYTES = 30.0, 30 * 1024
"""A body of which fewer bytes come in so many seconds of waiting for it is given up: 1 KiB a second."""

JSON_SHARE = 4
"""What of `MAX_RESPONSE_BYTES` may become JSON, which is several times as long as its tensors: a part in so many."""

_HINT = "Use --http-max-input-size to increase the limit."
_RAW_HINT = "Use --max-raw-input-size to increase the limit."
_RESPONSE_HINT = "Use --max-response-bytes to increase the limit."
_JSON_RESPONSE_HINT = f"It is a quarter of --max-response-bytes: ask for binary data. {_RESPONSE_HINT}"


class BodyTooLarge(InvalidArgument):
    """A body of more bytes than its limit."""


def json_too_large(size: int, limit: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"request JSON size of {size} bytes exceeds the maximum allowed input size of {limit} bytes. {_HINT}"
    )


def form_too_large(size: int, limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the form has {size} bytes, which {_exceeds(limit)}")


def json_tensor_too_large(name: str, size: int, limit: int) -> InvalidArgument:
    """The error for a tensor that is too large, in a body that may be short itself."""
    return InvalidArgument(f"JSON input '{name}' has a byte_size ({size} bytes) that {_exceeds(limit)}")


def raw_too_large(size: int, limit: int) -> BodyTooLarge:
    text = f"Raw input has a byte_size ({size} bytes) that exceeds the maximum allowed value of {limit} bytes."
    return BodyTooLarge(f"{text} {_RAW_HINT}")


def decompressed_too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"Decompressed data size {_exceeds(limit)}")


def response_too_large(output: str, size: int, limit: int, as_json: bool) -> InvalidArgument:
    """Of a response of more bytes with this `output`: a client may ask for less."""
    most, hint = (f"{limit} bytes as JSON", _JSON_RESPONSE_HINT) if as_json else (f"{limit} bytes", _RESPONSE_HINT)
    text = f"Response with output '{output}' has a byte_size ({size} bytes) that exceeds the maximum allowed value"
    return InvalidArgument(f"{text} of {most}. {hint}", field=output)


def _exceeds(limit: int) -> str:
    return f"exceeds the maximum allowed value of {limit} bytes. {_HINT}"
