"""The server's endpoints as a client sees them: how a request is sent, and the events of its answer.

Knows nothing of loops and loads. A `RequestSender` hides the transport.
"""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import msgspec
import orjson

from .http_client import HttpClient, HttpResponseReader, SseEvent
from .plan import Prompt

EndpointName: TypeAlias = Literal["completions", "chat", "generate", "grpc"]
OK = "ok"


class RequestResult(msgspec.Struct, kw_only=True):
    """The result of one request. `status`: "ok" or the error; `times`: of its tokens, in seconds of `perf_counter`;
    `frames`: events or messages, `size` their bytes; a count of -1 is unknown."""

    status: str
    times: list[float] = []
    tokens: int = -1
    prompt_tokens: int = -1
    frames: int = 0
    size: int = 0


class RequestOptions(NamedTuple):
    """The options of all requests. `counted`: ask the server for the number of tokens. `api_key`: sent unless it is
    empty."""

    model: str
    temperature: float = 0.0
    ignore_eos: bool = True
    counted: bool = True
    api_key: str = ""


class RequestSender(Protocol):
    """Puts requests to a server."""

    async def send(self, prompt: Prompt, new: int) -> RequestResult:
        """Put one request and hear it out. Raises `OSError` when the connection fails."""

    async def close(self) -> None: ...


class StreamingEndpoint(Protocol):
    """An HTTP endpoint whose answers are event streams."""

    def path(self, model: str) -> str: ...

    def body(self, prompt: Prompt, new: int, manner: RequestOptions) -> dict[str, Any]: ...

    def read(self, event: Any, heard: RequestResult) -> bool:
        """Note what an event says; whether it brought tokens."""


class CompletionsEndpoint:
    """OpenAI's completions."""

    def path(self, model: str) -> str:
        return "/v1/completions"

    def body(self, prompt: Prompt, new: int, manner: RequestOptions) -> dict[str, Any]:
        return {"prompt": prompt, **_openai(new, manner)}

    def read(self, event: Any, heard: RequestResult) -> bool:
        _read_usage(event, heard)
        return any(choice["text"] for choice in event["choices"])


class ChatEndpoint:
    """OpenAI's chat, each prompt one message of a user."""

    def path(self, model: str) -> str:
        return "/v1/chat/completions"

    def body(self, prompt: Prompt, new: int, manner: RequestOptions) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": prompt}], **_openai(new, manner)}

    def read(self, event: Any, heard: RequestResult) -> bool:
        _read_usage(event, heard)
        return any(choice["delta"].get("content") for choice in event["choices"])


class GenerateEndpoint:
    """v2's generate_stream."""

    def path(self, model: str) -> str:
        return f"/v2/models/{model}/generate_stream"

    def body(self, prompt: Prompt, new: int, manner: RequestOptions) -> dict[str, Any]:
        name = "text_input" if isinstance(prompt, str) else "input_ids"
        # Not the number of output tokens: events that would hold half a character alone are not sent, ids are.
        asked = {"return_num_input_tokens": True, "return_output_ids": True} if manner.counted else {}
        return {name: prompt, "stream": True, **sampling(new, manner), **asked}

    def read(self, event: Any, heard: RequestResult) -> bool:
        heard.prompt_tokens = event.get("num_input_tokens", -1)
        ids = event.get("output_ids")
        if ids is None:
            return bool(event["text_output"])
        count = len(ids) if isinstance(ids, list) else 1
        heard.tokens = max(0, heard.tokens) + count
        return count > 0


ENDPOINTS: dict[str, StreamingEndpoint] = {
    "completions": CompletionsEndpoint(),
    "chat": ChatEndpoint(),
    "generate": GenerateEndpoint(),
}


class SseSender:
    """Sends requests to one endpoint of a server."""

    def __init__(self, client: HttpClient, door: StreamingEndpoint, manner: RequestOptions) -> None:
        self._client, self._door, self._manner = client, door, manner

    async def send(self, prompt: Prompt, new: int) -> RequestResult:
        body = orjson.dumps(self._door.body(prompt, new, self._manner))
        heard = read_answer(await self._client.post(self._door.path(self._manner.model), body), self._door)
        if self._manner.counted and heard.status == OK and heard.tokens < 0:
            heard.status = "cut short"  # the count comes last
        return heard

    async def close(self) -> None:
        self._client.close()


def read_answer(answer: HttpResponseReader, door: StreamingEndpoint) -> RequestResult:
    """The result of a whole answer; a malformed event makes it an error, not an exception."""
    heard = RequestResult(status=OK, frames=len(answer.events), size=answer.size)
    if answer.status != 200:
        heard.status = f"HTTP {answer.status}"
        return heard
    try:
        heard.times = list(_token_times(answer.events, door, heard))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        heard.status = f"strange event: {error!r}"[:80]
    if heard.status == OK and not heard.times:
        heard.status = "no token"
    return heard


def _token_times(events: Iterable[SseEvent], door: StreamingEndpoint, heard: RequestResult) -> Iterable[float]:
    for at, data in events:
        content = data.removeprefix(b"data:").strip()
        if content == b"[DONE]":
            continue
        event = orjson.loads(content)
        if "error" in event:
            heard.status = f"event: {_message(event['error'])}"[:80]
        elif door.read(event, heard):
            yield at


def _message(error: Any) -> str:
    return str(error.get("message")) if isinstance(error, dict) else str(error)


def sampling(new: int, manner: RequestOptions) -> dict[str, Any]:
    """The parameters that all endpoints call by the same names."""
    return {"max_tokens": new, "temperature": manner.temperature, "ignore_eos": manner.ignore_eos}


def _openai(new: int, manner: RequestOptions) -> dict[str, Any]:
    usage = {"stream_options": {"include_usage": True}} if manner.counted else {}
    return {"model": manner.model, "stream": True, **sampling(new, manner), **usage}


def _read_usage(event: Any, heard: RequestResult) -> None:
    usage = event.get("usage")
    if usage:
        heard.tokens, heard.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
