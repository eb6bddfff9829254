"""The engine by Dynamo's unified contract for backends: its worker registers, drains and ends it.

See https://docs.nvidia.com/dynamo, "Writing Custom Backends". The one module that imports ai-dynamo.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Self

from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.publisher import ComponentSnapshot, ZmqSource
from dynamo.common.backend.run import run
from dynamo.common.configuration.groups.runtime_args import DynamoRuntimeArgGroup, DynamoRuntimeConfig
from dynamo.common.constants import DisaggregationMode
from dynamo.llm import ModelInput, ModelRuntimeConfig, ModelType, WorkerType, exceptions, register_model

from ...core.errors import Cancelled, CharoniaError, ErrorCode, InvalidArgument, NotReady, ServerExiting
from ...core.request import GenerateChunk, GenerateRequest
from ...inprocess.loop_thread import BridgedStream
from ...inprocess.server import Server
from .tokens import Role, chunk_fields, read_request

_ENDPOINT = "dynamo"
"""What its requests are counted as."""
_SNAPSHOT_SECONDS = 0.5
"""How often the router is told of the cache's use."""
_EVENTS = "kv_events_config"
_CLIENT_ERRORS = {ErrorCode.INVALID_ARGUMENT, ErrorCode.NOT_FOUND, ErrorCode.UNSUPPORTED}
_STATUSES = {ErrorCode.RESOURCE_EXHAUSTED: 429, ErrorCode.UNAVAILABLE: 503}


def serve_worker(model: str, options: Mapping[str, Any], role: Role, flags: Sequence[str]) -> None:
    """Run a worker until it is told to end. `options`: of the engine, by their names; `flags`: of Dynamo's workers.

    Raises:
        CharoniaError: an option is wrong, or the model does not load.
    """
    backend, config = Backend.of(model, options, role, flags)

    async def made(_: list[str] | None) -> tuple[Backend, Any]:
        return backend, config

    try:
        run(Backend, engine_factory=made)
    except Exception:
        if backend.failure is None:
            raise
        raise backend.failure from None


class _Server(Server):
    """A server whose options are flags of a command."""

    @staticmethod
    def _error_words() -> AbstractContextManager[None]:
        return nullcontext()


