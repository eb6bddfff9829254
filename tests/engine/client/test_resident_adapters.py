"""What requests are told of adapters that a core, started again, has not got."""

import asyncio
from typing import Any

import pytest

from charonia.core.adapter import Adapter
from charonia.core.errors import CharoniaError, NotReady, SentError, Unavailable
from charonia.engine.client.resident_adapters import ResidentAdapters
from charonia.engine.core.messages import AdapterLoaded, AdapterRefused


def stored(digest: str) -> Adapter:
    return Adapter("", "/loras/sql", digest, 4, 100)


@pytest.mark.parametrize(
    ("reply", "kind", "why"),
    [
        (None, NotReady, "was started again, and reads its adapters first"),
        (AdapterLoaded(2, stored("new")), Unavailable, "not those that were loaded; load it again, with load_inplace"),
        (AdapterRefused(2, SentError("NotFound", "none there")), Unavailable, "/loras/sql .* none there; load it"),
    ],
)
async def test_an_adapter_that_a_new_core_has_not_is_told_by_name(
    reply: AdapterLoaded | AdapterRefused | None, kind: type[CharoniaError], why: str
) -> None:
    sent: list[Any] = []
    adapters = ResidentAdapters(sent.append)
    loading = asyncio.create_task(adapters.load("/loras/sql"))
    await asyncio.sleep(0)
    adapters.on_reply(AdapterLoaded(1, stored("old")))
    await loading
    assert "old" in adapters
    adapters.on_loss(NotReady("it died"))
    adapters.on_serving()
    await asyncio.sleep(0)
    if reply is not None:
        adapters.on_reply(reply)
    for _ in range(3):
        await asyncio.sleep(0)
    assert list(adapters) == []
    absence = adapters.absence("old")
    assert type(absence) is kind
    with pytest.raises(kind, match=why):
        raise absence
