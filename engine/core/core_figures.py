"""The figures that an engine core sends with every step: how it is loaded, and what it has counted since it started."""

from collections.abc import Iterable

import msgspec

from ...core.metrics import EngineTotals
from ...kvcache.manager import KVCacheManager
from ...scheduler.scheduler import Scheduler
from ..worker.executor import Executor
from .cache_events import CacheEventRecorder
from .constraints import ConstrainedSequences
from .grammar_pool import NO_GRAMMARS, GrammarPool
from .messages import EngineLoad
from .prefix_origins import PrefixOrigin


class CoreFigures:
    """Gathers the figures of a core's parts, in the step loop's thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        cache: KVCacheManager,
        executor: Executor,
        constraints: ConstrainedSequences,
        grammars: GrammarPool | None,
        events: CacheEventRecorder | None,
    ) -> None:
        self._scheduler = scheduler
        self._cache = cache
        self._executor = executor
        self._constraints = constraints
        self._grammars = grammars
        self._events = events

    def load(self, step_seconds: float, prefix_origins: Iterable[PrefixOrigin]) -> EngineLoad:
        """What runs, waits and is held now; `step_seconds`: what a step takes of late."""
        scheduler, cache = self._scheduler, self._cache
        kept = (0, 0) if cache.states is None else (len(cache.states), len(cache.states.host))
        retained = (0, 0) if cache.retention is None else (len(cache.retention), cache.retention.blocks)
        awaiting_prefix = {origin.name: origin.waiting for origin in prefix_origins}
        waiting = scheduler.waiting + sum(awaiting_prefix.values())
        held_blocks = sum(origin.held_blocks for origin in prefix_origins)
        state = scheduler.running, waiting, cache.free_blocks, step_seconds
        return EngineLoad(*state, *kept, *retained, held_blocks, awaiting_prefix)

    def totals(self, prefix_origins: Iterable[PrefixOrigin]) -> EngineTotals:
        """What the scheduler has counted, with the counts of the core's other parts."""
        scheduled = self._scheduler.totals
        constrained = self._constraints.totals
        executor = self._executor
        grammars = NO_GRAMMARS if self._grammars is None else self._grammars.totals
        speculation, states = self._scheduler.speculation, self._cache.states
        events = None if self._events is None else self._events.publisher
        retention = self._cache.retention
        return msgspec.structs.replace(
            scheduled,
            sequence_seconds=scheduled.sequence_seconds.copy(),
            state_evictions=0 if states is None else states.evicted,
            state_hits=0 if states is None else states.restored,
            states_brought_back=0 if states is None else states.brought_back,
            grammars_compiled=grammars.compiled,
            grammar_seconds=grammars.seconds,
            grammar_hits=grammars.hits,
            masks=constrained.masks,
            mask_seconds=constrained.seconds,
            forced_tokens=constrained.forced,
            drafters_off=0 if speculation is None else speculation.drafters_off,
            drafters={} if speculation is None else speculation.copied_totals(),
            eager_steps={reason.value: count for reason, count in executor.eager_steps.items()},
            failed_captures=executor.failed_captures,
            retention_refused=0 if retention is None else retention.refused_blocks,
            retention_displaced=0 if retention is None else retention.displaced,
            event_batches=0 if events is None else events.published,
            event_batches_dropped=0 if events is None else events.dropped,
            **{origin.name: origin.totals() for origin in prefix_origins},
        )
