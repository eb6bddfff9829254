"""A model that answers by asking others: its readiness is theirs, its times are theirs together. Beside it the
buffer of its responses, and the errors of the requests it makes, as its client sees them.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from contextlib import aclosing

from ..core.backends import Composition, RequestTimes
from ..core.errors import CharoniaError, NotReady
from ..core.gateway import ModelLookup
from ..core.metrics import Reading
from ..core.model import Capabilities, ModelConfig, ModelStats
from ..core.request import InferRequest, InferResponse
from ..core.request_context import ExecutionTimes, RequestContext
from ..telemetry.model_metrics import (
    CloseReason,
    ExecutionTiming,
    FailureReason,
    LatencyMetrics,
    ModelMetrics,
    first_response_bounds,
)


class CompositeModel:
    """One version of a model that only asks others. `quantiles`: of the latency summaries, empty for no summaries."""

    def __init__(
        self, config: ModelConfig, gateway: ModelLookup, composition: Composition, quantiles: Sequence[float] = ()
    ) -> None:
        self.config = config
        self._gateway = gateway
        self._composition = composition
        latencies = LatencyMetrics(quantiles, first_response_bounds(config.raw), config.decoupled)
        self._metrics = ModelMetrics(latencies)
        self.statistics = self._metrics.statistics
        self.count = self._metrics.record_request_end
        self._loaded = False

    async def load(self) -> None:
        self.config = await self._composition.load()
        self._metrics.latencies.decoupled = self.config.decoupled
        self._loaded = True

    async def unload(self) -> None:
        self._loaded = False
        await self._composition.unload()

    def stats(self) -> ModelStats:
        """Ready while the models that it needs are."""
        ready = self._loaded and all(self._gateway.is_model_ready(*needed) for needed in self._composition.asked)
        metrics = self._metrics
        cancelled = metrics.failures[FailureReason.CANCELED]
        return ModelStats(ready, metrics.success.count, metrics.failures.total() - cancelled, cancelled)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(self_check=self, measured=self)

    async def unready_reason(self) -> str:
        """Why one of the models that it needs says that it is not ready. They are asked side by side, each once."""
        models = set(self._composition.asked if self._loaded else ())
        reasons = await asyncio.gather(*(self._gateway.unready_reason(*needed) for needed in models))
        return next(filter(None, reasons), "")

    def readings(self) -> Iterator[Reading]:
        yield from self._metrics.readings(0)

    async def infer(self, request: InferRequest, context: RequestContext) -> AsyncGenerator[InferResponse, None]:
        """Raises as the composition does."""
        if not self._loaded:
            raise NotReady(f"model '{self.config.name}' is not loaded")
        started_at = time.monotonic_ns()
        times = RequestTimes()
        failure: FailureReason | None = FailureReason.CANCELED
        awaits_first = self.config.decoupled
        try:
            async with aclosing(self._composition.answer(request, context, times)) as responses:
                async for response in responses:
                    if awaits_first:
                        self._metrics.latencies.record_first_response(time.monotonic_ns() - started_at)
                        awaits_first = False
                    if response.final:
                        failure = None
                    yield response
            failure = None
        except Exception:
            failure = FailureReason.OTHER
            raise
        finally:
            self._record(request, context, times, started_at, failure)

    def _record(
        self,
        request: InferRequest,
        context: RequestContext,
        times: RequestTimes,
        started_at: int,
        failure: FailureReason | None,
    ) -> None:
        """Count a request that has ended; `started_at`: by `time.monotonic_ns`."""
        latency = time.monotonic_ns() - started_at
        timing = ExecutionTiming(times.input, times.infer, times.output)
        context.execution = ExecutionTimes(started_at, started_at, timing)
        if failure is not None:
            self._metrics.record_failure(failure, latency)
            return
        batched = self.config.max_batch_size > 0 and request.inputs
        size = next(iter(request.inputs.values())).shape[0] if batched else 1
        self._metrics.record_execution(size, timing, CloseReason.ALONE, 0)
        self._metrics.record_success(size, latency, times.queued, timing)


log = logging.getLogger(__name__)

_MAX_UNREAD = 64
"""Responses that wait for their reader before the driver does."""


class ResponseBuffer:
    """The responses of one request. `patience`: seconds that a cancelled driver may take to end, before it is left to
    itself; None for as long as it takes."""

    def __init__(self, patience: float | None = None) -> None:
        self._patience = patience
        self._responses: deque[InferResponse] = deque()
        self._arrived = asyncio.Event()
        self._read = asyncio.Event()

    def append(self, response: InferResponse) -> None:
        """Called by the driver, or by tasks of its own, which wait for room before or after."""
        self._responses.append(response)
        self._arrived.set()

    async def wait_for_room(self) -> None:
        while len(self._responses) >= _MAX_UNREAD:
            self._read.clear()
            await self._read.wait()

    async def read(self, drive: Coroutine[None, None, None], name: str) -> AsyncGenerator[InferResponse, None]:
        """Run the driver, as a task of that name. Raises what it raises."""
        driver = asyncio.create_task(drive, name=name)
        driver.add_done_callback(lambda _: self._arrived.set())
        try:
            while not driver.done() or self._responses:
                while self._responses:
                    self._read.set()
                    yield self._responses.popleft()
                self._arrived.clear()
                if not driver.done():
                    await self._arrived.wait()
            driver.result()
        finally:
            driver.cancel()
            await asyncio.wait({driver}, timeout=self._patience)
            if driver.done():
                driver.cancelled() or driver.exception()
            else:
                driver.cancel()
                asyncio._unregister_task(driver)  # the end of the loop would wait for it
                stack = driver.get_stack(limit=1)
                where = "".join(f", at {frame.f_code.co_filename}:{frame.f_lineno}" for frame in stack)
                log.error("%s does not end though it was cancelled %g s ago%s", name, self._patience, where)


def first_error(error: BaseException) -> BaseException:
    """The first error of a group, of tasks that failed side by side; another error as it is."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def with_model_name(model: str, error: CharoniaError) -> CharoniaError:
    """The same error, saying for which model it was asked: `model` is its kind and name."""
    error.message = f"in {model}, {error.message}"
    error.args = (error.message,)
    return error
