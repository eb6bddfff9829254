"""The hub's end of a link, with calls as a frontend sends them."""

import asyncio
import os
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from charonia.api.app import all_routes, routed_app
from charonia.api.grpc.control_rpcs import bound_rpcs
from charonia.api.http.rules import HttpRules
from charonia.api.metadata import ServerInfo
from charonia.core.request_context import DONE, RequestContext
from charonia.core.tensor import Tensor
from charonia.http_workers.forwarding import answer_rpc
from charonia.http_workers.hub import ControlHub
from charonia.http_workers.messages import (
    CallFailed,
    EndedRequests,
    GrpcCall,
    HttpCall,
    ModelAnswer,
    ModelCall,
    RequestOrigin,
    encode_origin,
)
from charonia.http_workers.state_messages import SnapshotAcknowledged, WorkerListening, WorkerState
from charonia.http_workers.tensors import PLACED_BYTES, SentTensor, TensorExchange
from charonia.http_workers.worker_session import WorkerSession
from charonia.processes.shared_arena import new_arena_file
from charonia.repository.builder import ModelBuilder
from charonia.repository.catalog import RepositoryCatalog
from charonia.repository.gateway import InProcessGateway
from charonia.repository.model_control import ModelControl
from charonia.telemetry.loop_lag import LoopState

from ..waiting import until

CONFIG = """
backend: "identity"
input { name: "X" data_type: TYPE_FP32 dims: 2 }
output { name: "Y" data_type: TYPE_FP32 dims: 2 }
"""
ORIGIN = RequestOrigin.of(RequestContext("infer"), False)


def make_hub(gateway: InProcessGateway) -> ControlHub:
    return ControlHub(gateway, None, None)  # type: ignore[arg-type]


def call(key: int, values: Sequence[float], checked: int = 0) -> ModelCall:
    """Of request 1."""
    tensor = SentTensor.of(Tensor.from_values("X", "FP32", np.array(values, np.float32)))
    return ModelCall(key, 1, msgspec.Raw(encode_origin(ORIGIN)), "copy", "", "", [tensor], None, {}, checked)


async def test_a_snapshot_that_is_acknowledged_late_takes_nothing_back() -> None:
    """A worker acknowledges one when its models are built, and may have acknowledged a later one before: the server's
    start waited for that half a minute, and heard no signal meanwhile."""
    files = new_arena_file(1 << 20), new_arena_file(1 << 20)
    hub = make_hub(InProcessGateway(end_listeners=(), builder=ModelBuilder({}, True)))
    session = WorkerSession(hub, "one", *files)
    number = hub.push().number
    session._receive(WorkerListening())
    for acknowledged in (number, number - 1):
        session._receive(SnapshotAcknowledged(acknowledged))
    async with asyncio.timeout(10):
        await hub.settle()
    session._on_lost()
    for file in files:
        os.close(file)


