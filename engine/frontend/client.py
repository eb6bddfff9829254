"""The engine of one model as the frontend sees it: carries requests to its cores and tokens back to their readers.

Knows nothing of text: token ids in, token ids out. Lives in one event loop.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from ...core.errors import NotReady
from ...core.model import ReservedMemory
from ...core.request import GenerateRequest
from ...processes.host import available_memory, resident_memory_of, usable_cores
from ...telemetry.llm_metrics import EngineState, LlmMetrics
from ..config import EngineConfig
from ..core.messages import AddRequest, CoreLoading, CoreReady, EngineLoad
from .admission import AdmissionControl, QueueLimits, QueueTicket
from .core_supervisor import DEFAULT_TIMEOUTS, CoreTimeouts
from .engine import count_by_priority
from .replica import Replica, sum_totals
from .routing import ReplicaCandidate, choose_replica, prompt_prefixes
from .sequence_stats import SequenceStats
from .token_stream import TokenStream


def split_config(config: EngineConfig, threads: int, memory: int) -> list[EngineConfig]:
    """The configuration of each replica's core, on a host with so many `threads` to compute with and `memory` bytes
    free.

    An even share to each: so their caches are alike whichever loads first, and when one restarts beside the others.
    """
    count = config.data_parallel_size
    if count == 1:
        return [config]
    shared = msgspec.structs.replace(
        config, threads=config.threads or max(1, threads // count), host_memory=memory // count
    )
    return [msgspec.structs.replace(shared, replica=number) for number in range(count)]


class EngineClient:
    """An `Engine` over our own cores: one or several replicas, alike in everything, each with its own cache.

    `start()` spawns them, they are restarted when they die, and are gone after `close()`. `affinity`: a request goes to
    the replica that has the beginning of its prompt cached, if that is not too busy.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_progress: Callable[[CoreLoading], None] = lambda loading: None,
        metrics: LlmMetrics | None = None,
        timeouts: CoreTimeouts = DEFAULT_TIMEOUTS,
        affinity: bool = True,
    ) -> None:
        self._metrics = metrics or LlmMetrics()
        self._admission = AdmissionControl(QueueLimits(config.max_queued_requests, config.max_queued_tokens))
        self._default_timeout = config.default_request_timeout
        memory = available_memory() if config.host_memory is None else config.host_memory
        configs = split_config(config, usable_cores().threads, memory)
        self.replicas = [Replica(each, self._metrics, on_progress, timeouts) for each in configs]
        self._affinity = affinity and config.cache.prefix_caching and len(configs) > 1
        self._last_key = 0
        self._expected_memory = 0

    @property
    def info(self) -> CoreReady | None:
        """The sizes of the engine; None while no core serves."""
        return next((replica.core.info for replica in self.replicas if replica.core.info is not None), None)

    @property
    def load(self) -> EngineLoad:
        """The load of all replicas together after their last steps; the step time is that of the slowest."""
        loads = [replica.core.load for replica in self.replicas]
        return EngineLoad(
            sum(load.running for load in loads),
            sum(load.waiting for load in loads),
            sum(load.free_blocks for load in loads),
            max(load.step_seconds for load in loads),
        )

    @property
    def ready(self) -> bool:
        """Whether a core is: requests of a dead one are lost, new ones go to the others."""
        return any(replica.core.ready for replica in self.replicas)

    @property
    def pids(self) -> list[int]:
        """The core processes that exist."""
        return [replica.core.pid for replica in self.replicas if replica.core.pid is not None]

    @property
    def queued(self) -> int:
        """The requests that no engine has started yet, those being prepared included."""
        return self._admission.waiting.requests

    @property
    def kv_tokens(self) -> tuple[int, int]:
        used, capacity = zip(*(replica.kv_tokens for replica in self.replicas), strict=True)
        return sum(used), sum(capacity)

    def state(self) -> EngineState:
        totals = sum_totals(replica.totals for replica in self.replicas)
        used, capacity = self.kv_tokens
        waiting = [stream for replica in self.replicas for stream in replica.streams if not stream.started]
        return EngineState(
            running=self.load.running,
            waiting=count_by_priority(stream.priority for stream in waiting),
            queue_age=max((stream.stats.seconds_waited for stream in waiting), default=0.0),
            kv_usage=used / capacity if capacity else 0.0,
            prefix_queries=totals.prefix_queries,
            prefix_hits=totals.prefix_hits,
            preemptions=totals.preemptions,
            core_restarts=sum(replica.losses for replica in self.replicas),
            replicas_ready=sum(replica.core.ready for replica in self.replicas),
        )

    async def start(self) -> CoreReady:
        info, *_ = await asyncio.gather(*(replica.core.start() for replica in self.replicas))
        self._expected_memory = resident_memory_of(self.pids) + info.cache_bytes * len(self.replicas)
        return info

    def reserved_memory(self) -> ReservedMemory:
        """The host memory that the cores and their ranks hold, and will hold."""
        return ReservedMemory(self._expected_memory, resident_memory_of(self.pids))

    async def close(self) -> None:
        await asyncio.gather(*(replica.close() for replica in self.replicas))

    def admit(self, request: GenerateRequest, tenant: str = "") -> QueueTicket:
        self._admission.check_count(request.prompt_count, request.choice_count)
        if self.info is None:
            raise NotReady("the engine is not ready")
        return self._admission.admit(tenant, request.choice_count)

    @contextmanager
    def open_stream(
        self, add: AddRequest, stats: SequenceStats | None = None, ticket: QueueTicket | None = None
    ) -> Iterator[TokenStream]:
        """See `Engine.open_stream`. A sequence that has no `ticket` yet is admitted here."""
        stats = stats or SequenceStats(self._metrics)
        with ticket or self._admission.admit(add.tenant) as ticket:
            self._admission.add_prompt(ticket, len(add.prompt))
            timeout = stats.time_left(add.timeout or self._default_timeout)
            self._last_key += 1
            add = msgspec.structs.replace(add, key=self._last_key, timeout=timeout)
            replica, cached = self.choose_replica(add)
            stats.record_submission(len(add.prompt))
            stream = TokenStream(stats, ticket, add.priority, len(add.prompt) - cached)
            try:
                replica.submit(add, stream)
                yield stream
            finally:
                replica.release(add.key)

    def choose_replica(self, add: AddRequest) -> tuple[Replica, int]:
        """The replica that takes this request, and how many tokens of its prompt it likely has cached.

        Raises:
            Unavailable: no core serves.
        """
        serving = [replica for replica in self.replicas if replica.core.info is not None]
        if not serving:
            raise NotReady("the engine is not ready")
        # Where none is ready, those that serve are only slow to step.
        serving = [replica for replica in serving if replica.core.ready] or serving
        if not self._affinity:
            return min(serving, key=lambda replica: replica.pending_work), 0
        prefixes = prompt_prefixes(add.prompt, (add.adapter, add.tenant, add.salt))
        candidates: list[ReplicaCandidate] = []
        for replica in serving:
            index, cached = replica.prefix_index, replica.prefix_index.longest_match(prefixes)
            has_sibling = add.sampling.choice > 0 and cached == len(add.prompt)
            candidates.append(ReplicaCandidate(replica.pending_work, cached, index.tokens, has_sibling))
        at = choose_replica(candidates, len(add.prompt))
        serving[at].prefix_index.insert(prefixes, serving[at].kv_tokens[1])
        return serving[at], candidates[at].cached_tokens
