"""What requests are told of adapters that a core, started again, has not got."""

import asyncio
from typing import Any

import pytest

from charonia.core.adapter import Adapter
from charonia.core.errors import CharoniaError, NotReady, SentError, Unavailable
from charonia.engine.client.resident_adapters import ResidentAdapters
from charonia.engine.core.messages import AdapterLoaded, AdapterRefused, UnloadAdapter


def stored(digest: str) -> Adapter:
    return Adapter("", "/loras/sql", digest, 4, 100)


class Core:
    """Gets messages while it is there."""

    def __init__(self) -> None:
        self.there = True
        self.messages: list[Any] = []

    def send(self, message: Any) -> bool:
        if self.there:
            self.messages.append(message)
        return self.there


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
    core = Core()
    adapters = ResidentAdapters(core.send)
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


async def test_an_adapter_that_is_unloaded_while_it_is_restored_does_not_come_back() -> None:
    core = Core()
    adapters = ResidentAdapters(core.send)
    loading = asyncio.create_task(adapters.load("/loras/sql"))
    await asyncio.sleep(0)
    adapters.on_reply(AdapterLoaded(1, stored("old")))
    await loading
    adapters.on_loss(NotReady("it died"))
    adapters.on_serving()
    await asyncio.sleep(0)
    adapters.unload("old")
    adapters.on_reply(AdapterLoaded(2, stored("old")))
    for _ in range(3):
        await asyncio.sleep(0)
    assert list(adapters) == []
    assert core.messages[-1] == UnloadAdapter("old")
    adapters.on_loss(NotReady("it died"))
    adapters.on_serving()
    assert core.messages[-1] == UnloadAdapter("old"), "the next core does not get it"


async def test_a_core_that_is_gone_is_asked_for_nothing() -> None:
    core = Core()
    core.there = False
    with pytest.raises(NotReady):
        await ResidentAdapters(core.send).load("/loras/sql")
