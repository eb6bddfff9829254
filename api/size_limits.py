"""The limits of requests, and the errors of what exceeds them, in tritonserver's words."""

from ..core.errors import InvalidArgument

MAX_RAW_BYTES = 32 * 1024 * 1024
"""Bytes of a request's raw tensors, over HTTP and gRPC alike, unless a flag says otherwise."""

MAX_RESPONSE_BYTES = 1 << 30
"""Bytes of the tensors that a response may have, unless a flag says otherwise."""

BODY_TIMEOUT = 60.0
"""Seconds of silence within a request's body after which it is given up, unless a flag says otherwise."""

SLOW_BODY_SECONDS, SLOW_BODY_BYTES = 30.0, 30 * 1024
"""A body of which fewer bytes come in so many seconds of waiting for it is given up: 1 KiB a second."""

_JSON_SHARE = 4
"""What of `MAX_RESPONSE_BYTES` may become JSON: a part in so many."""

_HINT = "Use --http-max-input-size to increase the limit."
_RAW_HINT = "Use --max-raw-input-size to increase the limit."
_RESPONSE_HINT = "Use --max-response-bytes to increase the limit."
_JSON_RESPONSE_HINT = f"It is a quarter of --max-response-bytes: ask for binary data. {_RESPONSE_HINT}"


class BodyTooLarge(InvalidArgument):
    """A body of more bytes than its limit."""


def check_json_size(size: int, limit: int) -> None:
    """Raises `BodyTooLarge` for more bytes of JSON than `limit`, as all below it do for what they check."""
    if size > limit:
        raise BodyTooLarge(
            f"request JSON size of {size} bytes exceeds the maximum allowed input size of {limit} bytes. {_HINT}"
        )


def check_form_size(size: int, limit: int) -> None:
    if size > limit:
        raise BodyTooLarge(f"the form has {size} bytes, which {_exceeds(limit)}")


def check_json_tensor_size(name: str, size: int, limit: int) -> None:
    """Raises `InvalidArgument`: the body itself may be short."""
    if size > limit:
        raise InvalidArgument(f"JSON input '{name}' has a byte_size ({size} bytes) that {_exceeds(limit)}")


def check_raw_size(size: int, limit: int) -> None:
    if size > limit:
        text = f"Raw input has a byte_size ({size} bytes) that exceeds the maximum allowed value of {limit} bytes."
        raise BodyTooLarge(f"{text} {_RAW_HINT}")


def check_decompressed_size(size: int, limit: int) -> None:
    if size > limit:
        raise BodyTooLarge(f"Decompressed data size {_exceeds(limit)}")


def response_limit(limit: int, as_json: bool) -> int:
    """The bytes of tensors that may be returned raw, or as JSON, whose text is several times as long."""
    return limit // _JSON_SHARE if as_json else limit


def check_response_size(output: str, size: int, limit: int, as_json: bool) -> None:
    """Raises `InvalidArgument` for a response of more bytes with this `output`: a client may ask for less."""
    if size > limit:
        most, hint = (f"{limit} bytes as JSON", _JSON_RESPONSE_HINT) if as_json else (f"{limit} bytes", _RESPONSE_HINT)
        text = f"Response with output '{output}' has a byte_size ({size} bytes) that exceeds the maximum allowed value"
        raise InvalidArgument(f"{text} of {most}. {hint}", field=output)


def _exceeds(limit: int) -> str:
    return f"exceeds the maximum allowed value of {limit} bytes. {_HINT}"
