"""Sends the requests of a load to a server, in an open or a closed loop, and takes their times.

A `RequestSender` sends one request; a `StreamingEndpoint` of HTTP says what is sent there, and how events
of its answers are read. Latencies count from the moment when a request was due, even if the
generator was late: a slow server would otherwise slow its own examination.
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from time import perf_counter
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import msgspec
import orjson

from .http_client import HttpClient, HttpResponseReader, SseEvent
from .plan import Prompt, Prompts
from .planned_requests import PlannedRequest

EndpointName: TypeAlias = Literal["completions", "chat", "generate", "messages", "responses", "grpc"]
"""Endpoints that stream text."""
CHATS = ("chat", "messages", "responses")
"""Those whose prompts are texts, rendered by a template."""
OK = "ok"


class RequestResult(msgspec.Struct, kw_only=True):
    """The result of one request. `status`: "ok" or the error, `detail` what the server said of that; `times`: of its
    tokens, in seconds of `perf_counter`; `frames`: events or messages, `size` their bytes; a count of -1 is unknown."""

    status: str
    detail: str = ""
    times: list[float] = []
    tokens: int = -1
    prompt_tokens: int = -1
    frames: int = 0
    size: int = 0


class RequestOptions(NamedTuple):
    """The options of all requests. `counted`: ask the server for the number of tokens. `api_key`: sent unless it is
    empty. `more`: members of every body, over HTTP."""

    model: str
    temperature: float = 0.0
    ignore_eos: bool = True
    counted: bool = True
    api_key: str = ""
    more: dict[str, Any] = {}


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
        counted = {"return_num_input_tokens": True, "return_output_ids": True} if manner.counted else {}
        return {name: prompt, "stream": True, **sampling(new, manner), **counted, **manner.more}

    def read(self, event: Any, heard: RequestResult) -> bool:
        heard.prompt_tokens = event.get("num_input_tokens", -1)
        ids = event.get("output_ids")
        if ids is None:
            return bool(event["text_output"])
        count = len(ids) if isinstance(ids, list) else 1
        heard.tokens = max(0, heard.tokens) + count
        return count > 0


class MessagesEndpoint:
    """Anthropic's messages, each prompt one of a user."""

    def path(self, model: str) -> str:
        return "/v1/messages"

    def body(self, prompt: Prompt, new: int, manner: RequestOptions) -> dict[str, Any]:
        messages = [{"role": "user", "content": prompt}]
        fields = {"model": manner.model, "max_tokens": new, "temperature": manner.temperature}
        return {"messages": messages, "stream": True, **fields, **manner.more}

    def read(self, event: Any, heard: RequestResult) -> bool:
        if usage := event.get("usage"):
            heard.tokens = usage["output_tokens"]
            heard.prompt_tokens = usage["input_tokens"] + usage["cache_read_input_tokens"]
        return bool(event["type"] == "content_block_delta")


class ResponsesEndpoint:
    """OpenAI's responses."""

    def path(self, model: str) -> str:
        return "/v1/responses"

    def body(self, prompt: Prompt, new: int, manner: RequestOptions) -> dict[str, Any]:
        fields = {"model": manner.model, "max_output_tokens": new, "temperature": manner.temperature}
        return {"input": prompt, "stream": True, **fields, **manner.more}

    def read(self, event: Any, heard: RequestResult) -> bool:
        if usage := event.get("response", {}).get("usage"):
            heard.tokens, heard.prompt_tokens = usage["output_tokens"], usage["input_tokens"]
        return bool(event["type"].endswith(".delta"))


ENDPOINTS: dict[str, StreamingEndpoint] = {
    "completions": CompletionsEndpoint(),
    "chat": ChatEndpoint(),
    "generate": GenerateEndpoint(),
    "messages": MessagesEndpoint(),
    "responses": ResponsesEndpoint(),
}


class SseSender:
    """Sends requests to one endpoint of a server."""

    def __init__(self, client: HttpClient, door: StreamingEndpoint, manner: RequestOptions) -> None:
        self._client = client
        self._door = door
        self._manner = manner

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
        heard.status, heard.detail = f"HTTP {answer.status}", read_error(answer.body)
        return heard
    try:
        heard.times = list(_token_times(answer.events, door, heard))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        heard.status = f"strange event: {error!r}"[:80]
    if heard.status == OK and not heard.times:
        heard.status = "no token"
    return heard


def read_error(body: bytes) -> str:
    """The message of an error's body."""
    try:
        return _message(orjson.loads(body)["error"])[:500]
    except (ValueError, LookupError, TypeError):
        return body.decode(errors="replace")[:500]


def _token_times(events: Iterable[SseEvent], door: StreamingEndpoint, heard: RequestResult) -> Iterable[float]:
    for at, data in events:
        content = data[data.find(b"data:") + 5 :].strip()  # behind its type, if it has one
        if content == b"[DONE]":
            continue
        event = orjson.loads(content)
        if event.get("error") or event.get("type") == "error":
            heard.status = f"event: {_message(event.get('error') or event)}"[:80]
        elif door.read(event, heard):
            yield at


