"""Where the files of images may come from: what is fetched, and every way into a network that is not."""

import asyncio
import base64
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from charonia.core.errors import InvalidArgument
from charonia.core.media import MediaSource
from charonia.core.media_models import MediaConfig
from charonia.media.addresses import is_public, parse_web_url, public_addresses
from charonia.media.limits import MediaLimits
from charonia.media.sources import MediaFiles
from charonia.media.web_fetch import WebFetch, resolve_host

PUBLIC = "93.184.216.34"
FILE = b"a picture"
FIELD = "messages[0].content[0].image_url"


class _Handler(BaseHTTPRequestHandler):
    """Answers `/file` and `/large`, redirects `/to/URL`, and lets `/slow` wait."""

    def do_GET(self) -> None:
        self.server.asked.append((self.headers["Host"], self.path))  # type: ignore[attr-defined]
        kind, _, rest = self.path[1:].partition("/")
        if kind == "to":
            self.send_response(302)
            self.send_header("Location", base64.urlsafe_b64decode(rest).decode())
            self.end_headers()
        elif kind == "loop":
            self.send_response(307)
            self.send_header("Location", self.path)
            self.end_headers()
        elif kind == "missing":
            self.send_error(404)
        else:
            self.send_response(200)
            if kind == "large":
                self.send_header("Content-Length", str(1 << 40))
            self.end_headers()
            self.answer(kind)

    def answer(self, kind: str) -> None:
        if kind == "file":
            self.wfile.write(FILE)
        while kind in ("endless", "slow"):
            try:
                self.wfile.write(b"x" * (1 << 16 if kind == "endless" else 1))
            except OSError:
                return
            if kind == "slow":
                time.sleep(0.01)

    def log_message(self, *_: Any) -> None:
        pass


