"""One engine core with the requests that it has: sends them, hands back what becomes of them, counts the work left.

Knows nothing of other replicas. Lives in the frontend's event loop.
"""

import time
from collections.abc import Iterable
from typing import Protocol

from ...core.errors import CharoniaError, InvalidArgument
from ...core.metrics import LlmMetrics
from ...core.request import FinishReason
from ..config import EngineConfig
from ..core.messages import (
    NO_TOTALS,
    AbortRequests,
    AddRequest,
    CoreLoading,
    CoreReady,
    CoreTotals,
    EngineLoad,
    RequestRejected,
    RequestUpdates,
    StepStats,
)
from .admission import AdmissionControl
from .core_supervisor import CoreSupervisor, CoreTimeouts
from .prefix_index import PrefixIndex
from .routing import TOKENS_PER_REQUEST
from .token_stream import TokenStream


class ReplicaProgress(Protocol):
    """Told how far a replica's core is with loading."""

    def __call__(self, replica: int, loading: CoreLoading) -> None: ...


class Replica:
    """A `supervisor.Listener`. The core is spawned by `start()`, restarted when it dies, and gone after
    `shut_down()`."""

    def __init__(
        self,
        config: EngineConfig,
        admission: AdmissionControl,
        metrics: LlmMetrics,
        on_progress: ReplicaProgress,
        patience: CoreTimeouts,
    ) -> None:
        self._number = config.replica
        self._admission = admission
        self._metrics = metrics
        self._on_progress = on_progress
        self._core = CoreSupervisor(config, self, patience)
        self._channels: dict[int, TokenStream] = {}
        self._owed = 0
        self._totals = CumulativeTotals()
        self._closing = False
        self.prefix_index = PrefixIndex()
        """What its prefix cache likely holds."""
        self.losses = 0
        """Cores that died."""

    @property
    def info(self) -> CoreReady | None:
        """What the engine is; None while no core serves."""
        return self._core.info

    @property
    def load(self) -> EngineLoad:
        """The engine's state after its last turn."""
        return self._core.load

    @property
    def ready(self) -> bool:
        """Warm-up generated a token, and the step loop turned not long ago."""
        return self._core.ready

    @property
    def pid(self) -> int | None:
        """The core process, while there is one."""
        return self._core.pid

    @property
    def channels(self) -> Iterable[TokenStream]:
        """Of the requests that it has."""
        return self._channels.values()

    @property
    def pending_work(self) -> int:
        """What is ahead of it, as `routing.Prospect` counts."""
        return len(self._channels) * TOKENS_PER_REQUEST + self._owed

    @property
    def totals(self) -> CoreTotals:
        """What its cores have counted, the lost ones included."""
        return self._totals.sums

    @property
    def kv_tokens(self) -> tuple[int, int]:
        """Tokens that the cache blocks in use hold, and that all of them would."""
        info = self._core.info
        if info is None:
            return 0, 0
        return (info.blocks - self.load.free_blocks) * info.block_size, info.blocks * info.block_size

    async def start(self) -> CoreReady:
        """Return when the core serves.

        Raises:
            CharoniaError: it cannot; the message says why.
        """
        return await self._core.start()

    async def close(self) -> None:
        """Stop the core; streams still open end with `Unavailable`. May be called again."""
        self._closing = True
        await self._core.close()

    def submit(self, add: AddRequest, channel: TokenStream) -> None:
        """A new request, whose tokens go into `channel` until it is dropped."""
        self._channels[add.key] = channel
        self._owed += channel.uncomputed_tokens
        self._core.send(add)

    def release(self, add: AddRequest) -> None:
        """Nobody reads the channel of this request any more."""
        channel = self._channels.pop(add.key)
        self._settle(channel)
        if not channel.started:
            self._admission.return_ticket(channel.ticket)
        if not channel.ended:
            self._core.send(AbortRequests([add.key]))

    def _settle(self, channel: TokenStream) -> None:
        """Its prompt is computed, or nobody wants it."""
        self._owed -= channel.uncomputed_tokens
        channel.uncomputed_tokens = 0

    # What the core says

    def on_progress(self, loading: CoreLoading) -> None:
        self._on_progress(self._number, loading)

    def on_updates(self, updates: RequestUpdates) -> None:
        channels, now = self._channels, time.monotonic()
        self._measure(updates.stats)
        self._totals.update(updates.totals)
        self._start(updates, now)
        for key, scores in updates.prompt_logprobs:
            if key in channels:
                channels[key].push_prompt_scores(scores)
        tokens, logprobs, at = updates.tokens, updates.logprobs, 0
        for key, count in zip(updates.keys, updates.counts, strict=True):
            channel, end = channels.get(key), at + count
            if channel is not None:
                if channel.uncomputed_tokens:
                    self._settle(channel)
                channel.push(tokens[at:end], now, logprobs[at:end])
            at = end
        for key, reason in updates.finished:
            if key in channels:
                channels[key].finish(FinishReason(reason))

    def _start(self, updates: RequestUpdates, now: float) -> None:
        for key, cached in updates.started:
            self._admission.record_start()
            if key in self._channels:
                self._admission.return_ticket(self._channels[key].ticket)
                self._channels[key].start(cached, now - updates.stats.seconds)

    def on_refused(self, refused: RequestRejected) -> None:
        if refused.key in self._channels:
            self._channels[refused.key].fail(InvalidArgument(refused.message, field=refused.field or None))

    def on_loss(self, error: CharoniaError) -> None:
        self.losses += not self._closing
        self._totals.start_over()
        self.prefix_index.clear()
        for channel in self._channels.values():
            channel.fail(error)

    def _measure(self, turn: StepStats) -> None:
        if turn.tokens:
            self._metrics.step.observe(turn.seconds)
            self._metrics.step_tokens.observe(turn.tokens)
            self._metrics.step_sequences.observe(turn.sequences)


class CumulativeTotals:
    """Totals of a core and all cores before it."""

    def __init__(self) -> None:
        self._before = self._seen = NO_TOTALS

    def update(self, totals: CoreTotals) -> None:
        """What the core of now has counted so far."""
        self._seen = totals

    def start_over(self) -> None:
        """The core is gone; the next one counts from zero."""
        self._before, self._seen = self.sums, NO_TOTALS

    @property
    def sums(self) -> CoreTotals:
        return sum_totals((self._before, self._seen))


def sum_totals(totals: Iterable[CoreTotals]) -> CoreTotals:
    """The sums of all."""
    columns = zip(*((each.preemptions, each.prefix_queries, each.prefix_hits) for each in totals), strict=True)
    return CoreTotals(*map(sum, columns))
