"""The engine of one model in the server's process: carries requests to replicas and tokens back to their readers.

Knows nothing of text: token ids in, token ids out. Lives in one event loop.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial

import msgspec

from ...core.adapter import Adapter
from ...core.errors import CharoniaError, InvalidArgument, NotReady
from ...core.metrics import DrafterTotals, EngineTotals, SequenceState
from ...core.model import ReservedMemory
from ...core.request import FinishReason, GenerateRequest
from ...processes.host import available_memory, resident_memory_of, usable_cores
from ...processes.patient_work import patient_work
from ...scheduler.drafts.speculation import GRAMMAR, PREDICTION
from ...scheduler.sequence import SequenceSpec
from ...telemetry.llm_metrics import CacheBlocks, EngineState, LlmMetrics, sum_totals
from ...tokenization.answers.answer_formats import AnswerParsers
from ..config import EngineConfig
from ..core.messages import (
    AbortRequests,
    AdapterReply,
    AddRequest,
    CoreLoading,
    CoreReady,
    PatientWorkWaits,
    ReleaseScope,
    RequestRejected,
    RequestUpdates,
)
from .admission import AdmissionControl, QueueLimits, QueueTicket, most_in_background
from .core_supervisor import DEFAULT_TIMEOUTS, CoreSupervisor, CoreTimeouts
from .engine import EngineCapabilities, EngineSpec, count_by_priority
from .resident_adapters import ResidentAdapters
from .routing import NOT_CACHED, TOKENS_PER_REQUEST, ExpectedPrefix, PrefixIndex, route_prompt
from .sequence_stats import SequenceStats
from .token_stream import TokenStream, push_step


class Replica:
    """One engine core with its requests, as the listener of its supervisor `core`. `losses`: cores that died."""

    def __init__(
        self,
        config: EngineConfig,
        metrics: LlmMetrics,
        on_progress: Callable[[CoreLoading], None],
        timeouts: CoreTimeouts,
    ) -> None:
        self.core = CoreSupervisor(config, self, timeouts)
        self.prefix_index = PrefixIndex()
        self.adapters = ResidentAdapters(self.core.send)
        self.losses = 0
        self._totals = self._lost_totals = EngineTotals()
        self._config = config
        self._metrics = metrics
        self._on_progress = on_progress
        self._streams: dict[int, TokenStream] = {}
        self._expected: dict[int, ExpectedPrefix] = {}
        self._uncomputed_tokens = 0
        self._closing = False

    @property
    def streams(self) -> Collection[TokenStream]:
        """The streams of its requests."""
        return self._streams.values()

    @property
    def pending_work(self) -> int:
        return len(self._streams) * TOKENS_PER_REQUEST + self._uncomputed_tokens

    @property
    def totals(self) -> EngineTotals:
        """The counters of all its cores, the lost ones included."""
        return sum_totals((self._lost_totals, self._totals))

    @property
    def kv_tokens(self) -> tuple[int, int]:
        """Tokens that the cache blocks in use hold, and that all of them would, with a block of each group for the
        same ones."""
        info = self.core.info
        if info is None:
            return 0, 0
        used, size = info.blocks - self.core.load.free_blocks, info.block_size
        return used * size // info.groups, info.blocks * size // info.groups

    @property
    def cache_blocks(self) -> CacheBlocks:
        """As `kv_tokens`."""
        info = self.core.info
        if info is None:
            return CacheBlocks()
        return CacheBlocks(info.block_size, info.blocks // info.groups, self.core.load.free_blocks // info.groups)

    async def close(self) -> None:
        """Stop the core; streams still open end with `Unavailable`. May be called again."""
        self._closing = True
        patient_work.remove_listener(self.tell_of_patient_work)
        await self.core.close()

    def submit(self, add: AddRequest, stream: TokenStream, expected: ExpectedPrefix) -> None:
        """Send a new request, whose tokens go into `stream` until it is released. `expected`: of its prompt."""
        if expected.tokens:
            self._expected[add.spec.key] = expected
        self._streams[add.spec.key] = stream
        self._uncomputed_tokens += stream.uncomputed_tokens
        if add.handle and (info := self.core.info) is not None and info.transfer is not None:
            stream.stats.held = info.transfer.held_params(add.handle, (len(add.spec.prompt) - 1) // info.block_size)
        self.core.send(add)

    def release(self, key: int) -> None:
        """The reader of this request is gone: abort it, unless it ended."""
        stream = self._streams.pop(key)
        self._expected.pop(key, None)
        stream.close()
        self._settle(stream)
        if not stream.ended:
            self.core.send(AbortRequests([key]))

    def _settle(self, stream: TokenStream) -> None:
        """The prompt counts no longer as work ahead: it is computed, or is not to be."""
        self._uncomputed_tokens -= stream.uncomputed_tokens
        stream.uncomputed_tokens = 0

    def on_progress(self, loading: CoreLoading) -> None:
        if self._config.data_parallel_size > 1:
            loading = msgspec.structs.replace(loading, phase=f"replica {self._config.replica}: {loading.phase}")
        self._on_progress(loading)

    def on_updates(self, message: RequestUpdates) -> None:
        streams = self._streams
        updates = message.updates
        stats = message.stats
        now = time.monotonic()
        if stats.tokens:
            self._metrics.step.observe(stats.seconds)
            self._metrics.step_tokens.observe(stats.tokens)
            self._metrics.step_sequences.observe(stats.sequences)
        self._totals = message.totals
        for key, cached in updates.started:
            if key in self._expected:
                self.prefix_index.correct(self._expected.pop(key), cached)
            if key in streams:
                streams[key].ticket.release(started=True)
                streams[key].start(cached, now - stats.seconds)
        for key, scores in updates.prompt_logprobs:
            if key in streams:
                streams[key].push_prompt_scores(scores)
        tokens, logprobs = updates.tokens, updates.logprobs
        for key, part in push_step(streams, updates.keys, updates.counts, tokens, logprobs, now):
            self._settle(streams[key])
            streams[key].push(tokens[part], now, logprobs and logprobs[part])
        if self._config.per_request_spec_decode_metrics != "none":
            for key, drafted, accepted in updates.drafts:
                if key in streams:
                    streams[key].stats.drafts.append((drafted, accepted))
        for key, reason in updates.finished:
            if key in streams:
                streams[key].finish(FinishReason(reason))

    def on_refused(self, refused: RequestRejected) -> None:
        if refused.key in self._streams:
            self._streams[refused.key].fail(refused.error.error())

    def on_adapter(self, reply: AdapterReply) -> None:
        self.adapters.on_reply(reply)

    def on_serving(self) -> None:
        self.adapters.on_serving()
        if patient_work.waits:
            self.tell_of_patient_work(True)

    def tell_of_patient_work(self, waits: bool) -> None:
        """See `PatientWorkWaits`."""
        self.core.send(PatientWorkWaits(waits))

    def on_loss(self, error: CharoniaError) -> None:
        self.losses += not self._closing
        self._lost_totals = self.totals
        self._totals = EngineTotals()  # the next core counts from zero
        self.prefix_index.clear()
        self.adapters.on_loss(error)
        for stream in self._streams.values():
            stream.fail(error)


class EngineClient:
    """An `Engine` over our own cores: one or several equal replicas, each with its own cache, which are restarted when
    they die. `affinity`: requests go where the beginning of their prompt is cached. `admission` counts the requests
    that no core has started yet.
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
        self.admission = AdmissionControl(QueueLimits(config.max_queued_requests, config.max_queued_tokens))
        self._takes_adapters = config.lora is not None
        self._most_running = config.scheduler.max_num_seqs * config.data_parallel_size
        self._default_timeout = config.default_request_timeout
        methods = () if config.speculation is None else (config.speculation.method,)
        self._no_drafts = {name: DrafterTotals() for name in (PREDICTION, GRAMMAR, *methods)}
        memory = available_memory() if config.host_memory is None else config.host_memory
        configs = config.split(usable_cores().threads, memory)
        self.replicas = [Replica(core, self._metrics, on_progress, timeouts) for core in configs]
        self._affinity = affinity and config.cache.prefix_caching and len(configs) > 1
        self._last_key = 0
        self._expected_memory = 0
        self._splits = True

    @property
    def info(self) -> CoreReady | None:
        """The sizes of the engine; None while no core serves."""
        return next((replica.core.info for replica in self.replicas if replica.core.info is not None), None)

    @property
    def ready(self) -> bool:
        """Whether a core is ready: new requests go to those that are."""
        return any(replica.core.ready for replica in self.replicas)

    @property
    def pids(self) -> list[int]:
        """The core processes that exist."""
        return [replica.core.pid for replica in self.replicas if replica.core.pid is not None]

    @property
    def kv_tokens(self) -> tuple[int, int]:
        used, capacity = zip(*(replica.kv_tokens for replica in self.replicas), strict=True)
        return sum(used), sum(capacity)

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(adapters=self, memory=self, retention=self)

    def state(self) -> EngineState:
        totals = sum_totals(replica.totals for replica in self.replicas)
        used, capacity = self.kv_tokens
        streams = [stream for replica in self.replicas for stream in replica.streams]
        waiting = [stream for stream in streams if not stream.started]
        blocks = [replica.cache_blocks for replica in self.replicas]
        return EngineState(
            running=sum(replica.core.load.running for replica in self.replicas),
            most_running=self._most_running,
            prefilling=sum(stream.started and stream.stats.first is None for stream in streams),
            waiting=count_by_priority(stream.priority for stream in waiting),
            queue_age=max((stream.stats.seconds_waited for stream in waiting), default=0.0),
            kv_usage=used / capacity if capacity else 0.0,
            kv_capacity=capacity,
            blocks=CacheBlocks(
                max(replica.size for replica in blocks),
                sum(replica.total for replica in blocks),
                sum(replica.free for replica in blocks),
            ),
            state_snapshots=sum(replica.core.load.state_snapshots for replica in self.replicas),
            host_snapshots=sum(replica.core.load.host_snapshots for replica in self.replicas),
            retained_scopes=sum(replica.core.load.retained_scopes for replica in self.replicas),
            retained_blocks=sum(replica.core.load.retained_blocks for replica in self.replicas),
            core_restarts=sum(replica.losses for replica in self.replicas),
            replicas_ready=sum(replica.core.ready for replica in self.replicas),
            splits=self._splits,
            held_blocks=sum(replica.core.load.held_blocks for replica in self.replicas),
            arriving=sum(replica.core.load.awaiting_prefix.get("transfers", 0) for replica in self.replicas),
            totals=msgspec.structs.replace(
                totals,
                drafters=self._no_drafts | totals.drafters,
                sequence_seconds=dict.fromkeys(SequenceState, 0.0) | totals.sequence_seconds,
            ),
        )

    async def start(self) -> CoreReady:
        for replica in self.replicas:
            patient_work.add_listener(replica.tell_of_patient_work)
        info, *_ = await asyncio.gather(*(replica.core.start() for replica in self.replicas))
        self._expected_memory = resident_memory_of(self.pids) + info.cache_bytes * len(self.replicas)
        self._splits = info.splits
        return info

    async def load_adapter(self, name: str, path: str) -> Adapter:
        """Load an adapter into every replica, beside its steps; return when all compute with it.

        Raises:
            NotFound: the directory does not exist.
            InvalidArgument: its files are broken or not for this model, or adapters are not enabled.
            Unavailable: a replica does not serve.
        """
        if not self._takes_adapters:
            raise InvalidArgument("this model takes no adapters: it was loaded without enable_lora", field="lora_path")
        if any(replica.core.info is None for replica in self.replicas):
            raise NotReady("the engine is not ready")
        before = [digest for replica in self.replicas for digest in replica.adapters]
        loads = (replica.adapters.load(path) for replica in self.replicas)
        outcomes = await asyncio.gather(*loads, return_exceptions=True)
        loaded = [outcome for outcome in outcomes if isinstance(outcome, Adapter)]
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        digests = {adapter.digest for adapter in loaded}
        if not errors and len(digests) == 1:
            return msgspec.structs.replace(loaded[0], name=name)
        for digest in digests.difference(before):
            await self.unload_adapter(digest)
        raise errors[0] if errors else InvalidArgument(f"{path}: the files changed meanwhile", field="lora_path")

    async def unload_adapter(self, digest: str) -> None:
        """Take no more requests with this adapter; its memory is free when those in flight have ended."""
        for replica in self.replicas:
            replica.adapters.unload(digest)

    def release_scope(self, tenant: str, scope: str) -> None:
        """What was retained for a scope of a tenant's makes room first from now on."""
        for replica in self.replicas:
            replica.core.send(ReleaseScope(tenant, scope))

    def reserved_memory(self) -> ReservedMemory:
        """The host memory that the cores and their ranks will hold, and hold now."""
        return ReservedMemory(self._expected_memory, resident_memory_of(self.pids))

    async def close(self) -> None:
        await asyncio.gather(*(replica.close() for replica in self.replicas))

    def admit(self, request: GenerateRequest, tenant: str = "") -> QueueTicket:
        self.admission.check_count(request.prompt_count, request.choice_count)
        if self.info is None:
            raise NotReady("the engine is not ready")
        return self.admission.admit(tenant, request.choice_count)

    @contextmanager
    def open_stream(
        self, add: AddRequest, stats: SequenceStats | None = None, ticket: QueueTicket | None = None
    ) -> Iterator[TokenStream]:
        """See `Engine.open_stream`. A sequence that has no `ticket` yet is admitted here."""
        stats = stats or SequenceStats(self._metrics)
        with ticket or self.admission.admit(add.spec.tenant) as ticket:
            prompt = add.prompt_tokens
            ticket.admission.add_prompt(ticket, prompt)
            timeout = stats.time_left(add.timeout or self._default_timeout)
            self._last_key += 1
            spec = msgspec.structs.replace(add.spec, key=self._last_key)
            replica, expected = self.choose_replica(spec)
            stats.record_submission(prompt)
            stream = TokenStream(stats, ticket, spec.priority, prompt - expected.tokens)
            if timeout:
                stream.expect_end(timeout)
            try:
                replica.submit(msgspec.structs.replace(add, spec=spec, timeout=timeout), stream, expected)
                yield stream
            finally:
                replica.release(spec.key)

    def choose_replica(self, spec: SequenceSpec) -> tuple[Replica, ExpectedPrefix]:
        """The replica that takes this sequence, and what of its prompt it likely has cached.

        Raises:
            Unavailable: no core serves.
        """
        up = [replica for replica in self.replicas if replica.core.info is not None]
        serving = [replica for replica in up if not spec.adapter or spec.adapter in replica.adapters]
        if not serving:
            raise up[0].adapters.absence(spec.adapter) if up else NotReady("the engine is not ready")
        # Where none is ready, those that serve are only slow to step.
        serving = [replica for replica in serving if replica.core.ready] or serving
        if not self._affinity:
            return min(serving, key=lambda replica: replica.pending_work), NOT_CACHED
        return route_prompt(serving, spec.identities, spec.extras, spec.sampling.choice)


def own_engine_spec(config: EngineConfig) -> EngineSpec:
    capabilities = {"drafts", "guided_decoding", "prediction", "targets", "thinking_budget", "wants_prompt_logprobs"}
    if config.kv_transfer is not None:
        capabilities |= config.kv_transfer.abilities
    if config.lora is not None:
        capabilities |= {"adapter", "lora_task"}
    limits = QueueLimits(config.max_queued_requests, config.max_queued_tokens)
    rows = config.scheduler.max_num_seqs
    return EngineSpec(
        "charonia",
        config.model,
        partial(EngineClient, config),
        frozenset(capabilities),
        config.chat_template,
        config.tokenizer,
        AnswerParsers(config.tool_call_parser, config.reasoning_parser),
        checks_constraints=True,
        default_timeout=config.default_request_timeout,
        most_in_background=most_in_background(rows * config.data_parallel_size, limits),
        target_tenants=frozenset(config.target_tenants),
        lora=config.lora,
        most_drafts=config.most_drafts,
        draft_report=config.per_request_spec_decode_metrics,
    )