class Web:
    """A server on loopback that stands for all of the internet, and the name server in front of it."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self._port = server.server_address[1]
        self.asked: list[tuple[str, str]] = []
        server.asked = self.asked  # type: ignore[attr-defined]
        self.names: dict[str, list[list[str]]] = {}
        """By host, its addresses at each look-up; the last ones stay."""
        self.connected: list[tuple[str, int]] = []

    def resolve(self, host: str, port: int) -> Sequence[str]:
        try:
            return [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, flags=socket.AI_NUMERICHOST)]
        except socket.gaierror:
            answers = self.names.get(host)
        if answers is None:
            raise socket.gaierror("unknown host")
        return answers.pop(0) if len(answers) > 1 else answers[0]

    def connect(self, address: str, port: int, seconds: float) -> socket.socket:
        self.connected.append((address, port))
        return socket.create_connection(("127.0.0.1", self._port), seconds)

    def fetch(self, url: str, domains: str = "*", max_bytes: int = 1 << 20, seconds: float = 20.0) -> bytes:
        names = frozenset(domains.split(","))
        return WebFetch(url, names, max_bytes, seconds, self.resolve, self.connect).run()


@pytest.fixture
def web() -> Iterator[Web]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    found = Web(server)
    found.names = {
        "pictures.example": [[PUBLIC]],
        "other.example": [["2606:2800:220:1::1"]],
        "inside.example": [["10.0.0.7"]],
    }
    yield found
    server.shutdown()
    thread.join()
    server.server_close()


def to(url: str) -> str:
    return f"http://pictures.example/to/{base64.urlsafe_b64encode(url.encode()).decode()}"


NOT_PUBLIC = (
    "0.0.0.0 0.1.2.3 10.0.0.1 10.255.255.255 100.64.0.1 127.0.0.1 127.1.2.3 169.254.169.254 172.16.0.1 172.31.255.255",
    "192.0.0.1 192.0.2.1 192.168.1.1 198.18.0.1 198.51.100.1 203.0.113.1 224.0.0.1 239.255.255.255",
    "240.0.0.1 255.255.255.255",
    ":: ::1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:169.254.169.254 ::127.0.0.1 ::a00:1",
    "64:ff9b::7f00:1 64:ff9b::a9fe:a9fe",
    "64:ff9b:1::a00:1 2002:7f00:1:: 2002:a00:1:: 2001:0:1:2:3:4:80ff:fffe 100::1 fc00::1 fd12:3456::1",
    "fe80::1 fe80::1%eth0",
    "fec0::1 ff02::1 2001:db8::1 2001:10::1 5f00::1",
)
"""By line, what is apart by spaces."""


@pytest.mark.parametrize("address", [address for line in NOT_PUBLIC for address in line.split()])
def test_an_address_that_is_not_public(address: str) -> None:
    assert not is_public(ip_address(address))
    target = parse_web_url("http://pictures.example/a", frozenset("*"))
    for answers in ([address], [PUBLIC, address]):
        with pytest.raises(InvalidArgument, match="is not on the public internet") as refusal:
            public_addresses(target, lambda *_: answers)  # noqa: B023
        assert address not in refusal.value.message


@pytest.mark.parametrize("address", [PUBLIC, "1.1.1.1", "2606:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101"])
def test_an_address_that_is(address: str) -> None:
    assert is_public(ip_address(address))


def test_a_file_comes_from_the_address_that_was_checked(web: Web) -> None:
    """A name server that answers with another one a moment later is not asked again."""
    web.names["pictures.example"] = [[PUBLIC], ["127.0.0.1"]]
    assert web.fetch("http://pictures.example/file") == FILE
    assert web.connected == [(PUBLIC, 80)]
    assert web.asked == [("pictures.example", "/file")]
    with pytest.raises(InvalidArgument, match="not on the public internet"):
        web.fetch("http://pictures.example/file")


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://pictures.example:80/file", "pictures.example"),
        ("https://pictures.example/file", "pictures.example"),
        ("https://pictures.example:443/file", "pictures.example"),
        ("https://[2606:2800:220:1::1]/file", "[2606:2800:220:1::1]"),
    ],
)
def test_a_host_is_named_without_its_schemes_port(
    web: Web, url: str, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signatures of presigned URLs are of that name. What a connection encrypts stays as it is here."""
    monkeypatch.setattr(ssl.SSLContext, "wrap_socket", lambda context, plain, **_: plain)
    assert web.fetch(url) == FILE
    assert web.asked == [(host, "/file")]


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/file",
        "http://2130706433/file",
        "http://0x7f000001/file",
        "http://0177.0.0.1/file",
        "http://127.1/file",
        "http://[::1]/file",
        "http://[::ffff:127.0.0.1]/file",
        "http://[0:0:0:0:0:ffff:a9fe:a9fe]/latest/meta-data",
        "http://169.254.169.254/latest/meta-data",
        "http://inside.example/file",
        "http://INSIDE.example./file",
        "https://inside.example/file",
    ],
)
def test_nothing_inside_is_reached(web: Web, url: str) -> None:
    for asked in (url, to(url)):
        with pytest.raises(InvalidArgument, match="not on the public internet"):
            web.fetch(asked)
    assert all(address == PUBLIC for address, _ in web.connected)
    assert [path.split("/")[1] for _, path in web.asked] == ["to"]


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://user:pass@pictures.example/file", "may not have credentials"),
        ("http://user@pictures.example/file", "may not have credentials"),
        ("http://@pictures.example/file", "may not have credentials"),
        ("http://pictures.example@inside.example/file", "may not have credentials"),
        ("http://pictures.example:8000/file", "port 8000 is not allowed"),
        ("https://pictures.example:80/file", "port 80 is not allowed"),
        ("http://pictures.example:99999/file", "cannot be read"),
        ("http://[::1/file", "cannot be read"),
        ("ftp://pictures.example/file", "no URL of http or https"),
        ("gopher://pictures.example/file", "no URL of http or https"),
        ("file:///etc/passwd", "no URL of http or https"),
        ("http:///file", "no URL of http or https"),
        ("http://pictures.example/a b", "printable ASCII"),
        ("http://pictures.example/a\r\nHost: inside.example", "printable ASCII"),
        ("http://pictures.example\\@inside.example/file", "printable ASCII"),
        ("http://\u0455.example/file", "printable ASCII"),
        ("http://pictures.example/" + "a" * 9000, "printable ASCII"),
        ("http://unknown.example/file", "the host unknown.example is not found"),
        ("http://" + "a" * 70 + ".example/file", "is not found"),
        ("http://pictures.example/missing", "answers with status 404"),
        ("http://pictures.example/loop", "redirects more than 3 times"),
        ("http://pictures.example/large", "more than 1,048,576 bytes"),
        ("http://pictures.example/endless", "more than 1,048,576 bytes"),
    ],
)
def test_what_is_not_fetched(web: Web, url: str, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        web.fetch(url)
    if url.startswith(("ftp", "gopher", "file", "http://user")):
        with pytest.raises(InvalidArgument, match=problem):
            web.fetch(to(url))


def test_redirects_are_followed_and_checked(web: Web) -> None:
    assert web.fetch(to("http://other.example/file")) == FILE
    assert web.fetch(to("/file")) == FILE
    assert {address for address, _ in web.connected} == {PUBLIC, "2606:2800:220:1::1"}
    with pytest.raises(InvalidArgument, match=r"may not be fetched from other\.example"):
        web.fetch(to("http://other.example/file"), domains="pictures.example")


@pytest.mark.parametrize(
    ("host", "domains", "allowed"),
    [
        ("pictures.example", "pictures.example", True),
        ("PICTURES.example.", "pictures.example", True),
        ("a.pictures.example", "pictures.example", True),
        ("notpictures.example", "pictures.example", False),
        ("pictures.example.org", "pictures.example", False),
        ("example", "pictures.example", False),
        ("anything.org", "*", True),
    ],
)
def test_only_named_hosts_are_asked(host: str, domains: str, allowed: bool) -> None:
    if allowed:
        assert parse_web_url(f"https://{host}/x?y=1", frozenset([domains])).path == "/x?y=1"
    else:
        with pytest.raises(InvalidArgument, match="--media-domains does not name it"):
            parse_web_url(f"https://{host}/x", frozenset([domains]))


def test_a_file_that_drips_has_its_time(web: Web) -> None:
    with pytest.raises(InvalidArgument, match=r"takes more than 0\.2 s|cannot be fetched"):
        web.fetch("http://pictures.example/slow", seconds=0.2)


def test_the_systems_resolver_is_asked_once() -> None:
    assert resolve_host("127.0.0.1", 80) == ["127.0.0.1"]


@contextmanager
def files(path: str = "", domains: tuple[str, ...] = (), web: Web | None = None) -> Iterator[MediaFiles]:
    limits = MediaLimits(MediaConfig(path=path, domains=domains, max_bytes=1000), fetch_seconds=60)
    others: dict[str, Callable[..., Any]] = {} if web is None else {"resolve": web.resolve, "connect": web.connect}
    found = MediaFiles(limits, **others)
    yield found
    found.close()


def source(url: str) -> MediaSource:
    return MediaSource("image", url=url, field=FIELD)


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


async def test_a_file_within_the_request() -> None:
    with files() as reader:
        assert await reader.read(MediaSource("image", FILE)) == FILE
        assert await reader.read(source(data_url(FILE))) == FILE
        assert await reader.read(source(data_url(b"?" * 99).replace("Pz8", "Pz8\n"))) == b"?" * 99
        assert await reader.read(source(data_url(FILE).replace("IH", "%49%48"))) == FILE


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("", "is no URL with data:, http:, https: or file:"),
        ("a picture", "is no URL with data:"),
        ("javascript:alert(1)", "is no URL with data:"),
        ("data:image/png,raw", "must be data:TYPE;base64"),
        ("data:image/png;base64", "must be data:TYPE;base64"),
        ("data:image/png;base64,", "the file is empty"),
        ("data:image/png;base64,?", "not in base64"),
        ("data:image/png;base64,\u00e9", "not in base64"),
        (data_url(b"x" * 1001), "may have 1,000"),
        (data_url(b"x" * 9999), "may have 1,000"),
        ("http://pictures.example/file", "this server fetches nothing"),
        ("HTTPS://pictures.example/file", "this server fetches nothing"),
        ("file:///etc/passwd", "this server reads no files for clients"),
    ],
)
async def test_a_url_that_is_not_served(url: str, problem: str) -> None:
    with files() as reader, pytest.raises(InvalidArgument, match=problem) as refusal:
        await reader.read(source(url))
    assert refusal.value.field == FIELD
    assert refusal.value.message.startswith(FIELD)


