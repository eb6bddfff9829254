"""TensorRT-LLM's iterations as our metrics. It tells them only when asked: the client asks once a second.

What a version leaves out of its records is not counted, and breaks nothing.
"""

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...telemetry.llm_metrics import LlmMetrics

if TYPE_CHECKING:
    from tensorrt_llm import LLM

log = logging.getLogger(__name__)

_PERIOD_SECONDS = 1.0


class IterationStats:
    """Counts into `metrics`; `kv_tokens`: used and in all, as of the last iteration."""

    def __init__(self, metrics: LlmMetrics) -> None:
        self._metrics = metrics
        self.kv_tokens = (0, 0)
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0

    def count_prefix_lookup(self, prompt: int, cached: int) -> None:
        """A prompt began, of which so many tokens came out of the prefix cache."""
        self.prefix_queries += prompt
        self.prefix_hits += cached

    async def follow(self, llm: "LLM", every: float = _PERIOD_SECONDS) -> None:
        """Ask every so many seconds, for ever or until there are no statistics any more."""
        try:
            while True:
                await asyncio.sleep(every)
                async for record in llm.get_stats_async(timeout=every):
                    self.record_iteration(json.loads(record) if isinstance(record, str | bytes) else record)
        except Exception:
            log.warning("TensorRT-LLM gives no statistics any more", exc_info=True)

    def record_iteration(self, record: Mapping[str, Any]) -> None:
        """One iteration."""
        batching = record.get("inflightBatchingStats") or {}
        self._take_cache(record.get("kvCacheStats") or {})
        self.preemptions += batching.get("numPausedRequests", 0)
        sequences = batching.get("numScheduledRequests", 0)
        if sequences:
            self._metrics.step.observe(record.get("iterLatencyMS", 0.0) / 1e3)
            self._metrics.step_sequences.observe(sequences)
            self._metrics.step_tokens.observe(batching.get("numCtxTokens", 0) + batching.get("numGenRequests", 0))

    def _take_cache(self, cache: Mapping[str, Any]) -> None:
        size = cache.get("tokensPerBlock", 0)
        self.kv_tokens = cache.get("usedNumBlocks", 0) * size, cache.get("maxNumBlocks", 0) * size
