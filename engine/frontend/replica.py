"""One engine core with its requests: sends them, hands back what becomes of them, counts the work that is left.

Knows nothing of other replicas. Lives in the frontend's event loop.
"""

import time
from collections.abc import Callable, Collection, Iterable

import msgspec

from ...core.errors import CharoniaError, InvalidArgument
from ...core.request import FinishReason
from ...telemetry.llm_metrics import LlmMetrics
from ..config import EngineConfig
from ..core.messages import (
    NO_TOTALS,
    AbortRequests,
    AddRequest,
    CoreLoading,
    CoreTotals,
    RequestRejected,
    RequestUpdates,
)
from .core_supervisor import CoreSupervisor, CoreTimeouts
from .routing import TOKENS_PER_REQUEST, PrefixIndex
from .token_stream import TokenStream


class Replica:
    """The listener of one core's supervisor, `core`. `prefix_index`: the prompts that its prefix cache likely holds.
    `losses`: cores that died."""

    def __init__(
        self,
        config: EngineConfig,
        metrics: LlmMetrics,
        on_progress: Callable[[CoreLoading], None],
        timeouts: CoreTimeouts,
    ) -> None:
        self.core = CoreSupervisor(config, self, timeouts)
        self.prefix_index = PrefixIndex()
        self.losses = 0
        self._totals = self._lost_totals = NO_TOTALS
        self._config = config
        self._metrics = metrics
        self._on_progress = on_progress
        self._streams: dict[int, TokenStream] = {}
        self._uncomputed_tokens = 0
        self._closing = False

    @property
    def streams(self) -> Collection[TokenStream]:
        """The streams of its requests."""
        return self._streams.values()

    @property
    def pending_work(self) -> int:
        """The work ahead of it, in tokens as `routing.ReplicaCandidate` counts."""
        return len(self._streams) * TOKENS_PER_REQUEST + self._uncomputed_tokens

    @property
    def totals(self) -> CoreTotals:
        """The counters of all its cores, the lost ones included."""
        return sum_totals((self._lost_totals, self._totals))

    @property
    def kv_tokens(self) -> tuple[int, int]:
        """Tokens that the cache blocks in use hold, and that all of them would."""
        info = self.core.info
        if info is None:
            return 0, 0
        return (info.blocks - self.core.load.free_blocks) * info.block_size, info.blocks * info.block_size

    async def close(self) -> None:
        """Stop the core; streams still open end with `Unavailable`. May be called again."""
        self._closing = True
        await self.core.close()

    def submit(self, add: AddRequest, stream: TokenStream) -> None:
        """Send a new request, whose tokens go into `stream` until it is released."""
        self._streams[add.key] = stream
        self._uncomputed_tokens += stream.uncomputed_tokens
        self.core.send(add)

    def release(self, key: int) -> None:
        """The reader of this request is gone: abort it, unless it ended."""
        stream = self._streams.pop(key)
        self._settle(stream)
        if not stream.ended:
            self.core.send(AbortRequests([key]))

    def _settle(self, stream: TokenStream) -> None:
        """The prompt is computed, or does not need to be."""
        self._uncomputed_tokens -= stream.uncomputed_tokens
        stream.uncomputed_tokens = 0

    def on_progress(self, loading: CoreLoading) -> None:
        if self._config.data_parallel_size > 1:
            loading = msgspec.structs.replace(loading, phase=f"replica {self._config.replica}: {loading.phase}")
        self._on_progress(loading)

    def on_updates(self, updates: RequestUpdates) -> None:
        streams, stats, now = self._streams, updates.stats, time.monotonic()
        if stats.tokens:
            self._metrics.step.observe(stats.seconds)
            self._metrics.step_tokens.observe(stats.tokens)
            self._metrics.step_sequences.observe(stats.sequences)
        self._totals = updates.totals
        for key, cached in updates.started:
            if key in streams:
                streams[key].ticket.release(started=True)
                streams[key].start(cached, now - stats.seconds)
        for key, scores in updates.prompt_logprobs:
            if key in streams:
                streams[key].push_prompt_scores(scores)
        tokens, logprobs, at = updates.tokens, updates.logprobs, 0
        for key, count in zip(updates.keys, updates.counts, strict=True):
            stream, end = streams.get(key), at + count
            if stream is not None:
                if stream.uncomputed_tokens:
                    self._settle(stream)
                stream.push(tokens[at:end], now, logprobs[at:end])
            at = end
        for key, reason in updates.finished:
            if key in streams:
                streams[key].finish(FinishReason(reason))

    def on_refused(self, refused: RequestRejected) -> None:
        if refused.key in self._streams:
            self._streams[refused.key].fail(InvalidArgument(refused.message, field=refused.field or None))

    def on_loss(self, error: CharoniaError) -> None:
        self.losses += not self._closing
        self._lost_totals, self._totals = self.totals, NO_TOTALS  # the next core counts from zero
        self.prefix_index.clear()
        for stream in self._streams.values():
            stream.fail(error)


def sum_totals(totals: Iterable[CoreTotals]) -> CoreTotals:
    return CoreTotals(*map(sum, zip(*map(msgspec.structs.astuple, totals), strict=True)))
