"""The frontend's side of a model's engine: carries requests to its cores and tokens back to their readers.

Knows nothing of text: token ids in, token ids out. Lives in one event loop.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from ...core.errors import NotReady
from ...core.memory_needs import ReservedMemory, resident_memory_of
from ...core.metrics import EngineState, LlmMetrics
from ...core.request import GenerateRequest
from ..config import EngineConfig
from ..core.messages import AddRequest, CoreLoading, CoreReady, EngineLoad
from .admission import AdmissionControl, QueueLimits
from .core_supervisor import DEFAULT_TIMEOUTS, CoreTimeouts
from .engine import count_by_priority
from .replica_set import ReplicaSet
from .sequence_stats import SequenceStats
from .token_stream import TokenStream

_CLIENT = 0
"""This client's number; a core has no other yet."""


class EngineClient:
    """Requests to the engine cores of one model, which are spawned by `start()`, restarted when they die, and gone
    after `shut_down()`. `affinity`: see `ReplicaSet`.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_progress: Callable[[CoreLoading], None] = lambda loading: None,
        patience: CoreTimeouts = DEFAULT_TIMEOUTS,
        metrics: LlmMetrics | None = None,
        affinity: bool = True,
    ) -> None:
        self._metrics = metrics or LlmMetrics()
        self._admission = AdmissionControl(QueueLimits(config.max_queued_requests, config.max_queued_tokens))
        self._default_timeout = config.default_request_timeout
        self._on_progress = on_progress
        self.replicas = ReplicaSet(config, self._admission, self._metrics, self._report, patience, affinity)
        self._last_key = 0
        self._promised = 0

    @property
    def info(self) -> CoreReady | None:
        """What the engine is; None while no core serves."""
        return self.replicas.info

    @property
    def load(self) -> EngineLoad:
        """The engine's state after its last turn."""
        return self.replicas.load

    @property
    def ready(self) -> bool:
        """Some core's warm-up generated a token, and its step loop turned not long ago."""
        return self.replicas.ready

    @property
    def pids(self) -> list[int]:
        """The core processes that there are."""
        return [replica.pid for replica in self.replicas if replica.pid is not None]

    @property
    def queued(self) -> int:
        """Requests that no engine has begun yet, those being prepared included."""
        return self._admission.requests

    @property
    def kv_tokens(self) -> tuple[int, int]:
        """Tokens that the cache blocks in use hold, and that all of them would."""
        return self.replicas.kv_tokens

    def state(self) -> EngineState:
        """The engine at this moment, as a scrape sees it."""
        totals, running = self.replicas.totals, self.replicas.load.running
        used, capacity = self.kv_tokens
        channels = [channel for replica in self.replicas for channel in replica.channels]
        waiting = [channel for channel in channels if not channel.started]
        return EngineState(
            running=running,
            waiting=count_by_priority(channel.priority for channel in waiting),
            queue_age=max((channel.stats.seconds_waited for channel in waiting), default=0.0),
            kv_usage=used / capacity if capacity else 0.0,
            prefix_queries=totals.prefix_queries,
            prefix_hits=totals.prefix_hits,
            preemptions=totals.preemptions,
            core_restarts=sum(replica.losses for replica in self.replicas),
            replicas_ready=sum(replica.ready for replica in self.replicas),
        )

    async def start(self) -> CoreReady:
        """Return when every core serves.

        Raises:
            CharoniaError: one cannot; the message says why.
        """
        info = await self.replicas.start()
        self._promised = resident_memory_of(self.pids) + info.cache_bytes * len(self.replicas)
        return info

    def reserved_memory(self) -> ReservedMemory:
        """What its cores and their ranks hold of the host's memory, and will."""
        return ReservedMemory(self._promised, resident_memory_of(self.pids))

    async def close(self) -> None:
        """Stop the cores; streams still open end with `Unavailable`. May be called again."""
        await self.replicas.close()

    def admit(self, tenant: str = "", prompt: int = 0) -> CoreReady:
        """What the engine is, if it takes another request of this tenant now, with so many prompt tokens.

        Raises:
            Unavailable: no core serves.
            QueueFull: too many requests, or prompt tokens, wait already.
        """
        info = self.info
        if info is None:
            raise NotReady("the engine is not ready")
        self._admission.check_capacity(tenant, prompt)
        return info

    def check_size(self, request: GenerateRequest, tokens: int = 0) -> None:
        """Refuse what no queue is long enough for; `tokens`: of its prompt, once they are counted.

        Raises:
            InvalidArgument: see `AdmissionControl.check_size`.
        """
        self._admission.check_size(request.prompt_count, request.choice_count, tokens)

    @contextmanager
    def reserve(self, tenant: str = "") -> Iterator[CoreReady]:
        """A place in line while a request is prepared: what is refused has cost nothing, however long that takes.

        Raises:
            QueueFull, Unavailable: see `admit`.
        """
        engine = self.admit(tenant)
        place = self._admission.issue_ticket(tenant)
        try:
            yield engine
        finally:
            self._admission.return_ticket(place)

    @contextmanager
    def open_stream(self, add: AddRequest, account: SequenceStats | None = None) -> Iterator[TokenStream]:
        """Where the tokens of one request come out, until the block is left. `client` and `key` of `add` are filled in
        here, what happens is written into `account`.

        Raises:
            QueueFull, Unavailable: see `admit`.
            RequestTimeout: its time is over already.

        `TokenStream.read` raises InvalidArgument if the engine can never satisfy this request (`field` names the
        culprit),
        Unavailable if its core dies on the way, and RequestTimeout if its time was over before the first token.
        """
        self.admit(add.tenant, len(add.prompt))
        account = account or SequenceStats(self._metrics)
        add = self._numbered(add, account)
        replica, cached = self.replicas.choose(add)
        channel = self._enter(add, account, cached)
        try:
            replica.submit(add, channel)
            yield channel
        finally:
            replica.release(add)

    def _numbered(self, add: AddRequest, account: SequenceStats) -> AddRequest:
        timeout = account.time_left(add.timeout or self._default_timeout)
        self._last_key += 1
        return msgspec.structs.replace(add, client=_CLIENT, key=self._last_key, timeout=timeout)

    def _enter(self, add: AddRequest, account: SequenceStats, cached: int) -> TokenStream:
        account.record_submission(len(add.prompt))
        place = self._admission.issue_ticket(add.tenant, len(add.prompt))
        return TokenStream(account, place, add.priority, len(add.prompt) - cached)

    def _report(self, replica: int, loading: CoreLoading) -> None:
        """Progress of one of several says whose it is."""
        if len(self.replicas) > 1:
            loading = msgspec.structs.replace(loading, phase=f"replica {replica}: {loading.phase}")
        self._on_progress(loading)
