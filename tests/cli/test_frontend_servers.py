"""What a server says of its addresses."""

import io
import sys

import pytest

from charonia.cli.frontend_servers import base_url, say


@pytest.mark.parametrize(
    ("address", "host"),
    [("", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("fe80::1", "[fe80::1]"), ("box", "box")],
)
def test_an_address_for_all_is_told_as_one_that_can_be_pasted(address: str, host: str) -> None:
    assert base_url(address, 80) == f"http://{host}:80"


def test_lines_leave_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pieces(io.StringIO):
        def write(self, text: str) -> int:
            pieces.append(text)
            return len(text)

    pieces: list[str] = []
    monkeypatch.setattr(sys, "stdout", Pieces())
    say("gRPC on there", "Serving on here")
    assert pieces == ["gRPC on there\nServing on here\n"]
