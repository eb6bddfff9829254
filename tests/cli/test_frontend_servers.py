"""What a server says of its addresses."""

import pytest

from charonia.cli.frontend_servers import base_url


@pytest.mark.parametrize(
    ("address", "host"),
    [("", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("fe80::1", "[fe80::1]"), ("box", "box")],
)
def test_an_address_for_all_is_told_as_one_that_can_be_pasted(address: str, host: str) -> None:
    assert base_url(address, 80) == f"http://{host}:80"
