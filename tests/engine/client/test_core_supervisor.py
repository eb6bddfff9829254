"""How long the supervisor waits before it starts the next core."""

import logging
from types import SimpleNamespace

import pytest

from charonia.core.errors import CharoniaError
from charonia.engine.client import core_supervisor
from charonia.engine.client.core_supervisor import DEFAULT_TIMEOUTS, CoreSupervisor
from charonia.engine.config import EngineConfig
from charonia.engine.core.messages import AdapterReply, CoreLoading, CoreReady, RequestRejected, RequestUpdates
from charonia.processes.log_forwarding import LogRecordMessage


class Deaf:
    """Whoever is told, and does nothing."""

    def on_progress(self, loading: CoreLoading) -> None: ...

    def on_updates(self, message: RequestUpdates) -> None: ...

    def on_refused(self, refused: RequestRejected) -> None: ...

    def on_adapter(self, reply: AdapterReply) -> None: ...

    def on_serving(self) -> None: ...

    def on_loss(self, error: CharoniaError) -> None: ...


READY = CoreReady(blocks=1, block_size=16, vocab_size=10, max_model_len=16)


def waits(monkeypatch: pytest.MonkeyPatch, served: list[float]) -> list[float]:
    """Seconds before each restart, of cores that died after serving so many seconds each."""
    now = [0.0]
    monkeypatch.setattr(core_supervisor, "time", SimpleNamespace(monotonic=lambda: now[0]))
    core, found = CoreSupervisor(EngineConfig(model="", executor="fake"), Deaf(), DEFAULT_TIMEOUTS), []
    for seconds in served:
        core._on_message(READY)
        now[0] += seconds
        found.append(core._on_exit(-9))
    return found


def test_cores_that_die_young_are_restarted_ever_later(monkeypatch: pytest.MonkeyPatch) -> None:
    assert waits(monkeypatch, [1.0] * 5) == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6])


def test_a_core_killed_every_ten_seconds_is_back_at_once_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert waits(monkeypatch, [9.0] * 12) == pytest.approx([0.1] * 12)


def test_what_a_core_logs_is_logged_here(caplog: pytest.LogCaptureFixture) -> None:
    core = CoreSupervisor(
        EngineConfig(model="", executor="fake", data_parallel_size=2, replica=1), Deaf(), DEFAULT_TIMEOUTS
    )
    core._on_message(LogRecordMessage("charonia.engine.models.registry", logging.WARNING, "5 % of it"))
    [record] = caplog.records
    assert (record.name, record.levelname) == ("charonia.engine.models.registry", "WARNING")
    assert record.getMessage() == "the engine core of replica 1: 5 % of it"