class Backend(LLMEngine):  # type: ignore[misc]
    """One checkpoint's server in this process, as Dynamo's worker drives it."""

    def __init__(self, model: str, options: Mapping[str, Any], role: Role) -> None:
        """Raises `InvalidArgument` for options that do not go with a worker."""
        if (options.get("data_parallel_size") or 1) != 1:
            raise InvalidArgument("a worker is one replica: start as many workers", field="data_parallel_size")
        if role != "agg" and not options.get("kv_transfer_config"):
            raise InvalidArgument(
                f"--disaggregation-mode {role} needs --kv-transfer-config", field="kv_transfer_config"
            )
        if role != "agg" and options.get("lora_modules"):
            raise InvalidArgument("adapters are for --disaggregation-mode agg", field="lora_modules")
        self._model, self._role = model, role
        self._hub_id = () if Path(model).exists() else (model,)
        self._sockets = tempfile.TemporaryDirectory(prefix="charonia-dynamo-")
        try:
            events, self._events_endpoint = _published_events(options, Path(self._sockets.name))
            self._server = _Server(model, **{**options, _EVENTS: events})
        except BaseException:
            self._sockets.cleanup()
            raise
        self.failure: CharoniaError | None = None
        """Why the model did not load: Dynamo's runtime tells it in words of its own."""
        self._name = ""
        self._adapters: list[str] = []
        self._block_size = 0
        self._streams: dict[str, BridgedStream[GenerateChunk]] = {}
        self._reports: asyncio.Task[None] | None = None
        self._publisher: Any = None

    @classmethod
    def of(cls, model: str, options: Mapping[str, Any], role: Role, flags: Sequence[str]) -> tuple[Self, Any]:
        """The engine, and what Dynamo's own flags and variables say of its worker."""
        parser = argparse.ArgumentParser("charonia dynamo MODEL", allow_abbrev=False)
        DynamoRuntimeArgGroup().add_arguments(parser)
        runtime = DynamoRuntimeConfig.from_cli_args(parser.parse_args(flags))
        runtime.validate()
        if runtime.endpoint:
            *place, runtime.endpoint = runtime.endpoint.removeprefix("dyn://").split(".")
            if len(place) != 2:
                raise InvalidArgument("--endpoint must be dyn://NAMESPACE.COMPONENT.ENDPOINT", field="endpoint")
            runtime.namespace, runtime.component = place
        else:
            runtime.component = "prefill" if role == "prefill" else "backend"
        [name, *_] = options.get("served_model_name") or (Path(model).name,)
        mode = {"disaggregation_mode": DisaggregationMode(role)}
        return cls(model, options, role), WorkerConfig.from_runtime_config(runtime, model, name, **mode)

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Self, Any]:
        """As the contract has it: a checkpoint, and Dynamo's flags."""
        model, *flags = argv or sys.argv[1:]
        return cls.of(model, {}, "agg", flags)

    async def start(self, worker_id: int) -> Any:
        """Load the model. Raises `CharoniaError` if that fails."""
        try:
            await self._server.async_start()
        except CharoniaError as error:
            self.failure = error
            raise
        [config], adapters = self._server.look(lambda gateway: (gateway.model_configs(), gateway.adapters()))
        self._name, self._adapters = config.name, [served.adapter.name for served in adapters]
        numbers = await self._numbers()
        self._reports = asyncio.create_task(self._report())
        length = config.parameters.get("max_model_len")
        self._block_size = int(numbers["tokens_per"])
        return EngineConfig(
            model=self._model,
            served_model_name=self._name,
            model_aliases=[*config.aliases, *self._hub_id],
            llm=LlmRegistration(
                context_length=None if length is None else int(length),
                kv_cache_block_size=self._block_size,
                total_kv_blocks=int(numbers["max"]),
                max_num_seqs=int(numbers["rows"]),
            ),
        )

    async def on_endpoint_ready(self, endpoint: Any) -> None:
        """Adapters are models of their own to the frontend."""
        for name in self._adapters:
            await register_model(
                ModelInput.Tokens,
                ModelType.Chat | ModelType.Completions,
                endpoint,
                self._model,
                kv_cache_block_size=self._block_size,
                runtime_config=ModelRuntimeConfig(),
                lora_name=name,
                base_model_path=self._model,
                worker_type=WorkerType.Aggregated,
                ignore_weights=True,
            )

    async def generate(self, request: Any, context: Any) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of an answer. Errors are Dynamo's."""
        stream: BridgedStream[GenerateChunk] | None = None
        try:
            read = read_request(request, context.id(), self._role, self._adapters)
            stream = BridgedStream(self._server.running.thread, partial(self._answer, read))
            self._streams[context.id()] = stream
            while True:
                yield chunk_fields(await stream.next_awaited())
        except StopAsyncIteration:
            pass
        except Cancelled:
            yield {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
        except CharoniaError as error:
            raise _dynamo_error(error) from None
        finally:
            self._streams.pop(context.id(), None)
            if stream is not None:
                stream.close()

    async def _answer(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        gateway = self._server.running.gateway
        with gateway.open_request(_ENDPOINT) as context:
            handle = await gateway.acquire(context, self._name)
            async with aclosing(handle.generate(request)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def abort(self, context: Any) -> None:
        """The client has left, or the frontend has what it wants."""
        stream = self._streams.get(context.id())
        if stream is not None:
            stream.interrupt()

    async def is_quiescent(self) -> bool:
        """Whether no other worker is to fetch anything from this one."""
        return not (await self._numbers()).get("held")

    async def cleanup(self) -> None:
        """End it, whatever of it has begun."""
        if self._reports is not None:
            self._reports.cancel()
        await self._server.async_stop()
        self._sockets.cleanup()

    async def kv_event_sources(self) -> list[Any]:
        """Where the worker hears what the prefix cache holds."""
        return [ZmqSource(self._events_endpoint)] if self._events_endpoint else []

    async def health_check_payload(self) -> Any:
        return build_health_check_payload(bos_token_id=1)

    async def register_prometheus(self, metrics: Any) -> None:
        """The server's own metrics stand among the worker's."""
        metrics.register_prometheus_expfmt_callback(self._server.metrics)

    def component_metrics_dp_ranks(self) -> list[int]:
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        self._publisher = publisher

    async def _report(self) -> None:
        while True:
            numbers = await self._numbers()
            if self._publisher is not None and numbers.get("max"):
                asked = numbers["asked"]
                self._publisher.publish(
                    0,
                    ComponentSnapshot(
                        kv_used_blocks=int(numbers["used"]),
                        kv_total_blocks=int(numbers["max"]),
                        gpu_cache_usage=numbers["used"] / numbers["max"],
                        dp_rank=0,
                        kv_cache_hit_rate=numbers["hit"] / asked if asked else None,
                    ),
                )
            await asyncio.sleep(_SNAPSHOT_SECONDS)

    async def _numbers(self) -> dict[str, float]:
        """What the engine tells of its cache: blocks in all (`max`) and `used`, tokens of one (`tokens_per`), `rows`,
        blocks that are `held` for other workers, tokens that were `asked` for and those that were `hit`. Nothing while
        its core is started again."""
        return await self._server.running.thread.run_from_loop(self._measure)

    async def _measure(self) -> dict[str, float]:
        numbers: dict[str, float] = {}
        for measurement in self._server.running.gateway.measurements():
            for family, value, labels in measurement.readings:
                if isinstance(value, int | float) and (name := _NUMBERS.get((family, *labels.values()))):
                    numbers[name] = value
        return numbers


_BLOCKS = "nv_trt_llm_kv_cache_block_metrics"
_NUMBERS: dict[tuple[str, ...], str] = {
    **{(_BLOCKS, kind): kind for kind in ("max", "used", "tokens_per")},
    ("nv_trt_llm_request_metrics", "max"): "rows",
    ("charonia_kv_transfer_held_blocks",): "held",
    ("charonia_prefix_cache_queries_total",): "asked",
    ("charonia_prefix_cache_hits_total",): "hit",
}
"""Names for readings, by family and labels."""


def _published_events(options: Mapping[str, Any], directory: Path) -> tuple[str | None, str]:
    """How the engine is to publish events, and where the worker hears them; nowhere if they are switched off."""
    if options.get("prefix_caching") is False:
        return options.get(_EVENTS), ""
    if (written := options.get(_EVENTS)) is None:
        endpoint = f"ipc://{directory}/events"
        return json.dumps({"enable_kv_cache_events": True, "endpoint": endpoint}), endpoint
    try:
        config = dict(json.loads(written))
    except (TypeError, ValueError):
        return written, ""  # which the engine refuses
    if not config.get("enable_kv_cache_events") or config.get("publisher") == "null":
        return written, ""
    endpoint = str(config.get("endpoint", "tcp://*:5557"))
    heard = endpoint.replace("*", "127.0.0.1").replace("[::]", "[::1]")
    if heard == endpoint and not endpoint.startswith("ipc://"):
        raise InvalidArgument(
            f"{_EVENTS}: the worker connects to its endpoint, which must be bound: ipc:// or tcp://*:"
        )
    return written, heard


def _dynamo_error(error: CharoniaError) -> Exception:
    """The error by which Dynamo knows whose fault it is, and its frontend which status to answer with."""
    made: Exception
    if isinstance(error, ServerExiting | NotReady):  # the frontend may go on with another worker
        made = exceptions.EngineShutdown(error.message)
    elif error.code in _STATUSES:
        made = exceptions.HttpError(_STATUSES[error.code], error.message)
    elif error.code in _CLIENT_ERRORS:
        made = exceptions.InvalidArgument(error.message)
    else:
        made = exceptions.Unknown(error.message)
    return made
