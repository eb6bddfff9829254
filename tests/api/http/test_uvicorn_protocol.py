"""What our HTTP protocol does in another way than uvicorn's: whole answers, tasks only for who waits, one timer."""

import asyncio
import gc
import logging
import socket
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from charonia.api.http.error_responses import BodyTimeout, error_response
from charonia.api.http.request_cycle import (
    HttpServerState,
    add_response_header,
    chunk_writer,
    send_complete_response,
    take_complete_body,
)
from charonia.api.http.server import HttpServer, check_uvicorn
from charonia.api.http.uvicorn_protocol import HttpProtocol
from charonia.core.errors import Unsupported

HEAD = b"x-one: 1\r\ncontent-length: 4\r\n"


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False
        self.reading_paused = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)}.get(name, default)

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def pause_reading(self) -> None:
        self.reading_paused = True

    def resume_reading(self) -> None:
        self.reading_paused = False

    def get_write_buffer_size(self) -> int:
        return 0

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        pass


class Clock:
    """What the protocol asks of a loop, in a time of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Callable[[], None], asyncio.TimerHandle]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, call: Callable[[], None]) -> Any:
        handle = asyncio.TimerHandle(self.now + delay, call, (), asyncio.get_running_loop())
        self.timers.append((self.now + delay, call, handle))
        return handle

    def pass_to(self, now: float) -> None:
        self.now = now
        due = [timer for timer in self.timers if timer[0] <= now]
        self.timers = [timer for timer in self.timers if timer[0] > now]
        for _, call, handle in due:
            if not handle.cancelled():
                call()


class App:
    """Answers with the body, as soon as it may."""

    def __init__(self) -> None:
        self.scopes: list[Any] = []
        self.tasks: list[Any] = []
        self.gate: asyncio.Event | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        body = take_complete_body(scope, receive)
        if body is None:
            body = await body_of(receive)
        if self.gate is not None:
            async with asyncio.timeout(60):
                await self.gate.wait()
            self.tasks.append(asyncio.current_task())
        if not send_complete_response(scope, send, HEAD, (body[:2], memoryview(body)[2:])):
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
            await send({"type": "http.response.body", "body": body})


async def body_of(receive: Any) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message["body"]
        if not message["more_body"]:
            return body


class Connection:
    def __init__(self, app: Any) -> None:
        config = uvicorn.Config(
            app, http=HttpProtocol, ws="none", lifespan="off", log_config=None, timeout_keep_alive=9
        )
        config.load()
        self.clock, self.transport, state = Clock(), Transport(), HttpServerState()
        self.protocol = HttpProtocol(config, state, {}, self.clock)  # type: ignore[arg-type]
        self.protocol.connection_made(self.transport)
        self.tasks = state.tasks

    async def send(self, *pieces: bytes) -> None:
        """As a loop delivers them: in no task."""
        for piece in pieces:
            asyncio.get_running_loop().call_soon(self.protocol.data_received, piece)
        await turns()

    @property
    def answers(self) -> list[bytes]:
        """Bodies of 4 bytes."""
        return [each.split(b"\r\n\r\n")[1] for each in self.transport.written.split(b"HTTP/1.1 200 OK\r\n")[1:]]


def request(body: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join(
        [b"POST /a%20b?c=d HTTP/1.1", b"host: x", b"content-length: %d" % len(body), *headers, b"", body]
    )


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_does_not_wait_is_answered_in_place() -> None:
    app = App()
    connection = Connection(app)
    await connection.send(request(b"abcd", b"X-Y: z"))
    assert connection.transport.written == b"HTTP/1.1 200 OK\r\n" + HEAD + b"\r\nabcd"
    assert not connection.tasks
    [scope] = app.scopes
    assert (scope["method"], scope["path"], scope["raw_path"]) == ("POST", "/a b", b"/a%20b")
    assert (scope["query_string"], scope["http_version"], scope["scheme"]) == (b"c=d", "1.1", "http")
    assert scope["headers"] == [(b"host", b"x"), (b"content-length", b"4"), (b"x-y", b"z")]


async def test_what_waits_becomes_a_task_that_is_known_and_can_be_cancelled() -> None:
    app = App()
    app.gate = asyncio.Event()
    connection = Connection(app)
    await connection.send(request(b"abcd"), request(b"efgh"))
    assert not connection.answers
    [task] = connection.tasks
    app.gate.set()
    await turns()
    assert app.tasks[0] is task
    assert connection.answers == [b"abcd", b"efgh"]
    assert not connection.tasks


async def test_a_body_in_pieces() -> None:
    app = App()
    connection = Connection(app)
    whole = request(b"abcd")
    await connection.send(whole[:10], whole[10:-3], whole[-3:-1])
    assert not connection.answers
    await connection.send(whole[-1:])
    assert connection.answers == [b"abcd"]


@pytest.mark.parametrize("cuts", [(), (-12,), (-12, -7), (40,)])
async def test_chunks_count_and_not_the_length_beside_them(cuts: tuple[int, ...]) -> None:
    app = App()
    connection = Connection(app)
    whole = request(b"4\r\nabcd\r\n0\r\n\r\n", b"Transfer-Encoding: chunked")
    pieces = [whole[begin:end] for begin, end in zip((0, *cuts), (*cuts, None), strict=True)]
    await connection.send(*pieces)
    assert connection.answers == [b"abcd"]
    assert (b"transfer-encoding", b"chunked") in app.scopes[0]["headers"]
    assert b"content-length" not in dict(app.scopes[0]["headers"])
    assert connection.transport.closed, "a proxy may have taken what follows for another request"


async def test_a_client_that_waits_for_permission_gets_it() -> None:
    connection = Connection(App())
    whole = request(b"abcd", b"expect: 100-continue")
    await connection.send(whole[:-4])
    assert connection.transport.written == b"HTTP/1.1 100 Continue\r\n\r\n"
    await connection.send(whole[-4:])
    assert connection.answers == [b"abcd"]


async def test_requests_that_came_together_are_answered_in_order() -> None:
    connection = Connection(App())
    await connection.send(request(b"abcd") + request(b"efgh") + request(b"ijkl"))
    assert connection.answers == [b"abcd", b"efgh", b"ijkl"]


@pytest.mark.parametrize("last", [request(b"abcd", b"connection: close"), request(b"abcd").replace(b"1.1", b"1.0")])
async def test_the_last_answer_says_so(last: bytes) -> None:
    connection = Connection(App())
    await connection.send(last)
    assert b"connection: close\r\n\r\nabcd" in connection.transport.written
    assert connection.transport.closed


async def test_who_does_not_read_is_not_answered_more() -> None:
    connection = Connection(App())
    connection.protocol.pause_writing()
    await connection.send(request(b"abcd"))
    assert not connection.answers
    connection.protocol.resume_writing()
    await turns()
    assert connection.answers == [b"abcd"]


async def test_who_left_gets_nothing() -> None:
    app = App()
    app.gate = asyncio.Event()
    connection = Connection(app)
    await connection.send(request(b"abcd"))
    connection.protocol.connection_lost(None)
    app.gate.set()
    await turns()
    assert connection.transport.written == b""
    assert not connection.tasks


@pytest.mark.parametrize("behind", [request(b"efgh"), request(b"efgh")[:-2]], ids=["whole", "a part"])
async def test_who_leaves_is_noticed_though_another_request_waits(behind: bytes) -> None:
    running, left = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await body_of(receive)
        running.set()
        assert (await receive())["type"] == "http.disconnect"
        left.set()

    with socket.create_server(("127.0.0.1", 0)) as sock:
        server = HttpServer(app, sock, access_log=False)
        await server.start()
        async with asyncio.timeout(30):
            _, writer = await asyncio.open_connection(*sock.getsockname())
            writer.write(request(b"abcd"))
            await running.wait()
            running.clear()
            writer.write(behind)
            writer.close()
            await left.wait()
        await server.stop()
    assert not running.is_set(), "the request behind it is not begun"


async def test_all_requests_of_who_left_are_forgotten() -> None:
    app = App()
    app.gate = asyncio.Event()
    connection = Connection(app)
    await connection.send(request(b"abcd"), request(b"efgh"), request(b"ijkl"))
    connection.protocol.connection_lost(None)
    app.gate.set()
    await turns()
    assert (connection.transport.written, len(app.scopes)) == (b"", 1)
    assert not connection.tasks


BROKEN = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n4\r\nabcdzz"


async def test_a_broken_request_is_not_told_within_the_response_before_it() -> None:
    app = Streaming()
    connection = Connection(app)
    await connection.send(request(b"abcd"))
    app.cycle.write_chunk(b"one")
    await turns()
    written = connection.transport.written
    await connection.send(request(b"efgh"), BROKEN)
    assert connection.transport.closed
    app.cycle.write_chunk(b"two")
    app.over.set()
    await turns()
    assert connection.transport.written == written
    assert not connection.tasks


@pytest.mark.parametrize("together", [False, True])
async def test_a_broken_request_is_the_end_of_those_before_it_that_have_no_response(together: bool) -> None:
    app = App()
    app.gate = asyncio.Event()
    connection = Connection(app)
    pieces = [request(b"abcd"), request(b"efgh"), BROKEN]
    await connection.send(*([b"".join(pieces)] if together else pieces))
    written = connection.transport.written
    assert written.startswith(b"HTTP/1.1 400 ")
    assert connection.transport.closed
    app.gate.set()
    await turns()
    assert connection.transport.written == written
    assert len(app.scopes) == (not together)
    assert not connection.tasks


async def test_of_many_requests_at_a_time_some_are_not_read() -> None:
    app = App()
    app.gate = asyncio.Event()
    connection = Connection(app)
    read = 0
    while not connection.transport.reading_paused:
        await connection.send(request(b"%04d" % read))
        read += 1
    assert 1 < read < 20
    app.gate.set()
    for _ in range(read):
        await turns()
    assert not connection.transport.reading_paused
    assert connection.answers == [b"%04d" % number for number in range(read)]


class Streaming:
    """Sends parts of a response when told to."""

    def __init__(self, *headers: tuple[bytes, bytes]) -> None:
        self.headers = headers
        self.send: Any = None
        self.over = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await body_of(receive)
        await send({"type": "http.response.start", "status": 200, "headers": self.headers})
        self.cycle, self.send = chunk_writer(scope, send), send
        await self.over.wait()
        await send({"type": "http.response.body", "body": b"end", "more_body": False})


async def test_parts_leave_in_order_however_they_are_sent() -> None:
    app = Streaming()
    connection = Connection(app)
    await connection.send(request(b"abcd"))
    written = connection.transport.written
    assert app.cycle is not None
    app.cycle.write_chunk(b"one")
    app.cycle.write_chunk(b"")
    await app.send({"type": "http.response.body", "body": b"two", "more_body": True})
    assert connection.transport.written == written + b"3\r\none\r\n"
    app.over.set()
    await turns()
    assert connection.transport.written == written + b"3\r\none\r\n3\r\ntwo\r\n3\r\nend\r\n0\r\n\r\n"
    assert not app.cycle.takes_chunks


@pytest.mark.parametrize(("version", "end"), [(b"1.1", b"3\r\nend\r\n0\r\n\r\n"), (b"1.0", b"end")])
async def test_a_part_may_be_without_a_body(version: bytes, end: bytes) -> None:
    app = Streaming()
    connection = Connection(app)
    await connection.send(request(b"abcd").replace(b"HTTP/1.1", b"HTTP/" + version))
    written = connection.transport.written
    await app.send({"type": "http.response.body", "more_body": True})
    app.over.set()
    await turns()
    assert connection.transport.written == written + end


async def test_a_head_has_no_parts() -> None:
    app = Streaming((b"transfer-encoding", b"chunked"))
    connection = Connection(app)
    await connection.send(request(b"").replace(b"POST", b"HEAD"))
    written = connection.transport.written
    assert written.endswith(b"\r\n\r\n")
    await app.send({"type": "http.response.body", "body": b"one", "more_body": True})
    app.over.set()
    await turns()
    assert connection.transport.written == written


async def test_parts_wait_for_a_client_that_does_not_read() -> None:
    app = Streaming()
    connection = Connection(app)
    await connection.send(request(b"abcd"))
    assert app.cycle is not None
    assert app.cycle.takes_chunks
    connection.protocol.pause_writing()
    assert not app.cycle.takes_chunks
    sending = asyncio.create_task(app.send({"type": "http.response.body", "body": b"one", "more_body": True}))
    await turns()
    assert not sending.done()
    connection.protocol.resume_writing()
    await turns()
    assert connection.transport.written.endswith(b"3\r\none\r\n")
    connection.protocol.connection_lost(None)
    app.cycle.write_chunk(b"two")
    app.over.set()
    await turns()
    assert connection.transport.written.endswith(b"3\r\none\r\n")


async def test_the_access_log_is_what_is_wanted_now(caplog: pytest.LogCaptureFixture) -> None:
    connection = Connection(App())
    caplog.set_level(logging.WARNING, "uvicorn.access")
    await connection.send(request(b"abcd"))
    caplog.set_level(logging.INFO, "uvicorn.access")
    await connection.send(request(b"efgh", b"x-forwarded-for: 10.9.8.7"))
    assert connection.answers == [b"abcd", b"efgh"]
    assert [record.getMessage() for record in caplog.records] == ['10.9.8.7:0 - "POST /a%20b?c=d HTTP/1.1" 200']


async def test_only_an_idle_connection_is_closed_and_not_too_early() -> None:
    app = App()
    connection = Connection(app)
    await connection.send(request(b"abcd"))
    connection.clock.pass_to(5)
    await connection.send(request(b"abcd"))
    connection.clock.pass_to(10)
    assert not connection.transport.closed
    assert len(connection.clock.timers) == 1
    app.gate = asyncio.Event()
    await connection.send(request(b"abcd"))
    connection.clock.pass_to(100)
    assert not connection.transport.closed
    app.gate.set()
    await turns()
    connection.clock.pass_to(108)
    assert not connection.transport.closed
    connection.clock.pass_to(109)
    assert connection.transport.closed


@pytest.mark.parametrize("beginning", [b"", b"POST / HTTP/1.1\r\nhost: x\r\n"])
async def test_who_never_asks_is_not_waited_for(beginning: bytes) -> None:
    connection = Connection(App())
    await connection.send(*(beginning[at : at + 1] for at in range(len(beginning))))
    connection.clock.pass_to(8)
    assert not connection.transport.closed
    connection.clock.pass_to(9)
    assert connection.transport.closed


class Reading(App):
    """Answers with the body's number of KiB, in 4 digits; what is wrong with it as the server does."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            size = len(await body_of(receive)) >> 10
        except BodyTimeout as error:
            await error_response(error, scope["path"])(scope, receive, send)
        else:
            send_complete_response(scope, send, HEAD, (b"%04d" % size,))