def _message(error: Any) -> str:
    return str(error.get("message")) if isinstance(error, dict) else str(error)


def sampling(new: int, manner: RequestOptions) -> dict[str, Any]:
    """The parameters that all endpoints call by the same names."""
    return {"max_tokens": new, "temperature": manner.temperature, "ignore_eos": manner.ignore_eos}


def _openai(new: int, manner: RequestOptions) -> dict[str, Any]:
    usage = {"stream_options": {"include_usage": True}} if manner.counted else {}
    return {"model": manner.model, "stream": True, **sampling(new, manner), **usage, **manner.more}


def _read_usage(event: Any, heard: RequestResult) -> None:
    usage = event.get("usage")
    if usage:
        heard.tokens, heard.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]


class LoadRecord(msgspec.Struct, kw_only=True):
    """One request and what came of it; all times in seconds after the start of the load."""

    index: int
    """Of the planned request."""
    due: float
    sent: float
    ended: float
    status: str
    """`OK`, or what went wrong."""
    times: list[float]
    """At which frames with tokens came."""
    tokens: int
    """New tokens, as the server counted them, where it did."""
    prompt_tokens: int
    """Likewise."""
    frames: int
    """Messages with tokens."""
    size: int
    """Bytes of the answer."""
    detail: str = ""
    """What the server said of an error."""


class LoopMode(msgspec.Struct, frozen=True, kw_only=True):
    """`concurrency` requests at a time, or each when it is due (0); closed loops begin none after `duration`.
    `timeout`: seconds a request may take."""

    concurrency: int = 0
    duration: float | None = None
    timeout: float = 600.0


class LoadCounters:
    """The requests so far, for a progress display."""

    def __init__(self) -> None:
        self.sent = self.done = self.failed = self.tokens = 0


class LoadDriver:
    """Runs jobs through a caller; `start` is the moment in `perf_counter` seconds that everything counts from."""

    def __init__(self, caller: RequestSender, prompts: Prompts, pace: LoopMode, start: float) -> None:
        self._caller = caller
        self._prompts = prompts
        self._pace = pace
        self._start = start
        self.tally = LoadCounters()
        self.records: list[LoadRecord] = []

    async def run(self, jobs: Sequence[PlannedRequest]) -> None:
        """Return when every request has ended."""
        await self._until(0.0)
        await (self._closed(jobs) if self._pace.concurrency else self._open(jobs))

    async def _open(self, jobs: Sequence[PlannedRequest]) -> None:
        async with asyncio.TaskGroup() as requests:
            for job in jobs:
                await self._until(job.due)
                requests.create_task(self._request(job, job.due))

    async def _closed(self, jobs: Sequence[PlannedRequest]) -> None:
        remaining = iter(jobs)
        async with asyncio.TaskGroup() as slots:
            for _ in range(self._pace.concurrency):
                slots.create_task(self._slot(remaining))

    async def _slot(self, remaining: Iterator[PlannedRequest]) -> None:
        while self._pace.duration is None or self._now() < self._pace.duration:
            job = next(remaining, None)
            if job is None:
                return
            await self._request(job, self._now())

    async def _request(self, job: PlannedRequest, due: float) -> None:
        prompt, sent = self._prompts.write(job), self._now()
        self.tally.sent += 1
        heard = await self._ask(prompt, job.new)
        record = self._record(job, heard, due, sent)
        self.records.append(record)
        self.tally.done += 1
        self.tally.failed += record.status != OK
        self.tally.tokens += max(0, record.tokens)

    async def _ask(self, prompt: Prompt, new: int) -> RequestResult:
        try:
            async with asyncio.timeout(self._pace.timeout):
                return await self._caller.send(prompt, new)
        except TimeoutError:
            return RequestResult(status="timeout")
        except OSError as error:
            return RequestResult(status=f"connection: {error.strerror or error}"[:80])

    def _record(self, job: PlannedRequest, heard: RequestResult, due: float, sent: float) -> LoadRecord:
        # Where the server was not asked to count, eos was to be ignored: then a good end is a full one.
        tokens = job.new if heard.tokens < 0 and heard.status == OK else heard.tokens
        return LoadRecord(
            index=job.index,
            due=due,
            sent=sent,
            ended=self._now(),
            status=heard.status,
            times=[at - self._start for at in heard.times],
            tokens=max(0, tokens),
            prompt_tokens=heard.prompt_tokens if heard.prompt_tokens >= 0 else job.prompt,
            frames=heard.frames,
            size=heard.size,
            detail=heard.detail,
        )

    async def _until(self, due: float) -> None:
        # A loop's timers may go off a little early.
        while (left := due - self._now()) > 0:  # noqa: ASYNC110 - time is no event
            await asyncio.sleep(left)

    def _now(self) -> float:
        return perf_counter() - self._start
