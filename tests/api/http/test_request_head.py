"""What is refused below the application, on real connections: framing errors, heads without end, control characters."""

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from charonia.api.api_keys import Keyring, Tenant
from charonia.api.app import all_routes, build_app
from charonia.api.header_rules import APIS
from charonia.api.http.request_head import MAX_HEAD_BYTES, MAX_HEADERS
from charonia.api.http.rules import HttpRules
from charonia.api.http.server import HttpServer
from charonia.api.metadata import ServerInfo
from charonia.cli.options import HttpOptions
from charonia.cli.plan import parse_http_rules

CONTROL = ("%0a", "%0A/x", "%00", "%c2%85")
SUFFIXES = (*CONTROL, "/", "%20", "%2f", ";", "?x=%0a")
RESTRICTED = parse_http_rules(HttpOptions(http_restricted_api=(f"{','.join(APIS)}:secret=word",)))
KEYS = Keyring([("k", Tenant("alice"))])


async def answer(port: int, *pieces: bytes) -> tuple[int, dict[str, str], Any]:
    """Status, headers and JSON of what is said to these."""
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0)
        status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await reader.readexactly(int(headers["content-length"]))
        writer.close()
    return int(status.split()[1]), headers, json.loads(body) if body.startswith(b"{") else body


async def served(gateway: Any, rules: HttpRules, keys: Keyring | None = None) -> AsyncIterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        server = HttpServer(build_app(gateway, ServerInfo(), keys, rules), sock, access_log=False)
        await server.start()
        yield sock.getsockname()[1]
        await server.stop()


@pytest.fixture
async def http(gateway: Any) -> AsyncIterator[int]:
    async for port in served(gateway, HttpRules()):
        yield port


@pytest.fixture
async def restricted(gateway: Any) -> AsyncIterator[int]:
    async for port in served(gateway, RESTRICTED):
        yield port


@pytest.fixture
async def keyed(gateway: Any) -> AsyncIterator[int]:
    async for port in served(gateway, HttpRules(), KEYS):
        yield port


def paths(gateway: Any) -> list[tuple[str, str]]:
    """Method and path of every route, names filled in."""
    routes = all_routes(gateway, ServerInfo(), HttpRules())
    return [
        (
            next(iter(sorted(route.methods - {"HEAD"}))),
            re.sub(r"\{version:int\}", "1", re.sub(r"\{\w+(:path)?\}", "llm", route.path)),
        )
        for route in routes
        if route.methods
    ]


async def test_no_suffix_leads_past_a_restriction(restricted: int, gateway: Any) -> None:
    for method, path in paths(gateway):
        for suffix in ("", *SUFFIXES):
            status, _, _ = await answer(
                restricted, f"{method} {path}{suffix} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n".encode()
            )
            assert status in ((400,) if suffix in CONTROL else (403, 404)), (method, path, suffix)
            assert suffix or status == 403, (method, path)
    assert (gateway.asked, gateway.loads, gateway.tokenized) == ([], [], [])


async def test_routes_match_to_the_very_end(gateway: Any) -> None:
    for route in all_routes(gateway, ServerInfo(), HttpRules()):
        last = route.path.rpartition("/")[2]
        if "{" not in last:
            path = re.sub(r"\{version:int\}", "1", re.sub(r"\{\w+\}", "x", route.path))
            assert route.path_regex.match(path)
            assert not route.path_regex.match(f"{path}\n"), route.path


def head(*lines: bytes, path: bytes = b"/v2/health/live") -> bytes:
    return b"\r\n".join([b"GET %b HTTP/1.1" % path, b"host: x", *lines, b"", b""])


LONG = b"x-long: " + b"y" * MAX_HEAD_BYTES
MANY = [b"x-%d: y" % number for number in range(MAX_HEADERS)]
CHUNKED = b"POST /v2/logging HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "pieces",
    [
        [head(LONG)],
        [head(LONG)[at : at + 5000] for at in range(0, MAX_HEAD_BYTES, 5000)],
        [b"GET / HTTP/1.1\r\nhost: x\r\nx: "] + [b"y" * 100_000] * 20,  # without end
        [head(*MANY)],
        [head(path=b"/" + b"y" * MAX_HEAD_BYTES)],
        [CHUNKED, b"0\r\nx: "] + [b"y" * 100_000] * 20,
        [CHUNKED, b"5;x="] + [b"y" * 100_000] * 20,
    ],
    ids=["one piece", "pieces", "endless", "many headers", "path", "trailer", "extension"],
)
async def test_a_head_has_an_end(http: int, pieces: list[bytes]) -> None:
    status, headers, body = await answer(http, *pieces)
    assert (status, headers["connection"]) == (431, "close")
    assert body == {"error": "the request's head exceeds the maximum of 65536 bytes or 128 headers"}


