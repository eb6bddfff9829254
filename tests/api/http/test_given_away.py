"""Connections whose clients are asked to connect again: to a process that has taken the port over."""

import asyncio
import socket

from starlette.types import Receive, Scope, Send

from charonia.api.http.server import HttpServer

ASK = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
HEAD = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}


async def test_each_ends_with_its_next_response_which_says_so() -> None:
    go_on = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(HEAD)
        if scope["path"] == "/slow":
            await go_on.wait()
        await send({"type": "http.response.body", "body": b"ok"})

    async def answer(reader: asyncio.StreamReader) -> bytes:
        return await reader.readuntil(b"\r\n\r\n") + await reader.readexactly(2)

    with socket.create_server(("127.0.0.1", 0)) as sock:
        server, address = HttpServer(app, sock, access_log=False), sock.getsockname()
        await server.start()
        async with asyncio.timeout(30):
            idle, running, pipelining = [await asyncio.open_connection(*address) for _ in range(3)]
            for reader, writer in (idle, pipelining):
                writer.write(ASK)
                assert b"close" not in await answer(reader)
            running[1].write(ASK.replace(b"/ ", b"/slow "))
            head = await running[0].readuntil(b"\r\n\r\n")
            server.give_connections_away()
            go_on.set()
            assert await running[0].readexactly(2) == b"ok"  # it had begun, and said nothing of an end
            assert b"close" not in head
            running[1].write(ASK)
            pipelining[1].write(2 * ASK)
            assert b"close" not in await answer(pipelining[0])  # there is one behind it
            for reader, writer in (running, pipelining):
                assert b"connection: close" in await answer(reader)
                assert await reader.read() == b""
                writer.close()
            late = await asyncio.open_connection(*address)
            for _ in range(2):
                late[1].write(ASK)
                assert b"close" not in await answer(late[0])
            late[1].close()
            idle[1].write(ASK)  # however long that takes
            assert b"connection: close" in await idle[0].read()
            idle[1].close()
        await server.stop()
