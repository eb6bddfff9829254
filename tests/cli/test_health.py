"""What a container's health check says of servers, of all kinds that a URL may lead to."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from charonia.cli import health


@contextmanager
def answering(status: int) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/v2/health/ready" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("status", "code"), [(200, 0), (400, 1), (503, 1), (403, 0)])
def test_a_server_is_healthy_when_it_is_ready(
    status: int, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(health.VARIABLE, str(tmp_path / "url"))
    with answering(status) as url:
        (tmp_path / "url").write_text(f"{url}\n")
        assert health.main() == code


def test_a_server_without_http_is_healthy_while_it_listens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(health.VARIABLE, str(tmp_path / "url"))
    assert health.main() == 1
    with socket.create_server(("127.0.0.1", 0)) as server:
        (tmp_path / "url").write_text(f"grpc://127.0.0.1:{server.getsockname()[1]}")
        assert health.main() == 0
    assert health.main() == 1
