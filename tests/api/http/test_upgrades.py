"""Requests that offer another protocol, and those of HTTP/1.0, on real connections."""

import asyncio
import logging
from typing import Any

import pytest

OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
CLOSE = b"connection: close\r\n"


class Echo:
    """Answers with what it heard, in two parts; says how long they are if `measured`."""

    measured = True

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        names = b",".join(name for name, _ in scope["headers"])
        said = b"%b %b %b %b" % (scope["method"].encode(), scope["path"].encode(), names, body)
        headers = [(b"content-length", b"%d" % len(said))] if self.measured else []
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": said[:5], "more_body": True})
        await send({"type": "http.response.body", "body": said[5:]})


@pytest.fixture
def echo() -> Echo:
    return Echo()


async def said(port: int, *pieces: bytes) -> list[bytes]:
    """The answers of a connection to which these are sent one by one, the last of which closes it."""
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0.002)
            return (await reader.read()).split(b"HTTP/1.1 ")[1:]
        finally:
            writer.close()


def bodies(answers: list[bytes]) -> list[bytes]:
    return [answer.partition(b"\r\n\r\n")[2] for answer in answers]


def post(path: bytes, body: bytes, more: bytes = b"") -> bytes:
    return b"POST %b HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n%b" % (path, more, len(body), body)


@pytest.mark.parametrize("size", [7, 1000])
async def test_a_request_that_offers_another_protocol_is_answered_like_any_other(port: int, size: int) -> None:
    chunked = (
        post(b"/c", b"", OFFER).replace(b"content-length: 0", b"transfer-encoding: chunked") + b"3\r\nxyz\r\n0\r\n\r\n"
    )
    whole = post(b"/a", b"abc", OFFER) + chunked + post(b"/d", b"", OFFER) + post(b"/e", b"z", CLOSE)
    answers = await said(port, *(whole[begin : begin + size] for begin in range(0, len(whole), size)))
    assert bodies(answers) == [
        b"POST /a host,connection,content-length abc",
        b"POST /c host,connection,transfer-encoding xyz",
        b"POST /d host,connection,content-length ",
        b"POST /e host,connection,content-length z",
    ]


async def test_nobody_is_told_to_install_websockets(port: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    offer = b"GET / HTTP/1.1\r\nhost: x\r\nConnection: close, Upgrade\r\nUpgrade: websocket\r\n\r\n"
    assert bodies(await said(port, offer)) == [b"GET / host,connection "]
    assert not caplog.records


async def test_many_offers_at_once(port: int) -> None:
    answers = await said(port, post(b"/a", b"", OFFER) * 3000 + post(b"/e", b"", CLOSE))
    assert len(answers) == 3001


async def test_who_wants_a_tunnel_is_refused(port: int) -> None:
    [answer] = await said(port, b"CONNECT elsewhere:80 HTTP/1.1\r\nhost: elsewhere\r\n\r\n")
    assert answer.startswith(b"400 ")


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize("keep", [b"", b"connection: keep-alive\r\n"])
async def test_a_client_of_http_1_0_gets_no_chunks(port: int, echo: Echo, measured: bool, keep: bytes) -> None:
    echo.measured = measured
    [answer] = await said(port, post(b"/a", b"abc", keep).replace(b"HTTP/1.1", b"HTTP/1.0"))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert body.endswith(b" abc")
    assert body.startswith(b"POST /a ")
    assert b"transfer-encoding" not in head
    assert head.endswith(b"\r\nconnection: close")
