"""An `Engine` over TensorRT-LLM: our queue, admission and deadlines in front, its `LLM` behind.

The queue's order is that of our own scheduler, whose parts these are; its steps are ticks of a clock here. What was
handed over is scheduled by TensorRT-LLM. Token ids in, token ids out. Lives in one event loop.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from ...core.errors import CharoniaError, Internal, Unavailable
from ...core.metrics import EngineTotals
from ...core.request import FinishReason, GenerateRequest
from ...engine.client.admission import AdmissionControl, QueueLimits, QueueTicket
from ...engine.client.engine import EngineCapabilities, count_by_priority
from ...engine.client.sequence_stats import SequenceStats
from ...engine.client.token_stream import TokenStream
from ...engine.core.messages import AddRequest, CoreLoading, CoreReady
from ...scheduler.sequence import Sequence, SequenceSpec
from ...scheduler.tenants.fairness import OUTPUT_WEIGHT, Fairness
from ...scheduler.waiting_queue import WaitingQueue
from ...telemetry.llm_metrics import CacheBlocks, EngineState, LlmMetrics
from .options import TrtllmOptions
from .request import TrtllmRequest
from .runtime import TrtllmRuntime, TrtllmRuntimeLoader

if TYPE_CHECKING:
    from tensorrt_llm import LLM

log = logging.getLogger(__name__)

TICKS_PER_SECOND = 50
"""Ticks of the clock that stand for steps."""
_AGEING = 5 * TICKS_PER_SECOND
"""Ticks after which a waiting request is as urgent as the next class."""
_CREDIT = 8192.0
"""Tokens that a tenant may save by asking for less than its share."""


class AdmissionQueue:
    """`places`: sequences that may be on the way at once."""

    def __init__(self, places: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._places = places
        self._clock = clock
        self._fairness = Fairness(_AGEING, _CREDIT)
        self._waiting = WaitingQueue(self._fairness)
        self._arrivals = 0
        self.running = 0

    def __len__(self) -> int:
        """The number of sequences that wait."""
        return len(self._waiting)

    def enqueue(self, spec: SequenceSpec) -> Sequence:
        """Append a request; the sequence stands for it in the other methods."""
        seniority = self._now() + spec.priority * _AGEING
        slot = self._fairness.slot_of(spec.tenant, spec.weight)
        sequence = Sequence(spec, self._arrivals, seniority, seniority, [], slot)
        self._arrivals += 1
        self._fairness.sequence_arrived(slot)
        self._waiting.enqueue(sequence)
        return sequence

    def pop_next(self) -> Sequence | None:
        """The next sequence to hand over, which counts as running from then on; None if none waits or all places are
        taken."""
        if self.running >= self._places or not len(self._waiting):
            return None
        sequence = self._waiting.peek(self._now())
        assert sequence is not None
        self._waiting.pop(sequence)
        sequence.admitted = True
        self.running += 1
        return sequence

    def release(self, sequence: Sequence) -> None:
        """The sequence has ended, or was given up while it waited."""
        if sequence.admitted:
            self.running -= 1
        else:
            self._waiting.remove(sequence)
        self._fairness.sequence_ended(sequence.tenant_slot)

    def charge(self, sequence: Sequence, prompt: int, outputs: int = 0) -> None:
        """Charge the tenant for so many prompt tokens computed and so many generated."""
        self._fairness.charge_prompt(sequence.tenant_slot, prompt + round(OUTPUT_WEIGHT * outputs))

    def check_integrity(self) -> None:
        """Raises `AssertionError` where the counts do not add up."""
        assert 0 <= self.running <= self._places
        assert len(self._waiting) == sum(1 for _ in self._waiting)

    def _now(self) -> int:
        return int(self._clock() * TICKS_PER_SECOND)


_PERIOD_SECONDS = 1.0
"""Between two readings of TensorRT-LLM's statistics."""


