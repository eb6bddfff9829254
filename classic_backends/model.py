"""A classic model as the contract wants it: tensors go in, tensors come out; it queues, batches and counts.

Knows nothing of protocols, of where its config came from, and of what its runtimes do.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from ..core.errors import CharoniaError, InvalidArgument, RequestTimeout, Unavailable, request_id_prefix
from ..core.metrics import Reading
from ..core.model import ModelConfig, ModelSamples, ModelStats
from ..core.request import InferRequest, InferResponse
from ..core.request_context import ExecutionTimes, RequestContext
from ..core.statistics import VersionStatistics
from .backend_parameters import read_number
from .batching.batch_execution import BatchLayout, execute_batch, execute_decoupled, execute_single
from .batching.batching_config import read_batching_config
from .batching.dispatcher import Dispatcher, QueuedJob
from .batching.dynamic_batcher import CloseReason, DynamicBatcher
from .batching.inference_job import (
    InferenceJob,
    NullSink,
    ResponseChannel,
    ResponseSink,
    SingleResponse,
    SingleResponseStream,
)
from .batching.instance_pool import EXECUTION_TIMEOUT, InstancePool
from .batching.latency_metrics import LatencyMetrics, first_response_bounds
from .batching.model_metrics import FailureReason, ModelMetrics
from .batching.ragged_batches import read_ragged_config
from .batching.request_queue import QueuedRequest
from .batching.response_order import ResponseOrderer
from .batching.response_router import ResponseRouter
from .instance_groups import InstanceSlot, read_instance_slots
from .runtime import Runtime, RuntimeLoader
from .sequences.sequence_scheduler import SequenceScheduler
from .sequences.sequence_support import read_sequence_support
from .signature import ModelSignature, check_ragged_support

_MICROSECOND = 1000
_NOBODY = NullSink()
_NO_SAMPLES = ModelSamples()


class ClassicModel:
    """One version of a model, on as many instances as its config asks for.

    `directory`: of the version. `parameters`: the backend's own; the model's are added to them. `samples`: what goes
    wrong with warm-up fails the load. `quantiles`: of the summaries of its latencies, none for no summaries.

    Raises:
        InvalidArgument: the config contradicts itself; `field` names the culprit.
        Unsupported: it wants what is not served.
    """

    def __init__(
        self,
        config: ModelConfig,
        loader: RuntimeLoader,
        directory: Path,
        parameters: Mapping[str, str] | None = None,
        samples: ModelSamples = _NO_SAMPLES,
        quantiles: Sequence[float] = (),
    ) -> None:
        self._config = config
        self._loader = loader
        self._directory = directory
        self._parameters = {**(parameters or {}), **config.parameters}
        limit = read_number(self._parameters, EXECUTION_TIMEOUT, 0.0)
        self._parameters.pop(EXECUTION_TIMEOUT, None)
        self._warm_up = samples.warmup_requests
        self._sequences = sequences = read_sequence_support(config, samples.initial_states)
        rules = read_batching_config(config.document, config.max_batch_size, config.decoupled)
        self._rules = rules if sequences is None else sequences.rules.batching
        stateful = None if sequences is None else sequences.layout
        self._form = BatchLayout(ModelSignature(config), read_ragged_config(config.document), stateful)
        self._slots = read_instance_slots(config.name, config.document)
        self._account = ModelMetrics(
            LatencyMetrics(quantiles, first_response_bounds(config.document), config.decoupled)
        )
        self._delivery = ResponseRouter(self._account, self._form.signature.batched)
        self._line = ResponseOrderer()
        self._crew = InstancePool(self._load, limit)
        self._dispatcher: Dispatcher | SequenceScheduler | None = None
        self._inline: Runtime | None = None

    @property
    def config(self) -> ModelConfig:
        return self._config

    def stats(self) -> ModelStats:
        account = self._account
        cancelled = account.failures[FailureReason.CANCELED]
        return ModelStats(
            self._inline is not None or (self._dispatcher is not None and self._crew.ready),
            success=account.success.count,
            failure=account.failures.total() - cancelled,
            cancelled=cancelled,
        )

    def statistics(self) -> VersionStatistics:
        return self._account.statistics()

    def count(self, context: RequestContext) -> None:
        self._account.record_request_end(context)

    def readings(self) -> Iterator[Reading]:
        """Everything measured, for a scrape."""
        yield from self._account.readings(0 if self._dispatcher is None else len(self._dispatcher))
        yield Reading("charonia_instance_restarts_total", self._crew.restarts)
        if isinstance(self._dispatcher, SequenceScheduler):
            yield from self._dispatcher.readings()

    async def load(self) -> None:
        """Return when every instance is loaded and warm. Raises what loading one raises; then nothing is left."""
        first, *others = self._slots
        try:
            await self._crew.load_instances([first])
            traits = self._crew.first.traits
            check_ragged_support(self._form.signature, traits.ragged, self._config.backend)
            waits = self._config.decoupled or self._rules.max_delay_ns or self._sequences is not None
            if traits.inline and not waits:
                # No queue, no thread.
                self._inline = self._crew.first
            else:
                await self._crew.load_instances(others)
        except BaseException:
            await self.unload()
            raise
        self._open()

    async def unload(self) -> None:
        if self._dispatcher is not None:
            self._dispatcher.close()
        self._dispatcher = self._inline = None
        await self._crew.stop()

    def infer(self, request: InferRequest, context: RequestContext) -> AsyncIterator[InferResponse]:
        """Raises what the runtime raises; `Unavailable` where the queue is full or the model is not loaded, and
        `RequestTimeout` where its time in the queue ran out."""
        if self._inline is not None:
            return SingleResponseStream(partial(self._infer_inline, self._inline, request, context))
        if self._config.decoupled:
            return self._infer_streamed(request, context)
        return SingleResponseStream(partial(self._infer_once, request, context))

    async def _infer_inline(self, runtime: Runtime, request: InferRequest, context: RequestContext) -> InferResponse:
        begun = time.monotonic_ns()
        result = execute_single(runtime, self._form, request, self._slots[0].placement.name)
        whole = time.monotonic_ns() - begun
        context.execution = ExecutionTimes(begun, begun, result.timing)
        if result.error is not None:
            self._account.record_failure(FailureReason.BACKEND, whole)
            raise result.error
        size = self._form.signature.batch_size(request)
        self._account.record_execution(
            size, result.timing, CloseReason.IDLE if self._rules.combine_requests else CloseReason.ALONE, 1
        )
        self._account.record_success(size, whole, 0, result.timing)
        return result.responses[0]

    async def _infer_once(self, request: InferRequest, context: RequestContext) -> InferResponse:
        answer = SingleResponse(asyncio.get_running_loop())
        waiting = self._waiting(request, answer, context)
        self._submit(waiting)
        timer = self._timer(waiting)
        try:
            return await answer.future
        except asyncio.CancelledError:
            if answer.future.cancelled():
                self._give_up(waiting, FailureReason.CANCELED)
            raise
        finally:
            if timer is not None:
                timer.cancel()

    async def _infer_streamed(
        self, request: InferRequest, context: RequestContext
    ) -> AsyncGenerator[InferResponse, None]:
        channel = ResponseChannel(asyncio.get_running_loop())
        waiting = self._waiting(request, channel, context)
        waiting.item.unread_slots = channel.unread_slots
        self._submit(waiting)
        timer = self._timer(waiting)
        try:
            while (response := await channel.next_response()) is not None:
                yield response
        finally:
            if timer is not None:
                timer.cancel()
            if not channel.ended:
                self._give_up(waiting, FailureReason.CANCELED)

    def _timer(self, waiting: QueuedJob) -> asyncio.TimerHandle | None:
        """Of a request whose own time may run out while it is executed."""
        if waiting.answer_deadline is None:
            return None
        left = max(0, waiting.answer_deadline - time.monotonic_ns()) / 1e9
        return asyncio.get_running_loop().call_later(left, self._time_out, waiting)

    def _time_out(self, waiting: QueuedJob) -> None:
        if not waiting.item.sink.ended:
            self._give_up(waiting, FailureReason.REJECTED, RequestTimeout())

    def _waiting(self, request: InferRequest, sink: ResponseSink, context: RequestContext) -> QueuedJob:
        signature = self._form.signature
        job, size = self._job(request, sink, context), signature.batch_size(request)
        if self._sequences is not None:
            job.sequence_flags = self._sequences.flag_reader.read_flags(request, size)
        kind = signature.batch_key(request) if self._rules.combine_requests else None
        timeout = _number(request, "timeout") * _MICROSECOND
        return QueuedRequest(job, size, kind, _number(request, "priority"), timeout)

    def _job(self, request: InferRequest, sink: ResponseSink, context: RequestContext | None = None) -> InferenceJob:
        inputs = self._form.signature.to_arrays(request)
        return InferenceJob(inputs, request.outputs, sink, request.id, context=context)

    def _submit(self, waiting: QueuedJob) -> None:
        try:
            if self._dispatcher is None:
                raise Unavailable(f"model '{self._config.name}' is not loaded")
            if self._rules.preserve_ordering:
                waiting.item.sink = self._line.add_request(waiting.item.sink)
            self._dispatcher.submit(waiting)
        except CharoniaError:
            self._account.record_failure(FailureReason.REJECTED, 0)
            waiting.item.sink.end()
            raise

    def _give_up(self, waiting: QueuedJob, reason: FailureReason, error: Exception | None = None) -> None:
        """Its reader left, or is told that `error`. What is made of it is dropped."""
        self._account.record_failure(reason, time.monotonic_ns() - waiting.arrived_at)
        waiting.item.give_up()
        if self._dispatcher is not None:
            self._dispatcher.cancel_request(waiting)
        waiting.item.sink.end(error)

    def _load(self, slot: InstanceSlot) -> Runtime:
        """In the thread of the instance."""
        config = self._config if self._sequences is None else self._sequences.config
        runtime = self._loader.load(self._directory, config, slot.placement, self._parameters)
        try:
            for sample in self._warm_up:
                for _ in range(sample.times):
                    self._warm(runtime, sample.request, slot.placement.name)
        except BaseException:
            runtime.close()
            raise
        return runtime

    def _warm(self, runtime: Runtime, request: InferRequest, name: str) -> None:
        job = self._job(request, _NOBODY)
        if self._sequences is not None:
            self._sequences.mark_warm_up(job)
        if self._config.decoupled:
            results = list(execute_decoupled(runtime, self._form, job, name))
        else:
            results = [execute_batch(runtime, self._form, [job], name)]
        for result in results:
            if result.error is not None:
                raise InvalidArgument(f"failed to run warmup sample on '{name}': {result.error}")

    def _open(self) -> None:
        form, clerk, decoupled = self._form, self._delivery, self._config.decoupled
        if self._sequences is None:
            self._dispatcher = Dispatcher(DynamicBatcher(self._rules), form, clerk, decoupled)
        else:
            self._dispatcher = SequenceScheduler(self._sequences.rules, form, clerk, decoupled)
        if self._inline is None:
            self._crew.start_serving(self._dispatcher)


def _number(request: InferRequest, name: str) -> int:
    """The parameter of that name, 0 without it."""
    value = request.parameters.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        message = f"parameter '{name}' must be an integer of at least 0, got {value!r}"
        raise InvalidArgument(f"{request_id_prefix(request.id)}{message}", field=name)
    return value
