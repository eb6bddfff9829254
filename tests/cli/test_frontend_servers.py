"""What a server says of its addresses."""

import io
import socket
import sys

import pytest

from charonia.cli.frontend_servers import base_url, bound_url, say


@pytest.mark.parametrize(
    ("address", "host"),
    [("", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("fe80::1", "[fe80::1]"), ("box", "box")],
)
def test_an_address_for_all_is_told_as_one_that_can_be_pasted(address: str, host: str) -> None:
    assert base_url(address, 80) == f"http://{host}:80"


@pytest.mark.parametrize(("address", "host"), [("0.0.0.0", "0.0.0.0"), ("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_what_is_listened_on_is_told_as_it_is_bound(address: str, host: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as bound:
        port = bound.getsockname()[1]
        assert bound_url(bound) == f"http://{host}:{port}"
        assert bound_url(bound, encrypted=True) == f"https://{host}:{port}"


def test_lines_leave_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pieces(io.StringIO):
        def write(self, text: str) -> int:
            pieces.append(text)
            return len(text)

    pieces: list[str] = []
    monkeypatch.setattr(sys, "stdout", Pieces())
    say("gRPC on there", "Serving on here")
    assert pieces == ["gRPC on there\nServing on here\n"]
