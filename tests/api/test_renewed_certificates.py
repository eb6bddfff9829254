"""Certificates that change while a server listens, as a cluster changes the files that it mounts: a link to others."""

import asyncio
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from charonia.api.app import build_app
from charonia.api.http import server as http_server
from charonia.api.http.server import HttpServer
from charonia.api.metadata import ServerInfo
from charonia.api.tls import parse_key_pair

from ..waiting import until
from .grpc_serving import serving


class Mounted:
    """`tls.crt` and `tls.key` in a folder whose link can be changed, beside two pairs and one that is none."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in ("one", "two"):
            (folder / name).mkdir()
            make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
            make += ["-days", "1", "-subj", f"/CN={name}", "-keyout", "tls.key", "-out", "tls.crt"]
            subprocess.run(make, cwd=folder / name, check=True, capture_output=True)
        (folder / "torn").mkdir()
        shutil.copy(folder / "one" / "tls.key", folder / "torn" / "tls.key")
        shutil.copy(folder / "two" / "tls.crt", folder / "torn" / "tls.crt")
        self.show("one")
        self.certificate, self.key = folder / "shown" / "tls.crt", folder / "shown" / "tls.key"

    def show(self, name: str) -> None:
        (self._folder / "next").symlink_to(self._folder / name)
        (self._folder / "next").rename(self._folder / "shown")

    def encoded(self, name: str) -> bytes:
        return ssl.PEM_cert_to_DER_cert((self._folder / name / "tls.crt").read_text())


@pytest.fixture
def mounted(tmp_path: Path) -> Mounted:
    if shutil.which("openssl") is None:
        pytest.skip("certificates are made by the openssl command")
    return Mounted(tmp_path)


def shown_by(port: int) -> bytes | None:
    """The certificate that a server shows a new connection."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as encrypted,
    ):
        return encrypted.getpeercert(binary_form=True)


async def assert_renewed(port: int, mounted: Mounted, said: Callable[[], str]) -> None:
    async def shown() -> bytes | None:
        return await asyncio.to_thread(shown_by, port)

    async def await_shown(wanted: bytes) -> None:
        for _ in range(2000):
            if await shown() == wanted:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("another certificate is shown")

    assert await shown() == mounted.encoded("one")
    mounted.show("torn")
    await shown()  # gRPC looks when somebody comes
    await until(lambda: "connections are encrypted as before" in said())
    assert await shown() == mounted.encoded("one"), "a certificate without its key changes nothing"
    mounted.show("two")
    await await_shown(mounted.encoded("two"))
    mounted.show("one")
    await await_shown(mounted.encoded("one"))


async def test_https_shows_a_renewed_certificate(
    gateway: Any, mounted: Mounted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_server, "CERTIFICATE_LOOK_SECONDS", 0.01)
    files = parse_key_pair(mounted.certificate, mounted.key, "--http-server")
    with socket.create_server(("127.0.0.1", 0)) as sock:
        server = HttpServer(build_app(gateway, ServerInfo()), sock, access_log=False, tls=files)
        await server.start()
        try:
            await assert_renewed(sock.getsockname()[1], mounted, lambda: caplog.text)
        finally:
            await server.stop(force=True)


async def test_grpc_shows_a_renewed_certificate(
    gateway: Any, mounted: Mounted, caplog: pytest.LogCaptureFixture
) -> None:
    files = {"grpc_server_cert": mounted.certificate, "grpc_server_key": mounted.key}
    async with serving(gateway, grpc_use_ssl="true", **files) as served:
        await assert_renewed(served.server.port, mounted, lambda: caplog.text)