async def test_the_memory_of_a_frontend_that_is_gone_is_given_back() -> None:
    """At once, not when the collector comes by."""

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("charonia-arena")

    before, files = mapped(), (new_arena_file(1 << 20), new_arena_file(1 << 20))
    gateway = InProcessGateway(end_listeners=(), builder=ModelBuilder({}, True))
    session = WorkerSession(make_hub(gateway), "one", *files)
    other = TensorExchange(*reversed(files), lambda: None)
    large = Tensor.from_values("X", "FP32", np.ones(PLACED_BYTES // 4, np.float32))
    kept = session._exchange.tensor(other.message(large))
    assert mapped() == before + 4
    session._on_lost()
    assert mapped() == before + 3
    assert session._exchange.message(large).place is None
    assert kept.data[-1] == 1
    del kept
    assert mapped() == before + 2
    await gateway.lifecycle.close()
    for file in files:
        os.close(file)


async def test_a_frontend_that_hangs_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    gateway = InProcessGateway(end_listeners=(), builder=ModelBuilder({}, True))
    session = WorkerSession(make_hub(gateway), "one", new_arena_file(4096), new_arena_file(4096))
    mine, theirs = socket.socketpair()
    with theirs:
        await asyncio.get_running_loop().create_unix_connection(lambda: session.link, sock=mine)
        for _ in range(100):  # it starts
            session.beat()
        session._receive(WorkerListening())
        for _ in range(2):  # it answers at last
            for _ in range(60):
                session.beat()
            session._receive(WorkerState(LoopState(0.0, [], 0.0, 0.0), []))
        for _ in range(60):
            session.beat()
        await asyncio.sleep(0)
        assert not session.lost.is_set()
        session.beat()
        await until(session.lost.is_set)
    assert "one hangs" in caplog.text
    await gateway.lifecycle.close()


async def test_what_changes_something_is_answered_when_all_know_of_it_and_what_reads_at_once() -> None:
    gateway = InProcessGateway(end_listeners=(), builder=ModelBuilder({}, True))
    hub = make_hub(gateway)
    hub.app = routed_app(all_routes(gateway, ServerInfo(), HttpRules(), settle=hub.settle))
    hub.control_rpc = partial(answer_rpc, bound_rpcs(gateway, hub.settle))
    sessions = [WorkerSession(hub, name, new_arena_file(4096), new_arena_file(4096)) for name in ("one", "two", "new")]
    asked, slow, _ = sessions  # the last has not begun to listen: nobody asks it
    sent: list[Any] = []
    asked.link.send = sent.append  # type: ignore[method-assign]
    for session in (asked, slow):
        session._receive(WorkerListening())
    asked._receive(SnapshotAcknowledged(1))
    for key, rpc in enumerate(("RepositoryModelLoad", "LogSettings", "ModelReady", "SystemSharedMemoryStatus")):
        asked._receive(GrpcCall(key, rpc, b""))
    for key, call in enumerate(("POST /v2/logging", "PUT /v2/routes/index", "POST /v2/repository/index", "GET /v2"), 4):
        method, path = call.split()
        asked._receive(HttpCall(key, method, path, b"", [], b"", "", 1.0))
    await until(lambda: len(sent) == 4)
    await asyncio.sleep(0.05)
    assert {each.key for each in sent} == {2, 3, 6, 7}
    slow._receive(SnapshotAcknowledged(1))
    await until(lambda: len(sent) == 8)
    await gateway.lifecycle.close()


async def test_a_request_whose_calls_are_answered_here_and_there_ends_once(tmp_path: Path) -> None:
    (tmp_path / "copy" / "1").mkdir(parents=True)
    (tmp_path / "copy" / "config.pbtxt").write_text(CONFIG)
    gateway = InProcessGateway(end_listeners=(), builder=ModelBuilder({}, True))
    catalog = RepositoryCatalog([tmp_path], config_name="")
    gateway.model_control = ModelControl(catalog, gateway.registry, gateway.lifecycle)
    await gateway.load_model("copy")
    session = WorkerSession(make_hub(gateway), "one", new_arena_file(4096), new_arena_file(4096))
    sent: list[object] = []
    session.link.send = sent.append  # type: ignore[method-assign, assignment]
    [loaded] = gateway.registry.entries["copy"].loaded_versions.values()
    session._receive(call(2, [1, 2]))
    assert isinstance(sent[-1], ModelAnswer)
    session._receive(call(3, [1, 2, 3]))  # which does not fit: the gateway says why
    await until(lambda: isinstance(sent[-1], CallFailed))
    assert gateway.in_flight.count
    session._receive(EndedRequests([1], []))
    await until(lambda: not gateway.in_flight.count)
    assert loaded.in_flight.count == 0
    assert loaded.capabilities.measured is not None
    assert loaded.model._metrics.ended_requests == {DONE: 1}  # type: ignore[attr-defined]
    gateway.begin_exit()
    await gateway.lifecycle.close()
