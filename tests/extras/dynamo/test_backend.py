"""The engine as Dynamo's worker drives it, which here is the test."""

import asyncio
import sys
from contextlib import aclosing
from importlib import import_module
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest

from charonia.bench.load.fake_model import VOCAB, write_words
from charonia.core.errors import (
    Internal,
    InvalidArgument,
    NotReady,
    QueueFull,
    RequestTimeout,
    ServerExiting,
    Unsupported,
)
from charonia.extras.dynamo.command import dynamo

from ...waiting import until
from .conftest import Context, Publisher, WorkerMetrics

FAKE = {"executor": "fake", "fake_vocab_size": VOCAB, "fake_max_model_len": 4096, "fake_step_seconds": 0.002}
pytestmark = pytest.mark.usefixtures("stand_in", "copied_children")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "words"
    write_words(directory)
    return directory


@pytest.fixture
def backend(words: Path) -> Any:
    made, config = module().Backend.of(str(words), FAKE, "agg", ["--discovery-backend", "file"])
    assert (config.namespace, config.component, config.discovery_backend) == ("dynamo", "backend", "file")
    assert config.served_model_name == "words"
    return made


def module() -> Any:
    return import_module("charonia.extras.dynamo.backend")


async def chunks(backend: Any, context: Context, **fields: Any) -> list[dict[str, Any]]:
    async with aclosing(backend.generate({"model": "words", "token_ids": [7], **fields}, context)) as stream:
        return [chunk async for chunk in stream]


def test_a_worker_lives(backend: Any) -> None:
    asyncio.run(live(backend))


async def live(backend: Any) -> None:
    publisher, metrics = Publisher(), WorkerMetrics()
    registered = await backend.start(worker_id=1)
    try:
        assert (registered.served_model_name, registered.llm.context_length) == ("words", 4096)
        assert registered.llm.kv_cache_block_size == 16
        assert registered.llm.total_kv_blocks > 0
        backend.attach_snapshot_publisher(publisher)
        await backend.register_prometheus(metrics)
        [source] = await backend.kv_event_sources()
        assert source.values[0].startswith("ipc://")
        assert await backend.is_quiescent()
        backend._adapters, served = ["pirate"], list[Any]()
        await backend.on_endpoint_ready(served)
        [adapter] = served
        assert (adapter["lora_name"], adapter["type"], adapter["kv_cache_block_size"]) == ("pirate", 3, 16)
        assert adapter["path"] == adapter["base_model_path"]
        backend._adapters.clear()

        answer = await chunks(backend, Context(), stop_conditions={"max_tokens": 3})
        assert [token for chunk in answer for token in chunk["token_ids"]] == [8, 9, 10]
        assert answer[-1]["finish_reason"] == "length"
        probe = await chunks(
            backend, Context("probe"), **await backend.health_check_payload(), stop_conditions={"max_tokens": 1}
        )
        assert probe[-1]["finish_reason"] == "length"

        with pytest.raises(module().exceptions.InvalidArgument, match="best_of is not served"):
            await chunks(backend, Context(), sampling_options={"best_of": 2})
        with pytest.raises(module().exceptions.InvalidArgument, match="maximum context length"):
            await chunks(backend, Context(), stop_conditions={"max_tokens": 5000})

        leaving = Context("leaves")
        stream = backend.generate({"model": "words", "token_ids": [7]}, leaving)
        assert (await anext(stream))["token_ids"]
        await backend.abort(leaving)
        await backend.abort(Context("unknown"))
        assert [chunk async for chunk in stream][-1]["finish_reason"] == "cancelled"
        dropped = backend.generate({"model": "words", "token_ids": [7]}, Context("dropped"))
        await anext(dropped)
        await dropped.aclose()
        await until(lambda: not backend._server.look(lambda gateway: gateway.requests_in_flight()))
        await until(lambda: publisher.snapshots)
        assert publisher.snapshots[-1].kv_total_blocks == registered.llm.total_kv_blocks
        [expose] = metrics.callbacks
        assert "vllm:cache_config_info" in await asyncio.to_thread(expose)
    finally:
        await backend.cleanup()
    await backend.cleanup()
    assert not backend._server.live()


