"""What v2 answers is Triton's, whatever the manners of the protocols beside it: its statuses and its texts."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from charonia.api.http.error_responses import ApiError, BodyTimeout, error_response
from charonia.api.size_limits import BodyTooLarge
from charonia.core.errors import (
    CharoniaError,
    Conflict,
    DiskFull,
    ErrorCode,
    InvalidArgument,
    NotFound,
    QueueFull,
    Unauthenticated,
    Unavailable,
)

STATUSES = {
    ErrorCode.UNKNOWN: 400,
    ErrorCode.INTERNAL: 500,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.INVALID_ARGUMENT: 400,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.UNSUPPORTED: 501,
    ErrorCode.ALREADY_EXISTS: 400,
    ErrorCode.CANCELLED: 400,
}
"""Triton's, by its codes."""

OURS: dict[type[CharoniaError], int] = {
    BodyTimeout: 408,
    QueueFull: 429,
    Unauthenticated: 401,
    Conflict: 409,
    DiskFull: 507,
}
"""Errors that Triton has no case for: a halted body, a language model's queue, keys, routes, a full disk."""


def errors(kind: type[CharoniaError] = CharoniaError) -> Iterator[type[CharoniaError]]:
    """Every class of errors of the server's process."""
    for subclass in kind.__subclasses__():
        if not issubclass(subclass, ApiError):  # says its own status, on OpenAI's paths and the console's
            yield subclass
            yield from errors(subclass)


def test_every_error_has_tritons_status_and_body() -> None:
    kinds = set(errors())
    assert kinds > {*OURS, BodyTooLarge}
    for kind in kinds:
        error = CharoniaError.__new__(kind)
        CharoniaError.__init__(error, "what is wrong", field="inputs")
        response = error_response(error, "/v2/models/m/infer")
        ours = [status for base, status in OURS.items() if issubclass(kind, base)]
        assert response.status_code == (ours[0] if ours else STATUSES[error.code]), kind
        assert json.loads(response.body) == {"error": "what is wrong"}


@pytest.mark.parametrize(
    ("error", "statuses"),
    [
        (BodyTooLarge("x"), (400, 413, 413)),
        (InvalidArgument("x"), (400, 400, 400)),
        (NotFound("x"), (404, 404, 404)),
        (Unavailable("x"), (503, 503, 503)),
    ],
)
def test_what_other_protocols_call_otherwise(error: CharoniaError, statuses: tuple[int, int, int]) -> None:
    paths = "/v2/models/m/infer", "/v1/chat/completions", "/v1/messages"
    responses = [error_response(error, path) for path in paths]
    assert tuple(response.status_code for response in responses) == statuses
    bodies = [json.loads(response.body) for response in responses]
    assert [list(body) for body in bodies] == [["error"], ["error"], ["type", "error"]]


TOO_LARGE = "request JSON size of 2001 bytes exceeds the maximum allowed input size of 2000 bytes. "
HINT = "Use --http-max-input-size to increase the limit."
INPUT = {"name": "IN", "datatype": "FP32", "shape": [1, 1, 2], "data": [1, 2]}
TWICE: dict[str, Any] = {"inputs": [INPUT], "outputs": [{"name": "OUTPUT0"}] * 2}


@pytest.mark.parametrize(
    ("path", "content", "status", "text"),
    [
        *(
            (path, b"{" + b" " * 2000, 400, TOO_LARGE + HINT)
            for path in (
                "/v2/models/single/infer",
                "/v2/models/llm/generate",
                "/v2/models/llm/generate_stream",
                "/v2/repository/index",
                "/v2/repository/models/m/load",
                "/v2/repository/models/m/unload",
                "/v2/logging",
                "/v2/trace/setting",
                "/v2/systemsharedmemory/region/r/register",
                "/v2/cudasharedmemory/region/r/register",
            )
        ),
        ("/v2/models/single/infer", TWICE, 400, "output 'OUTPUT0' already exists in request"),
        ("/v2/models/single/infer", {"inputs": [INPUT] * 2}, 400, "input 'IN' already exists in request"),
        ("/v2/models/none/infer", {"inputs": []}, 404, "Request for unknown model: 'none' is not found"),
        ("/v2/models/none/generate", {}, 404, "Request for unknown model: 'none' is not found"),
        ("/v2/nowhere", {}, 404, "Not Found"),
    ],
)
async def test_texts(client: httpx.AsyncClient, path: str, content: Any, status: int, text: str) -> None:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    response = await client.post(path, content=body)
    assert (response.status_code, response.json()) == (status, {"error": text})
