"""A classic model: tensors go in, tensors come out. It queues and batches requests, executes them on its instances, and
counts.

Knows nothing of protocols, of the source of its config, and of how its runtimes compute.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from ..core.direct_stream import ReadyResponse
from ..core.errors import CharoniaError, InvalidArgument, RequestTimeout, Unavailable, request_id_prefix
from ..core.metrics import Reading
from ..core.model import Capabilities, ModelConfig, ModelSamples, ModelStats
from ..core.request import InferRequest, InferResponse
from ..core.request_context import ExecutionTimes, RequestContext, RequestEnd
from ..core.runtime import InstancePlacement, Parameters, Runtime, RuntimeLoader
from ..core.wait_graph import QueueWaits
from ..processes.rate_limiter import RateLimiter
from ..telemetry.model_metrics import (
    CloseReason,
    FailureReason,
    LatencyMetrics,
    ModelMetrics,
    first_response_bounds,
)
from .backend_config import read_number, read_placements
from .batching.batch_execution import (
    BatchLayout,
    ModelSignature,
    RaggedConfig,
    check_ragged_support,
    execute_batch,
    execute_decoupled,
    execute_single,
    read_ragged_config,
)
from .batching.batching_config import NS_PER_US, read_batching_config
from .batching.dispatcher import Dispatcher
from .batching.dynamic_batcher import DynamicBatcher
from .batching.inference_job import InferenceJob
from .batching.instance_pool import DEFAULT_RESTART_PAUSE, EXECUTION_TIMEOUT, RESTART_PAUSE, InstancePool
from .batching.queued_request import QueuedRequest, ResponseChannel, ResponseOrderer
from .batching.request_execution import execute_alone
from .batching.response_router import ResponseRouter
from .sequences.sequence_scheduler import SequenceScheduler
from .sequences.sequence_support import read_sequence_support

log = logging.getLogger(__name__)

_NO_SAMPLES = ModelSamples()
_WARMING_UP = "model '%s' instance %s is running warmup sample '%s' for iteration %d"


class ClassicModel:
    """One version of a model, on as many instances as its config asks for."""

    def __init__(
        self,
        config: ModelConfig,
        loader: RuntimeLoader,
        directory: Path,
        parameters: Parameters | None = None,
        samples: ModelSamples = _NO_SAMPLES,
        quantiles: Sequence[float] = (),
        limiter: RateLimiter | None = None,
    ) -> None:
        """`directory`: of the version. `parameters`: the backend's; those of the config override them. `quantiles`: of
        the latency summaries, empty for none. `limiter`: of the resources that instances take turns at.

        Raises:
            InvalidArgument: values of the config contradict each other; `field` names one of them.
            Unsupported: the config asks for what is not built.
        """
        self.config = config
        self._loader = loader
        self._waits = loader.waits if loader.by_request else None
        self._directory = directory
        self._parameters = {**(parameters or {}), **config.parameters}
        execution_timeout = read_number(self._parameters, EXECUTION_TIMEOUT)
        restart_pause = read_number(self._parameters, RESTART_PAUSE, DEFAULT_RESTART_PAUSE)
        for name in (EXECUTION_TIMEOUT, RESTART_PAUSE):
            self._parameters.pop(name, None)
        self._warmup_requests = samples.warmup_requests
        self._sequences = sequences = read_sequence_support(config, samples.initial_states, loader.by_request)
        combines = loader.by_request or not config.decoupled
        batching = read_batching_config(config.raw, config.max_batch_size, combines)
        self._batching = batching if sequences is None else sequences.config.batching
        self._signature = ModelSignature(config, relays=loader.by_request)
        ragged = RaggedConfig() if loader.by_request else read_ragged_config(config.raw)
        self._layout = BatchLayout(self._signature, ragged, sequences, loader.by_request)
        self._placements = read_placements(config.name, config.raw)
        latencies = LatencyMetrics(quantiles, first_response_bounds(config.raw), config.decoupled)
        self._metrics = metrics = ModelMetrics(latencies)
        self.statistics = metrics.statistics
        self.count = metrics.record_request_end
        self._orderer = ResponseOrderer() if self._batching.preserve_ordering else None
        self._pool = InstancePool(self._load_runtime, execution_timeout, restart_pause, limiter)
        self._takes_turns = limiter is not None and any(placement.rate is not None for placement in self._placements)
        self._dispatcher: Dispatcher | SequenceScheduler | None = None
        self._inline_runtime: Runtime | None = None

    def stats(self) -> ModelStats:
        metrics = self._metrics
        cancelled = metrics.failures[FailureReason.CANCELED]
        return ModelStats(
            self._inline_runtime is not None or (self._dispatcher is not None and self._pool.ready),
            success=metrics.success.count,
            failure=metrics.failures.total() - cancelled,
            cancelled=cancelled,
            sequences=self._dispatcher.open_sequences if isinstance(self._dispatcher, SequenceScheduler) else 0,
        )

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(inline=None if self._inline_runtime is None else self, self_check=self, measured=self)

    async def works_again_within(self, seconds: float) -> bool:
        """Whether processes that have ended are replaced after so many seconds; not where none is to be."""
        return await self._pool.are_replaced_within(seconds)

    async def unready_reason(self) -> str:
        """Triton's text where the check of an instance's own model fails; the log says why."""
        ready = await self._pool.check_ready()
        return "" if ready else f"Model '{self.config.name}' is not ready (user-defined check failed)."

    def readings(self) -> Iterator[Reading]:
        yield from self._metrics.readings(0 if self._dispatcher is None else len(self._dispatcher))
        yield Reading("charonia_instance_restarts_total", self._pool.restarts)
        yield Reading("charonia_instances", self._pool.count)
        yield Reading("charonia_max_batch_size", self.config.max_batch_size)
        if isinstance(self._dispatcher, SequenceScheduler):
            yield from self._dispatcher.readings()

    async def load(self) -> None:
        """Return when every instance is loaded and has answered the warm-up requests. After an error of one of them,
        none is left."""
        first, *others = self._placements
        decoupled = self.config.decoupled
        try:
            await self._pool.load_instances([first])
            runtime = self._pool.first_runtime
            check_ragged_support(self._signature, runtime.traits.ragged, self.config.backend)
            waits = decoupled or self._batching.max_delay_ns or self._sequences is not None
            if runtime.traits.inline and not (waits or self._takes_turns):
                self._inline_runtime = runtime  # without a queue and threads
            else:
                await self._pool.load_instances(others)
        except BaseException:
            await self.unload()
            raise
        if self._sequences is None:
            router = ResponseRouter(self._metrics, self._signature.batched)
            self._dispatcher = Dispatcher(DynamicBatcher(self._batching), self._layout, router, decoupled)
        else:
            self._dispatcher = SequenceScheduler(self._sequences.config, self._layout, self._metrics, decoupled)
        if self._inline_runtime is None:
            self._pool.start_serving(self._dispatcher)
        if self._waits is not None:
            self._waits.add_model(self)

    def queue_waits(self) -> Sequence[QueueWaits]:
        if self._dispatcher is None or self._pool.replacing:
            return ()
        return self._dispatcher.queue_waits()

    async def unload(self) -> None:
        if self._waits is not None:
            self._waits.remove_model(self)
        if self._dispatcher is not None:
            self._dispatcher.close()
        self._dispatcher = self._inline_runtime = None
        if self._loader.by_request:
            self._loader.interrupt_loads()
        await self._pool.stop()

    def infer(self, request: InferRequest, context: RequestContext) -> AsyncIterator[InferResponse]:
        """Raises the runtime's error; `Unavailable` if the queue is full or the model is not loaded, and
        `RequestTimeout` if the request waited too long."""
        if self.config.decoupled:
            return self._stream(request, context)
        answer = self.answer_now(request, context)
        return ReadyResponse(answer[0]) if answer else _SingleResponseStream(partial(self._respond, request, context))

    def infer_alone(self, request: InferRequest, context: RequestContext) -> AsyncIterator[InferResponse]:
        """As `infer` of a model with one response each, in an execution that no other request shares."""
        return _SingleResponseStream(partial(self._respond, request, context, alone=True))

    def answer_now(
        self, request: InferRequest, context: RequestContext | None = None
    ) -> tuple[InferResponse, ExecutionTimes] | None:
        """See `InlineModel`. `context`: gets the times, also those of a failure."""
        runtime = self._inline_runtime
        if runtime is None:
            return None
        started_at = time.monotonic_ns()
        result = execute_single(runtime, self._layout, request, self._placements[0].name)
        latency = time.monotonic_ns() - started_at
        times = ExecutionTimes(started_at, started_at, result.timing)
        if context is not None:
            context.execution = times
        if result.error is not None:
            self._metrics.record_failure(FailureReason.BACKEND, latency)
            raise result.error
        size = self._signature.batch_size(request)
        reason = CloseReason.IDLE if self._batching.combine_requests else CloseReason.ALONE
        self._metrics.record_execution(size, result.timing, reason, 1)
        self._metrics.record_success(size, latency, 0, result.timing)
        [response] = result.responses
        assert isinstance(response, InferResponse)
        return response, times

    def count_end(self, end: RequestEnd) -> None:
        self._metrics.ended_requests[end] += 1

    async def _respond(self, request: InferRequest, context: RequestContext, alone: bool = False) -> InferResponse:
        queued = self._submit(request, context, alone)
        try:
            response = await queued.channel.next_response()
        finally:
            self._finish(queued)
        assert response is not None
        return response

    async def _stream(self, request: InferRequest, context: RequestContext) -> AsyncGenerator[InferResponse, None]:
        queued = self._submit(request, context)
        try:
            while (response := await queued.channel.next_response()) is not None:
                yield response
        finally:
            self._finish(queued)

    def _submit(self, request: InferRequest, context: RequestContext, alone: bool = False) -> QueuedRequest:
        size = self._signature.batch_size(request)
        job = InferenceJob(self._signature.to_arrays(request), request.outputs)
        if self._sequences is not None:
            job.sequence_flags = self._sequences.read_flags(request, size)
        combines = self._batching.combine_requests
        queued = QueuedRequest(
            job,
            ResponseChannel(self.config.decoupled),
            context,
            request.id,
            size,
            object() if alone else self._signature.batch_key(request) if combines else None,
            timeout_ns=_read_count(request, "timeout") * NS_PER_US,
            priority=self._batching.priority_levels if context.background else _read_count(request, "priority"),
            parameters=request.parameters,
        )
        try:
            if self._dispatcher is None:
                raise Unavailable(f"model '{self.config.name}' is not loaded")
            if self._orderer is not None:
                self._orderer.add(queued.channel)
            self._dispatcher.submit(queued)
            context.ask_to_end = partial(_ask_to_end, queued) if self._loader.by_request else None
        except CharoniaError:
            self._metrics.record_failure(FailureReason.REJECTED, 0)
            queued.channel.end()
            raise
        if queued.answer_deadline is not None:  # its own timeout may run out while it is executed
            seconds = max(0, queued.answer_deadline - time.monotonic_ns()) / 1e9
            queued.answer_timer = asyncio.get_running_loop().call_later(seconds, self._time_out, queued)
        return queued

    def _time_out(self, queued: QueuedRequest) -> None:
        if not queued.channel.ended:
            self._give_up(queued, FailureReason.REJECTED, RequestTimeout())

    def _finish(self, queued: QueuedRequest) -> None:
        """Called when the reader has all responses, or left."""
        queued.context.ask_to_end = None
        if queued.answer_timer is not None:
            queued.answer_timer.cancel()
        if not queued.channel.ended:
            self._give_up(queued, FailureReason.CANCELED)

    def _give_up(self, queued: QueuedRequest, reason: FailureReason, error: Exception | None = None) -> None:
        """Drop a request whose reader left or is to be told `error`."""
        self._metrics.record_failure(reason, time.monotonic_ns() - queued.arrived_at)
        queued.give_up()
        if self._dispatcher is not None:
            self._dispatcher.cancel_request(queued)
        queued.channel.end(error)

    def _load_runtime(self, placement: InstancePlacement) -> Runtime:
        """Called in the thread of the instance."""
        config = self.config if self._sequences is None else self._sequences.runtime_config
        runtime = self._loader.load(self._directory, config, placement, self._parameters)
        try:
            for request, times in self._warmup_requests:
                for iteration in range(1, times + 1):
                    log.debug(_WARMING_UP, self.config.name, placement.name, request.id, iteration)
                    self._warm_up(runtime, request, placement.name)
        except BaseException:
            runtime.close()
            raise
        return runtime

    def _warm_up(self, runtime: Runtime, request: InferRequest, instance: str) -> None:
        job = InferenceJob(self._signature.to_arrays(request), request.outputs)
        if self._sequences is not None:
            self._sequences.mark_warm_up(job)
        if self._loader.by_request:
            errors = [execute_alone(runtime, self._layout, job, instance)]
        elif self.config.decoupled:
            errors = [result.error for result in execute_decoupled(runtime, self._layout, job, instance)]
        else:
            errors = [execute_batch(runtime, self._layout, [job], instance).error]
        for error in errors:
            if error is not None:
                raise InvalidArgument(f"failed to run warmup sample '{request.id}' on '{instance}': {error}")


class _SingleResponseStream:
    """The stream of one response, which `make` computes when it is asked for. An async generator would cost as much
    again as a small execution."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[], Coroutine[Any, Any, InferResponse]]) -> None:
        self._make: Callable[[], Coroutine[Any, Any, InferResponse]] | None = make

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Coroutine[Any, Any, InferResponse]:
        make = self._make
        self._make = None
        return _stop_iteration() if make is None else make()

    async def aclose(self) -> None:
        self._make = None


async def _stop_iteration() -> InferResponse:
    raise StopAsyncIteration


def _ask_to_end(queued: QueuedRequest) -> bool:
    """Tell a model that has the request that its answer is not needed; False where it does not have it yet."""
    if queued.finished:
        return True
    if queued.execution is None or queued.queued:
        return False
    queued.execution.cancel()
    return True


def _read_count(request: InferRequest, name: str) -> int:
    """An integer parameter of a request, 0 without it."""
    value = request.parameters.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        message = f"parameter '{name}' must be an integer of at least 0, got {value!r}"
        raise InvalidArgument(f"{request_id_prefix(request.id)}{message}", field=name)
    return value
