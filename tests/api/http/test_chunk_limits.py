"""Requests in many pieces, on a real connection: how many there may be, and what becomes of the connection."""

import asyncio
from typing import Any

import pytest

from charonia.api.http.request_head import MAX_CHUNKS

TEXT = b'{"error":"Chunked request body exceeds maximum of 65536 non-empty chunks. Send fewer or larger HTTP chunks."}'


class Echo:
    """Answers with the length of the body; counts clients that left. With `early`, answers before it has the body."""

    def __init__(self) -> None:
        self.left = 0
        self.early = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self.early:
            await self.answer(send, b"early")
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left += 1
                return
            size += len(message.get("body", b""))
            more = message.get("more_body", False)
        if not self.early:
            await self.answer(send, str(size).encode())

    async def answer(self, send: Any, body: bytes) -> None:
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": self.early})


@pytest.fixture
def echo() -> Echo:
    return Echo()


HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


async def said(port: int, *bodies: bytes) -> tuple[list[bytes], bool]:
    """The answers to requests on one connection, and whether it was closed after them."""
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            got = []
            for body in bodies:
                writer.write(HEAD + body)
                got.append(await answer(reader))
            writer.write_eof()
            return got, await reader.read() == b""
        finally:
            writer.close()


async def answer(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line.split(b":")[1]) for line in head.splitlines() if line.lower().startswith(b"content-length"))
    return head.split(b"\r\n")[0] + b" " + await reader.readexactly(length)


async def test_as_many_as_there_may_be_are_read(port: int) -> None:
    body = b"1\r\nx\r\n" * MAX_CHUNKS + END
    got, _ = await said(port, body, b"2\r\nab\r\n" + END, body)
    assert got == [b"HTTP/1.1 200 OK 65536", b"HTTP/1.1 200 OK 2", b"HTTP/1.1 200 OK 65536"]


@pytest.mark.parametrize("rest", [END, b"1\r\nx\r\n" * 100_000 + END], ids=["one", "many"])
async def test_one_more_is_refused_and_the_connection_closes(port: int, echo: Echo, rest: bytes) -> None:
    got, closed = await said(port, b"1\r\nx\r\n" * (MAX_CHUNKS + 1) + rest)
    assert got == [b"HTTP/1.1 400 Bad Request " + TEXT]
    assert closed
    assert echo.left == 1


async def test_an_answer_that_has_begun_is_not_mixed_with_another(port: int, echo: Echo) -> None:
    echo.early = True
    got, closed = await said(port, b"1\r\nx\r\n" * (MAX_CHUNKS + 1) + END)
    assert got == [b"HTTP/1.1 200 OK early"]
    assert closed
