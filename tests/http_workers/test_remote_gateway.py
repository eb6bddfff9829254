"""What a frontend's gateway and engine do where nothing of a real hub is needed."""

import time

import numpy as np
import pytest

from charonia.core.errors import InvalidArgument, NotFound
from charonia.core.metrics import TimeInState
from charonia.core.model import ModelConfig
from charonia.core.request import GenerateRequest
from charonia.core.sampling import SamplingParams
from charonia.engine.client.sequence_stats import SequenceStats
from charonia.engine.core.messages import AddRequest, CoreReady
from charonia.http_workers.messages import EndedRequests, FromWorker, SentSequence
from charonia.http_workers.remote_engine import RemoteEngine
from charonia.http_workers.remote_gateway import RemoteGateway
from charonia.http_workers.sequence_messages import SubmitSequence
from charonia.http_workers.snapshot import ServedModel, ServedModels
from charonia.http_workers.state_messages import HubSnapshot, LogLevels
from charonia.processes.shared_arena import new_arena_file
from charonia.scheduler.sequence import SequenceSpec
from charonia.telemetry.llm_metrics import LlmMetrics
from charonia.telemetry.logging_setup import LogSettings
from charonia.telemetry.loop_lag import LoopLag
from charonia.telemetry.shared_state import SharedState


def make_gateway() -> tuple[RemoteGateway, list[FromWorker]]:
    """A gateway, and what it sends."""
    files = new_arena_file(1 << 20), new_arena_file(1 << 20)
    gateway = RemoteGateway(SharedState(), files, 1.0, LoopLag(1.0))
    sent: list[FromWorker] = []
    gateway.connection.send = sent.append
    return gateway, sent


async def test_an_end_is_told_even_if_what_was_asked_cannot_be() -> None:
    """A client's text may be none that msgpack has: the request's place is free anyhow."""
    gateway, sent = make_gateway()
    sampling = SamplingParams(stop=("\ud800",))
    asked = SentSequence(0, sampling, 0.0, None, None, None, None, None, None, 0, None, None)
    gateway.connection._on_unsendable(EndedRequests([7], [], [(7, [asked])]), UnicodeError())
    assert sent == [EndedRequests([7], [])]


async def test_health_allows_for_the_time_between_two_words_of_the_hub() -> None:
    gateway, _ = make_gateway()
    levels = LogLevels.of(LogSettings())
    gateway._snapshot = HubSnapshot(1, True, False, False, False, False, b"", levels, [], [])
    for silence, live, ready in ((0.0, True, True), (1.5, True, True), (2.5, True, False), (60.0, True, False)):
        gateway._heard = time.monotonic() - silence  # of a second that it may be overdue
        assert (gateway.alive(), gateway.ready()) == (live, ready)
    gateway._heard = time.monotonic() - 61.5
    assert not gateway.alive()


async def test_models_are_as_the_last_snapshot_has_them() -> None:
    gateway, _ = make_gateway()
    old, new, route = (ModelConfig(name, version, "b") for name, version in (("m", "1"), ("m", "10"), ("r", "3")))
    served = ServedModels(
        (
            ServedModel(1, old, False, ("m", "alias"), None, False),
            ServedModel(2, new, True, ("m", "alias"), None, False),
        ),
        (new, route),
    )
    levels = LogLevels.of(LogSettings())
    gateway._on_snapshot(HubSnapshot(1, True, False, False, True, False, served.pickled(), levels, [], []))
    assert gateway.model_configs() == [new, route]
    assert [gateway.model_config(*asked) for asked in (("m",), ("alias", "1"), ("r",))] == [new, old, route]
    assert (gateway.served_versions("alias"), gateway.served_versions("r")) == (("1", "10"), ("3",))
    assert [gateway.is_model_ready(*asked) for asked in (("m",), ("m", "1"), ("m", "2"))] == [True, True, False]
    assert [await gateway.unready_reason(name) for name in ("m", "n")] == ["", "Model version not ready"]
    for name, version in (("n", ""), ("m", "2")):
        with pytest.raises(NotFound, match=f"unknown model: '{name}' is not found"):
            gateway.model_config(name, version)
    gateway._heard = time.monotonic() - 2.5
    assert not gateway.is_model_ready("m")


async def test_a_sequence_that_cannot_be_told_ends_and_nobody_waits_for_its_reader() -> None:
    gateway, sent = make_gateway()
    metrics = LlmMetrics()
    metrics.unread = TimeInState(iter(range(100)).__next__)  # another second at each look
    engine = RemoteEngine(gateway.connection, 1, CoreReady(0, 0, 0, 0), request=7)
    spec = SequenceSpec(key=0, prompt=np.array([1, 2], np.int32), max_tokens=9)
    add, ticket = AddRequest(spec), engine.admit(GenerateRequest(id="", prompt=""))
    with engine.open_stream(add, SequenceStats(metrics), ticket) as stream:
        for token in (3, 4):
            stream.push([token], 1.0)
        assert metrics.unread.seconds < metrics.unread.seconds
        [submitted] = sent
        assert isinstance(submitted, SubmitSequence)
        gateway.connection._on_unsendable(submitted, UnicodeError())
        with pytest.raises(InvalidArgument, match="cannot be understood"):
            await stream.read()
        stream.push([5], 1.0)
        stream.push([6], 1.0)
    assert sent == [submitted]  # which has ended
    assert metrics.unread.seconds == metrics.unread.seconds