async def test_files_below_a_directory(tmp_path: Path) -> None:
    inside = tmp_path / "pictures"
    inside.mkdir()
    (inside / "a b.png").write_bytes(FILE)
    (inside / "large").write_bytes(bytes(1001))
    (tmp_path / "secret").write_bytes(b"secret")
    (inside / "link").symlink_to(tmp_path / "secret")
    (inside / "fine").symlink_to(inside / "a b.png")
    os.mkfifo(inside / "pipe")
    with files(str(inside)) as reader:
        assert await reader.read(source(f"file://{inside}/a%20b.png")) == FILE
        assert await reader.read(source(f"file://localhost{inside}/fine")) == FILE
        for path in ("link", "../secret", "%2e%2e/secret", "large", "pipe", "nothing", "", "a b.png%00"):
            with pytest.raises(InvalidArgument) as refusal:
                await reader.read(source(f"file://{inside}/{path}"))
            assert refusal.value.message == f"{FIELD}: there is no such file of at most 1,000 bytes below --media-path"
        for url in (f"file://elsewhere{inside}/fine", f"file://{inside}/fine?x"):
            with pytest.raises(InvalidArgument, match="a file: URL has a path alone"):
                await reader.read(source(url))
    with pytest.raises(InvalidArgument, match=r"media_path: .* is no directory"), files(str(inside / "fine")):
        pass


async def test_the_web_where_it_is_allowed(web: Web) -> None:
    with files(domains=(" Pictures.Example",), web=web) as reader:
        assert await reader.read(source("http://pictures.example/file")) == FILE
        with pytest.raises(InvalidArgument, match="does not name it"):
            await reader.read(source("http://other.example/file"))


async def test_a_fetch_ends_with_whoever_wants_it(web: Web) -> None:
    with files(domains=("*",), web=web) as reader:
        task = asyncio.create_task(reader.read(source("http://pictures.example/slow")))
        while not web.asked:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        await asyncio.to_thread(reader._fetching.shutdown)  # returns when the thread has left the connection