async def test_as_much_as_there_may_be_is_read(http: int) -> None:
    long = head(LONG[: MAX_HEAD_BYTES - 100])
    for pieces in ([head(*MANY[:-1])], [long], [long[:40_000], long[40_000:]]):
        assert (await answer(http, *pieces))[0] == 200


async def test_a_long_body_before_a_head_is_not_counted_with_it(port: int) -> None:
    body = b"x" * 200_000
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%bGET / HTTP/1.1\r\nhost: x\r\nx: %b"
            % (len(body), body, b"y" * 60_000)
        )
        assert b" 200 " in await reader.readuntil(b"\r\n\r\nok")
        writer.write(b"\r\n\r\n")
        assert b" 200 " in await reader.readuntil(b"\r\n\r\nok")
        writer.close()


@pytest.fixture
def echo() -> Any:
    async def ok(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    return ok


ENCODINGS = [b"gzip", b"gzip, chunked", b"chunked, chunked", b"chunked\r\ntransfer-encoding: chunked"]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("more", [b"", b"content-length: 2\r\n"])
async def test_a_body_in_another_encoding_than_in_chunks(http: int, encoding: bytes, more: bytes) -> None:
    asked = b"POST /v2/logging HTTP/1.1\r\nhost: x\r\n%btransfer-encoding: %b\r\n\r\n{}" % (more, encoding)
    status, headers, body = await answer(http, asked)
    assert (status, headers["connection"]) == (400, "close")
    assert "Transfer-Encoding" in body["error"]


@pytest.mark.parametrize(
    "wrong",
    [
        b"this is no request\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        CHUNKED + b"zz\r\n",
        b"CONNECT there:1 HTTP/1.1\r\n\r\n",
        b"GET /v2/health/live HTTP/1.1\r\n\r\n",
        head(b"host: y"),
        head(b"Host: x"),
        b"GET /v2/health/live\r\n\r\n",
        b"GET /v2/health/live HTTP/0.9\r\nhost: x\r\n\r\n",
        b"GET /v2/health/live HTTP/1.2\r\nhost: x\r\n\r\n",
        b"GET /v2/health/live HTTP/2.0\r\nhost: x\r\n\r\n",
        b"GET /v2/health/live HTTP/1.0\r\nhost: x\r\nhost: x\r\n\r\n",
        CHUNKED.replace(b"chunked", b"gzip, chunked") + b"0\r\n\r\n",
        CHUNKED.replace(b"chunked", b"chunked, chunked") + b"0\r\n\r\n",
        CHUNKED.replace(b"chunked", b"gzip"),
        CHUNKED.replace(b"chunked", b"chunked\r\ntransfer-encoding: chunked") + b"0\r\n\r\n",
        CHUNKED.replace(b"chunked", b"\x0bchunked") + b"0\r\n\r\n",
        CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + b"0\r\n\r\n",
        head(b"te: chunked, gzip"),
    ],
)
async def test_what_is_no_http_is_told_in_json(http: int, wrong: bytes) -> None:
    status, headers, body = await answer(http, wrong)
    assert (status, headers["content-type"], headers["connection"]) == (400, "application/json", "close")
    said, _, reason = body["error"].partition(": ")
    assert (said, bool(reason)) == ("Invalid HTTP request received", True)


@pytest.mark.parametrize(
    "right",
    [
        head(b"te: trailers"),
        head(b"TE: deflate,gzip;q=0.3", b"connection: te"),
        b"GET /v2/health/live HTTP/1.0\r\n\r\n",
        b"GET /v2/health/live HTTP/1.1\r\nhost:\r\n\r\n",
        b"POST /v2/repository/index HTTP/1.1\r\nhost: x\r\ntransfer-encoding: Chunked \r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    ],
)
async def test_what_only_looks_odd_is_answered(http: int, right: bytes) -> None:
    assert (await answer(http, right))[0] == 200


async def test_two_keys_are_none(keyed: int, gateway: Any) -> None:
    post = b"POST /v2/models/llm/generate HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n%b\r\n{}"
    one = b"authorization: Bearer k\r\n"
    assert (await answer(keyed, post % one))[0] == 200
    status, _, body = await answer(keyed, post % (one + b"Authorization: Bearer x\r\n"))
    assert (status, body) == (400, {"error": "2 Authorization headers: send one"})
    assert len(gateway.asked) == 1
