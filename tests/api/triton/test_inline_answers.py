"""`infer` of a model that computes in the event loop: answered without a context, unless one is of use."""

import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from charonia.api.app import build_app
from charonia.api.metadata import ServerInfo
from charonia.core.request_context import DONE, Outcome
from charonia.telemetry.request_log import log, request_filter

from ..inline_model import InlineServer

PATH = "/v2/models/inline/infer"


@pytest.fixture
async def client(inline: InlineServer) -> AsyncIterator[httpx.AsyncClient]:
    app = build_app(inline.gateway, ServerInfo("triton", "9.9"))
    transport = httpx.ASGITransport(app, client=("10.0.0.1", 123))
    async with httpx.AsyncClient(transport=transport, base_url="http://charonia") as connected:
        yield connected


def body(*data: float, **members: Any) -> dict[str, Any]:
    return {"id": "7", "inputs": [{"name": "IN", "datatype": "FP32", "shape": [len(data)], "data": data}], **members}


async def test_an_answer_has_no_context(client: httpx.AsyncClient, inline: InlineServer) -> None:
    for path in (PATH, "/v2/models/inline/versions/1/infer"):
        answer = (await client.post(path, json=body(1, 2))).json()
        assert (answer["id"], answer["model_version"], answer["outputs"][0]["data"]) == ("7", "1", [1, 2])
    assert (inline.model.ends, inline.model.counted, inline.ended) == ([DONE, DONE], 0, [])


async def test_a_failure_is_counted_once_and_has_a_context_for_the_log(
    client: httpx.AsyncClient, inline: InlineServer
) -> None:
    answer = await client.post(PATH, json=body(-1, 2), headers={"x-request-id": "mine"})
    assert (answer.status_code, answer.json()) == (500, {"error": "negative"})
    assert answer.headers["x-request-id"] == "mine"
    [context] = inline.ended
    assert ([end.outcome for end in inline.model.ends], inline.model.counted) == ([Outcome.ERROR], 0)
    assert context.end is not None
    assert (context.end.outcome, context.model, context.version) == (Outcome.ERROR, "inline", "1")
    assert (context.id, context.client_id, context.client) == ("7", "mine", "10.0.0.1")


async def test_what_is_refused_is_so_with_a_context(client: httpx.AsyncClient, inline: InlineServer) -> None:
    assert (await client.post(PATH, json=body(1, 2, 3))).status_code == 400
    assert (await client.post(PATH, content=b"{")).status_code == 400
    assert (await client.post("/v2/models/other/infer", json=body(1, 2))).status_code == 404
    classes = [{"name": "IN", "parameters": {"classification": 1}}]
    assert (await client.post(PATH, json=body(1, 2, outputs=classes))).status_code == 200
    inline.gateway.begin_exit()
    assert (await client.post(PATH, json=body(1, 2))).status_code == 503
    assert (len(inline.ended), inline.model.ends) == (5, [])
    assert [context.model for context in inline.ended] == ["inline", "inline", "other", "inline", "inline"]
    assert inline.model.counted == 4, "all but that of a model which is not there"
    outcomes = [context.end.outcome for context in inline.ended if context.end is not None]
    assert outcomes == [*[Outcome.REJECTED] * 3, Outcome.DONE, Outcome.REJECTED]
    assert all(context.arrived_at <= context.ended_at for context in inline.ended)


async def test_a_context_is_made_where_it_is_logged(
    client: httpx.AsyncClient, inline: InlineServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_filter, "requests", "all")
    with caplog.at_level(logging.INFO, log.name):
        await client.post(PATH, json=body(1, 2))
    assert (len(inline.ended), inline.model.counted, inline.model.ends) == (1, 1, [])
