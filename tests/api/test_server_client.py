"""What commands ask servers by."""

import pytest

from charonia.api.server_client import fetch
from charonia.core.errors import Unavailable

from ..odd_server import NO_SERVERS_OF_OURS, answering


@pytest.mark.parametrize("raw", [each for each in NO_SERVERS_OF_OURS if not each.endswith((b"]", b"}"))])
def test_what_is_no_server_of_ours_is_told_in_a_line(raw: bytes) -> None:
    with answering(raw) as url, pytest.raises(Unavailable) as told:
        fetch(url, {})
    assert told.value.message.startswith(f"{url}: ")
    assert "\n" not in told.value.message