PIECE = bytes(60 << 10)


async def test_a_body_that_gets_on_may_take_its_time() -> None:
    connection = Connection(Reading())
    whole = request(PIECE * 4)
    await connection.send(whole[: -3 * len(PIECE)])
    for _ in range(3):
        connection.clock.pass_to(connection.clock.now + 59)
        await connection.send(PIECE)
    assert connection.answers == [b"0240"]


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_trickles_is_ended(chunked: bool) -> None:
    """29 KiB in 30 s, after others had come fast: an announced body, and one in chunks."""
    connection = Connection(Reading())
    if chunked:
        await connection.send(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n", b"f000\r\n" + PIECE)
        pieces = [b"\r\n3df\r\n" + bytes(0x3DF)] * 30
    else:
        await connection.send(request(PIECE * 2)[: -len(PIECE)])
        pieces = [bytes(991)] * 30
    for seconds in (29, 1):  # fast enough, with the first piece
        connection.clock.pass_to(connection.clock.now + seconds)
        await connection.send(pieces[0])
    for piece in pieces[:-1]:
        connection.clock.pass_to(connection.clock.now + 1)
        await connection.send(piece)
    assert not connection.transport.written
    connection.clock.pass_to(connection.clock.now + 1)
    await connection.send(pieces[-1])
    assert connection.transport.written.startswith(b"HTTP/1.1 408 ")
    assert b"the request body comes too slowly: 29730 bytes in 30 s" in connection.transport.written
    assert connection.transport.closed


async def test_a_body_that_waits_for_the_application_does_not_trickle() -> None:
    """Only the time counts in which the client is waited for."""
    connection = Connection(App())
    busy = asyncio.Event()

    async def read_slowly(scope: Any, receive: Any, send: Any) -> None:
        for _ in range(3):
            await receive()
            await busy.wait()
            busy.clear()
        send_complete_response(scope, send, HEAD, (b"done",))

    connection.protocol.app = connection.protocol.config.app = read_slowly  # type: ignore[assignment]
    whole = request(b"abc")
    await connection.send(whole[:-2])
    for at in (-2, -1, 0):
        connection.clock.pass_to(connection.clock.now + 100)
        if at:
            connection.protocol.data_received(whole[at : at + 1 or None])
        busy.set()
        await turns()
    assert connection.answers == [b"done"]


async def test_a_body_that_comes_to_a_halt_is_given_up() -> None:
    connection = Connection(Reading())
    await connection.send(request(b"abcd")[:-1])
    connection.clock.pass_to(59)
    await turns()
    assert not connection.transport.closed
    connection.clock.pass_to(60)
    await turns()
    assert connection.transport.written.startswith(b"HTTP/1.1 408 ")
    assert b"nothing more of it came for 60 s" in connection.transport.written
    assert connection.transport.closed


async def test_what_comes_in_the_very_moment_comes_in_time() -> None:
    connection = Connection(Reading())
    whole = request(PIECE * 3)
    await connection.send(whole[: -2 * len(PIECE)])
    connection.clock.pass_to(60)
    connection.protocol.data_received(PIECE)
    await turns()
    connection.clock.pass_to(119)
    await connection.send(PIECE)
    assert connection.answers == [b"0180"]


async def test_an_application_that_fails_is_answered_for() -> None:
    class Failing(App):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            raise ValueError

    connection = Connection(Failing())
    await connection.send(request(b"abcd"))
    assert connection.transport.written.startswith(b"HTTP/1.1 500 ")


@pytest.mark.parametrize("waits", [False, True])
async def test_a_request_leaves_nothing_for_the_garbage_collector(waits: bool) -> None:
    app = App()
    connection = Connection(app)

    async def ask(times: int) -> None:
        for _ in range(times):
            app.gate = asyncio.Event() if waits else None
            await connection.send(request(b"abcd"))
            if app.gate is not None:
                app.gate.set()
                await turns()
        app.scopes.clear()
        app.tasks.clear()

    await ask(3)
    while gc.collect():  # what earlier tests left may leave more behind when it goes
        pass
    gc.disable()
    try:
        await ask(300)
        assert gc.collect() < 300
    finally:
        gc.enable()
    assert len(connection.answers) == 303


@pytest.mark.parametrize("end", ["eof_received", "shutdown"])
async def test_an_answer_that_waits_for_others_leaves_before_the_connection_ends(end: str) -> None:
    connection = Connection(App())
    asyncio.get_running_loop().call_soon(connection.protocol.data_received, request(b"abcd"))
    asyncio.get_running_loop().call_soon(getattr(connection.protocol, end))
    await asyncio.sleep(0)
    assert connection.answers == [b"abcd"]
    assert connection.transport.closed == (end == "shutdown")


async def test_no_refusal_overtakes_an_answer() -> None:
    connection = Connection(App())
    await connection.send(request(b"abcd"), b"this is no request\r\n\r\n")
    first, _, second = connection.transport.written.rpartition(b"HTTP/1.1 ")
    assert first.endswith(b"abcd")
    assert second.startswith(b"400 ")


@pytest.mark.parametrize("wrapped", ["send", "receive"])
async def test_middleware_that_replaces_a_channel_sees_every_message(wrapped: str) -> None:
    app, seen = App(), []

    async def middleware(scope: Any, receive: Any, send: Any) -> None:
        async def watched_send(message: Any) -> None:
            seen.append(message["type"])
            await send(message)

        async def watched_receive() -> Any:
            message = await receive()
            seen.append(message["type"])
            return message

        if wrapped == "send":
            await app(scope, receive, watched_send)
        else:
            await app(scope, watched_receive, send)

    connection = Connection(middleware)
    await connection.send(request(b"abcd"))
    assert connection.answers == [b"abcd"]
    expected = {"send": ["http.response.start", "http.response.body"], "receive": ["http.request"]}
    assert seen == expected[wrapped]


@pytest.mark.parametrize("under_another", [False, True])
async def test_a_header_that_middleware_adds_is_in_a_complete_response_too(under_another: bool) -> None:
    app = App()

    async def middleware(scope: Any, receive: Any, send: Any) -> None:
        async def other(message: Any) -> None:
            await send(message)

        await app(scope, receive, add_response_header(scope, other if under_another else send, b"x-two", b"2"))

    connection = Connection(middleware)
    await connection.send(request(b"abcd"))
    assert b"x-two: 2\r\n" in connection.transport.written
    assert connection.answers == [b"abcd"]
    assert (b"x-one: 1" in connection.transport.written) != under_another


def test_an_unknown_uvicorn_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_uvicorn()
    monkeypatch.delattr(HttpToolsProtocol, "on_response_complete")
    monkeypatch.setattr(RequestResponseCycle, "__init__", lambda self, scope: None)
    with pytest.raises(Unsupported, match=r"HttpToolsProtocol.on_response_complete.*the constructor of Request"):
        check_uvicorn()