def test_the_load_is_told_on_when_the_engine_is_back(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = chain([dict[str, float]()], repeat({"max": 4.0, "used": 1.0, "asked": 0.0, "hit": 0.0}))
    publisher = Publisher()

    async def read() -> dict[str, float]:
        return next(numbers)

    async def follow() -> None:
        reports = asyncio.create_task(backend._report())
        await until(lambda: publisher.snapshots)
        reports.cancel()

    monkeypatch.setattr(module(), "_SNAPSHOT_SECONDS", 0)
    monkeypatch.setattr(backend, "_numbers", read)
    backend.attach_snapshot_publisher(publisher)
    asyncio.run(follow())
    snapshot = publisher.snapshots[0]
    assert (snapshot.kv_used_blocks, snapshot.gpu_cache_usage, snapshot.kv_cache_hit_rate) == (1, 0.25, None)
    asyncio.run(backend.cleanup())


def test_nothing_is_held_while_the_engine_is_away(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def read() -> dict[str, float]:
        return {}

    monkeypatch.setattr(backend, "_numbers", read)
    assert asyncio.run(backend.is_quiescent())
    asyncio.run(backend.cleanup())


def test_a_worker_that_never_began_is_cleaned_up(backend: Any) -> None:
    asyncio.run(backend.cleanup())


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidArgument("a"), "InvalidArgument"),
        (QueueFull("b", retry_after=1.0), "HttpError"),
        (ServerExiting(), "EngineShutdown"),
        (NotReady("c"), "EngineShutdown"),
        (RequestTimeout(), "HttpError"),
        (Internal("d"), "Unknown"),
    ],
)
def test_errors_are_dynamos(error: Exception, kind: str) -> None:
    assert type(module()._dynamo_error(error)).__name__ == kind


@pytest.mark.parametrize(
    ("given", "heard"),
    [
        ({"kv_events_config": '{"enable_kv_cache_events": true, "endpoint": "tcp://*:9"}'}, "tcp://127.0.0.1:9"),
        ({"kv_events_config": '{"enable_kv_cache_events": false}'}, ""),
        ({"prefix_caching": False}, ""),
    ],
)
def test_events_are_heard_where_they_are_published(given: dict[str, Any], heard: str, words: Path) -> None:
    made, _ = module().Backend.of(str(words), {**FAKE, **given}, "agg", [])
    sources = asyncio.run(made.kv_event_sources())
    assert [source.values[0] for source in sources] == ([heard] if heard else [])
    asyncio.run(made.cleanup())


@pytest.mark.parametrize(
    ("options", "role", "flags", "complaint"),
    [
        ({"data_parallel_size": 2}, "agg", [], "start as many workers"),
        ({}, "prefill", [], "needs --kv-transfer-config"),
        ({"kv_transfer_config": "{}", "lora_modules": ("a=/a",)}, "decode", [], "adapters are for"),
        ({}, "agg", ["--endpoint", "dyn://a.b"], "NAMESPACE.COMPONENT.ENDPOINT"),
        ({"max_model_len": "many"}, "agg", [], "--max-model-len"),
        ({"kv_events_config": '{"enable_kv_cache_events": true, "endpoint": "tcp://h:9"}'}, "agg", [], "must be bound"),
    ],
)
def test_what_does_not_go_with_a_worker_is_refused(
    options: dict[str, Any], role: str, flags: list[str], complaint: str, words: Path
) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        module().Backend.of(str(words), options, role, flags)


def test_a_model_that_does_not_go_with_flags_is_refused_by_them(words: Path) -> None:
    options = FAKE | {"lora_modules": ("sql=/nowhere",), "enable_lora": True}
    made, _ = module().Backend.of(str(words), options, "agg", [])
    with pytest.raises(InvalidArgument, match="--lora-modules sql: there is no directory"):
        asyncio.run(made.start(worker_id=1))
    asyncio.run(made.cleanup())


def test_the_command_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, module().__name__)
    for name in [name for name in sys.modules if name.partition(".")[0] == "dynamo"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(Unsupported, match="pip install ai-dynamo"):
        dynamo("m")
