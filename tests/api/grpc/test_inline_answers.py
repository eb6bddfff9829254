"""ModelInfer of a model that computes in the event loop: answered without a context, unless one is of use."""

import logging
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from grpc import StatusCode
from tritonclient.grpc import service_pb2 as pb

from charonia.core.request_context import DONE, Outcome
from charonia.telemetry.request_log import log, request_filter

from ..grpc_serving import Served, refused, serving
from ..inline_model import InlineServer


@pytest.fixture
async def served(inline: InlineServer) -> AsyncIterator[Served]:
    async with serving(inline.gateway) as server:
        yield server


def request(first: float = 1.0, **fields: Any) -> Any:
    message = pb.ModelInferRequest(model_name="inline", id="7", **fields)
    message.inputs.add(name="IN", datatype="FP32", shape=(2,))
    message.raw_input_contents.append(np.array([first, 2], np.float32).tobytes())
    return message


async def test_an_answer_has_no_context(served: Served, inline: InlineServer) -> None:
    for asked in (request(), request(model_version="1")):
        answer = await served.stub.ModelInfer(asked)
        assert (answer.model_name, answer.model_version, answer.id) == ("inline", "1", "7")
        assert list(answer.raw_output_contents) == [asked.raw_input_contents[0]]
    assert (inline.model.ends, inline.model.counted, inline.ended) == ([DONE, DONE], 0, [])


async def test_a_failure_is_counted_once_and_has_a_context_for_the_log(served: Served, inline: InlineServer) -> None:
    metadata = (("x-request-id", "mine"),)
    assert await refused(served.stub.ModelInfer(request(-1.0), metadata=metadata)) == (StatusCode.INTERNAL, "negative")
    [context] = inline.ended
    assert ([end.outcome for end in inline.model.ends], inline.model.counted) == ([Outcome.ERROR], 0)
    assert context.end is not None
    assert (context.end.outcome, context.model, context.version) == (Outcome.ERROR, "inline", "1")
    assert (context.id, context.client_id, context.client) == ("7", "mine", "127.0.0.1")


async def test_what_is_refused_is_so_with_a_context(served: Served, inline: InlineServer) -> None:
    wrong = request()
    wrong.inputs[0].shape[:] = [3]
    for asked, code in ((wrong, StatusCode.INVALID_ARGUMENT), (request(model_version="2"), StatusCode.NOT_FOUND)):
        assert (await refused(served.stub.ModelInfer(asked)))[0] is code
    inline.gateway.begin_exit()
    assert (await refused(served.stub.ModelInfer(request())))[0] is StatusCode.UNAVAILABLE
    assert (len(inline.ended), inline.model.ends) == (3, [])


async def test_a_context_is_made_where_it_is_of_use(
    served: Served, inline: InlineServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = served.stub.ModelInfer
    with monkeypatch.context() as patched, caplog.at_level(logging.INFO, log.name):
        patched.setattr(request_filter, "requests", "all")
        await ask(request())
    assert len(inline.ended) == 1
    traces = inline.gateway.shared_state.traces
    traces.send_spans(True)
    await ask(request())
    traces.send_spans(False)
    assert len(inline.ended) == 2
    inline.gateway.add_end_listener(lambda context: None, of_routes=True)
    await ask(request())
    assert len(inline.ended) == 2
    inline.gateway.add_end_listener(lambda context: None)
    await ask(request())
    assert (len(inline.ended), inline.model.counted, inline.model.ends) == (3, 3, [DONE])