class TrtllmClient:
    """Requests to one `LLM`, which `start()` makes and `close()` ends. One that breaks is not made again: the operator
    loads the model anew."""

    def __init__(
        self,
        loader: TrtllmRuntimeLoader,
        options: TrtllmOptions,
        on_progress: Callable[[CoreLoading], None],
        metrics: LlmMetrics,
    ) -> None:
        self._loader = loader
        self._default_timeout = options.default_request_timeout
        self._on_progress = on_progress
        self._metrics = metrics
        self.admission = AdmissionControl(QueueLimits(options.max_queued_requests, options.max_queued_tokens))
        self._stats = IterationStats(metrics)
        self._requests: dict[int, TrtllmRequest] = {}
        self._queue = AdmissionQueue(1)
        self._last_key = 0
        self._runtime: TrtllmRuntime | None = None
        self._why_not = "the engine is not ready"
        self._following: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        return self._runtime is not None

    @property
    def kv_tokens(self) -> tuple[int, int]:
        used, capacity = self._stats.kv_tokens
        # As of the last iteration; none follows in which all was freed.
        return used if self._queue.running else 0, capacity

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities()

    def state(self) -> EngineState:
        waiting = [request for request in self._requests.values() if request.task is None]
        used, capacity = self.kv_tokens
        runtime = self._runtime
        size = 0 if runtime is None or not capacity else runtime.ready.block_size
        return EngineState(
            running=self._queue.running,
            most_running=0 if runtime is None else runtime.max_sequences,
            prefilling=sum(
                request.task is not None and request.stream.stats.first is None for request in self._requests.values()
            ),
            waiting=count_by_priority(request.spec.priority for request in waiting),
            queue_age=max((request.stream.stats.seconds_waited for request in waiting), default=0.0),
            kv_usage=used / capacity if capacity else 0.0,
            replicas_ready=int(self.ready),
            kv_capacity=capacity,
            blocks=CacheBlocks(size, capacity // size, (capacity - used) // size) if size else CacheBlocks(),
            totals=self._stats.totals,
        )

    async def start(self) -> CoreReady:
        began = time.monotonic()
        self._on_progress(CoreLoading("TensorRT-LLM", 0.0, 0.0))
        runtime = await self._loader.load()
        self._on_progress(CoreLoading("TensorRT-LLM", 1.0, time.monotonic() - began, runtime.version))
        self._runtime = runtime
        self._queue = AdmissionQueue(runtime.max_sequences)
        self._following = asyncio.create_task(self._stats.follow(runtime.llm))
        return runtime.ready

    async def close(self) -> None:
        self._end(Unavailable("the engine was stopped"))
        await self._loader.close()

    def admit(self, request: GenerateRequest, tenant: str = "") -> QueueTicket:
        self.admission.check_count(request.prompt_count, request.choice_count)
        if self._runtime is None:
            raise Unavailable(self._why_not)
        return self.admission.admit(tenant, request.choice_count)

    @contextmanager
    def open_stream(
        self, add: AddRequest, stats: SequenceStats | None = None, ticket: QueueTicket | None = None
    ) -> Iterator[TokenStream]:
        if self._runtime is None:
            raise Unavailable(self._why_not)
        stats = stats or SequenceStats(self._metrics)
        with ticket or self.admission.admit(add.spec.tenant) as ticket:
            prompt = len(add.spec.prompt)
            ticket.admission.add_prompt(ticket, prompt)
            arguments = self._runtime.translate(add)  # a request that can never be satisfied does not wait to hear so
            left = stats.time_left(add.timeout or self._default_timeout)
            self._last_key += 1
            spec = msgspec.structs.replace(add.spec, key=self._last_key)
            stats.record_submission(prompt)
            stream = TokenStream(stats, ticket, spec.priority)
            request = self._requests[spec.key] = TrtllmRequest(spec, arguments, stream, self._queue.enqueue(spec))
            if left:
                request.timer = asyncio.get_running_loop().call_later(left, self._expire, request)
            self._submit_next()
            try:
                yield stream
            finally:
                self._forget(request)

    def _submit_next(self) -> None:
        """Begin the requests whose turn it is, while there is room."""
        while self._runtime is not None and (sequence := self._queue.pop_next()) is not None:
            request = self._requests[sequence.spec.key]
            request.stream.ticket.release(started=True)
            request.task = asyncio.create_task(self._compute(request, self._runtime))

    async def _compute(self, request: TrtllmRequest, runtime: TrtllmRuntime) -> None:
        """Have the request computed, and write its tokens into its stream."""
        try:
            submitted = runtime.submit(request.arguments)
            request.begin(submitted)
            async for result in submitted:
                prompt = 0 if request.stream.started else len(request.spec.prompt)
                tokens = request.forward_results(result)
                cached = (request.stream.stats.cached or 0) if prompt else 0
                self._stats.totals.prefix_queries += prompt
                self._stats.totals.prefix_hits += cached
                self._queue.charge(request.queued, prompt - cached, tokens)
                if request.stream.ended:
                    return
            request.fail(Internal("TensorRT-LLM ended the request without a word"))
        except Exception as error:
            if runtime.is_request_error(error):
                request.fail(error)
            else:
                log.exception("TensorRT-LLM broke")
                self._end(Unavailable(f"TensorRT-LLM broke: {error}"))
        finally:
            self._forget(request)

    def _expire(self, request: TrtllmRequest) -> None:
        request.stream.finish(FinishReason.TIMEOUT)
        self._forget(request)

    def _forget(self, request: TrtllmRequest) -> None:
        """The request has ended, or its reader left; may be called again."""
        if self._requests.pop(request.spec.key, None) is None:
            return
        request.stream.ticket.release()
        request.stream.close()
        request.stop()
        self._queue.release(request.queued)
        self._submit_next()

    def _end(self, error: CharoniaError) -> None:
        """Serve no more, and end every stream with `error`."""
        self._runtime = None
        self._why_not = error.message
        if self._following is not None:
            self._following.cancel()
        for request in list(self._requests.values()):
            request.stream.fail(error)
            self._forget(request)


class IterationStats:
    """TensorRT-LLM's iterations, counted into `metrics` and `totals`. `kv_tokens`: used and in all, as of the last one.

    A number that a version leaves out of its records is not counted, and breaks nothing.
    """

    def __init__(self, metrics: LlmMetrics) -> None:
        self._metrics = metrics
        self.kv_tokens = (0, 0)
        self.totals = EngineTotals()

    async def follow(self, llm: "LLM", every: float = _PERIOD_SECONDS) -> None:
        """Ask every so many seconds, until there are no statistics any more."""
        try:
            while True:
                await asyncio.sleep(every)
                async for record in llm.get_stats_async(timeout=every):
                    self.record_iteration(json.loads(record) if isinstance(record, str | bytes) else record)
        except Exception:
            log.warning("TensorRT-LLM gives no statistics any more", exc_info=True)

    def record_iteration(self, record: Mapping[str, Any]) -> None:
        batching = record.get("inflightBatchingStats") or {}
        cache = record.get("kvCacheStats") or {}
        block = cache.get("tokensPerBlock", 0)
        self.kv_tokens = cache.get("usedNumBlocks", 0) * block, cache.get("maxNumBlocks", 0) * block
        self.totals.preemptions += batching.get("numPausedRequests", 0)
        sequences = batching.get("numScheduledRequests", 0)
        if sequences:
            self._metrics.step.observe(record.get("iterLatencyMS", 0.0) / 1e3)
            self._metrics.step_sequences.observe(sequences)
            self._metrics.step_tokens.observe(batching.get("numCtxTokens", 0) + batching.get("numGenRequests", 0))
