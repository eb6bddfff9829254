"""A model behind the response cache: it computes only what the cache does not have.

Counts hits and misses as Triton does: https://github.com/triton-inference-server/server/blob/main/docs/user_guide/response_cache.md.
"""

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import cast

from ..core.gateway import ResponseStream
from ..core.metrics import QuantileSummary, Reading
from ..core.model import MeasuredModel, ModelConfig, ModelStats
from ..core.request import InferRequest, InferResponse
from ..core.request_context import RequestContext
from ..core.statistics import InferenceStatistics, StatisticDuration, VersionStatistics
from .response_cache import ResponseCache, cache_key

_REQUEST_SUMMARY_FAMILY = "nv_inference_request_summary_us"
"""Triton does not make it for such a model."""


@dataclass(slots=True)
class _LookupCounter:
    """How many there were, and how long they took: nanoseconds, and whole microseconds of each, as Triton counts."""

    summary: QuantileSummary
    count: int = 0
    ns: int = 0
    microseconds: int = 0

    def record(self, ns: int) -> None:
        self.count += 1
        self.ns += ns
        self.microseconds += ns // 1000
        if self.summary.quantiles:
            self.summary.observe(ns // 1000)

    def to_duration(self) -> StatisticDuration:
        return StatisticDuration(self.count, self.ns)

    def readings(self, kind: str, plural: str) -> Iterator[Reading]:
        yield Reading(f"nv_cache_num_{plural}_per_model", self.count)
        yield Reading(f"nv_cache_{kind}_duration_per_model", self.microseconds)
        if self.summary.quantiles:
            yield Reading(f"nv_cache_{kind}_summary_per_model", self.summary)


class CachedModel:
    """`model`, which answers each request once, with `cache` in front. `quantiles`: of the summaries of how long
    looking takes, none for no summaries."""

    def __init__(self, model: MeasuredModel, cache: ResponseCache, quantiles: Sequence[float] = ()) -> None:
        self._model = model
        self._cache = cache
        self._hits = _LookupCounter(QuantileSummary(quantiles))
        self._misses = _LookupCounter(QuantileSummary(quantiles))
        self._last = 0.0

    @property
    def config(self) -> ModelConfig:
        return self._model.config

    async def load(self) -> None:
        await self._model.load()

    async def unload(self) -> None:
        await self._model.unload()
        self._cache.remove_owner(self)

    async def infer(self, request: InferRequest, context: RequestContext) -> AsyncGenerator[InferResponse, None]:
        """Raises what the model raises: that is not kept."""
        begun = time.monotonic_ns()
        question = cache_key(request, context.tenant)
        found = self._cache.get(self, question)
        looked = time.monotonic_ns() - begun
        if found is not None:
            self._hits.record(looked)
            self._last = time.time()
            yield found
            return
        async with aclosing(cast("ResponseStream[InferResponse]", self._model.infer(request, context))) as responses:
            async for response in responses:
                begun = time.monotonic_ns()
                self._cache.put(self, question, response)
                self._misses.record(looked + time.monotonic_ns() - begun)
                yield response

    def stats(self) -> ModelStats:
        stats = self._model.stats()
        return replace(stats, success=stats.success + self._hits.count)

    def statistics(self) -> VersionStatistics:
        said = self._model.statistics()
        last = max(said.last_inference, int(self._last * 1000))
        return replace(said, last_inference=last, inference=self._inference(said.inference))

    def _inference(self, asked: InferenceStatistics) -> InferenceStatistics:
        """Of what the model was asked, and what it was not."""
        hits, misses = self._hits.to_duration(), self._misses.to_duration()
        success = StatisticDuration(asked.success.count + hits.count, asked.success.ns + hits.ns)
        queue = StatisticDuration(asked.queue.count + hits.count, asked.queue.ns)
        return asked._replace(success=success, queue=queue, cache_hit=hits, cache_miss=misses)

    def count(self, context: RequestContext) -> None:
        self._model.count(context)

    def readings(self) -> Iterator[Reading]:
        """The model's, which counts what it was asked, and what was answered without it."""
        more = {
            "nv_inference_request_success": self._hits.count,
            "nv_inference_request_duration_us": self._hits.microseconds,
        }
        for reading in self._model.readings():
            if reading.family in more:
                yield reading._replace(value=cast(float, reading.value) + more[reading.family])
            elif reading.family != _REQUEST_SUMMARY_FAMILY:
                yield reading
        yield from self._hits.readings("hit", "hits")
        yield from self._misses.readings("miss", "misses")
