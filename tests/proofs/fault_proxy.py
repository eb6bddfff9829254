"""An HTTP proxy before an object store, that counts requests and spoils answers as it is told. On loopback."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple, Self

import httpx

_HOP_HEADERS = {"connection", "keep-alive", "transfer-encoding", "content-encoding", "content-length"}
_ANSWERS = {403: "Forbidden", 404: "Not Found", 500: "Internal Server Error", 503: "Service Unavailable"}


class ProxiedRequest(NamedTuple):
    """A request that came: its method, its path with the query, and its headers in lower case."""

    method: str
    path: str
    headers: dict[str, str]

    @property
    def is_listing(self) -> bool:
        return "list-type=2" in self.path or "comp=list" in self.path or self.path.partition("?")[0].endswith("/o")


@dataclass
class Fault:
    """What becomes of the requests that `of` chooses, of so many of them. `status` answers at once; `delay` seconds
    pass before each; of the body only the first `cut` bytes come before the connection ends; `etag` is told in place of
    the object's; `before` is called first."""

    of: Callable[[ProxiedRequest], bool] = lambda request: True
    times: int = 1 << 30
    status: int = 0
    delay: float = 0.0
    cut: int | None = None
    etag: str = ""
    before: Callable[[], None] = lambda: None


@dataclass
class FaultProxy:
    """A proxy of the server at `target`, for the time of a block; `url` is its own. With `away` connections are closed
    unanswered."""

    target: str
    requests: list[ProxiedRequest] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    away: bool = False
    url: str = ""

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    @contextmanager
    def fault(self, fault: Fault) -> Iterator[Fault]:
        """The fault, for the time of a block."""
        self.faults.append(fault)
        try:
            yield fault
        finally:
            self.faults.remove(fault)

    @property
    def listings(self) -> int:
        return sum(request.is_listing for request in self.requests)

    @property
    def reads(self) -> int:
        return len(self.requests) - self.listings

    async def _start(self) -> None:
        self._client = httpx.AsyncClient(base_url=self.target, timeout=60)
        self._connections: set[asyncio.Task[None]] = set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _stop(self) -> None:
        self._server.close()
        connections = [*self._connections]
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        await self._client.aclose()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while not self.away and await self._answer(reader, writer):
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError, httpx.HTTPError):
            pass
        finally:
            self._connections.discard(task)
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection stays open."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {key.lower(): value for key, _, value in (line.partition(": ") for line in head[1:-2])}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        request = ProxiedRequest(method, path, headers)
        self.requests.append(request)
        fault = next((each for each in self.faults if each.times > 0 and each.of(request)), None) or Fault()
        fault.times -= 1
        fault.before()
        await asyncio.sleep(fault.delay)
        if self.away:
            return False
        if fault.status:
            writer.write(f"HTTP/1.1 {fault.status} {_ANSWERS[fault.status]}\r\nContent-Length: 0\r\n\r\n".encode())
            return True
        kept = {key: value for key, value in headers.items() if key not in ("connection", "content-length")}
        answer = await self._client.request(method, path, headers=kept, content=body)
        return _write(writer, answer, fault, method == "HEAD")


def _write(writer: asyncio.StreamWriter, answer: httpx.Response, fault: Fault, head_only: bool) -> bool:
    headers = {key: value for key, value in answer.headers.items() if key not in _HOP_HEADERS}
    headers["content-length"] = answer.headers.get("content-length", "0") if head_only else str(len(answer.content))
    if fault.etag:
        headers["etag"] = f'"{fault.etag}"'
    lines = [f"HTTP/1.1 {answer.status_code} {answer.reason_phrase}", *(f"{key}: {headers[key]}" for key in headers)]
    writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
    writer.write(answer.content if fault.cut is None else answer.content[: fault.cut])
    return fault.cut is None
