"""The instruments of one language model, and its series for a scrape."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import msgspec

from ..core.eager_reason import EagerReason
from ..core.metrics import (
    BatchStatistics,
    EngineTotals,
    FetchDecision,
    Histogram,
    InferenceStatistics,
    Labels,
    Reading,
    StatisticDuration,
    TimeInState,
    VersionStatistics,
    sum_by_drafter,
)
from ..core.request_context import QUEUE_FULL_ENDS, Outcome, RequestContext, RequestEnd
from .metric_families import CACHE_INFO

LATENCY_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Seconds."""

_STEP_SIZES = tuple(2**power for power in range(15))
FIRST_RESPONSE_BOUNDS = (100, 500, 2000, 5000)
"""Triton's bounds, milliseconds."""

_LENGTHS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))

_ALWAYS_REPORTED = (
    *(RequestEnd(outcome) for outcome in Outcome if outcome is not Outcome.REJECTED),
    *QUEUE_FULL_ENDS.values(),
)


@dataclass(slots=True)
class TenantUsage:
    """One tenant's tokens, weight and queueing time; requests without a key belong to tenant ""."""

    prompt: int = 0
    generated: int = 0
    weight: float = 1.0
    waiting: TimeInState = field(default_factory=TimeInState)


@dataclass(slots=True)
class RequestDurations:
    """Triton's sums over successful requests, in microseconds. `last` is when the last one ended, in milliseconds since
    the epoch."""

    request: int = 0
    queue: int = 0
    compute_input: int = 0
    compute_infer: int = 0
    compute_output: int = 0
    last: int = 0

    def readings(self) -> Iterator[Reading]:
        """Triton's counters of durations."""
        yield Reading("nv_inference_request_duration_us", self.request)
        yield Reading("nv_inference_queue_duration_us", self.queue)
        yield Reading("nv_inference_compute_input_duration_us", self.compute_input)
        yield Reading("nv_inference_compute_infer_duration_us", self.compute_infer)
        yield Reading("nv_inference_compute_output_duration_us", self.compute_output)


class CacheBlocks(NamedTuple):
    """The blocks of an engine's cache, over all replicas. A block of each group of layers, for the same tokens, is
    counted as one."""

    size: int = 0
    """Tokens of a block."""
    total: int = 0
    free: int = 0
    """Cached ones that nothing uses included."""

    @property
    def used(self) -> int:
        return self.total - self.free

    def readings(self, reused: int) -> Iterator[Reading]:
        """The readings by the names of vLLM and of Triton's TensorRT-LLM backend. `reused`: blocks that were found so
        far."""
        labels = {"block_size": str(self.size), "num_gpu_blocks": str(self.total)}
        yield Reading(CACHE_INFO, 1, labels)
        fraction = self.used / self.total if self.total else 0.0
        numbers = {"max": self.total, "free": self.free, "used": self.used, "tokens_per": self.size, "reused": reused}
        for kind, number in (numbers | {"fraction": fraction}).items():
            yield Reading("nv_trt_llm_kv_cache_block_metrics", number, {"kv_cache_block_type": kind})


class EngineState(NamedTuple):
    """An engine at a scrape. `totals` outlive the core that counted."""

    running: int = 0
    most_running: int = 0
    """Sequences that may run at once."""
    prefilling: int = 0
    """Running sequences that have no token yet."""
    waiting: Mapping[str, int] = {}
    """Requests not begun, by priority class."""
    queue_age: float = 0.0
    kv_usage: float = 0.0
    kv_capacity: int = 0
    """Tokens."""
    blocks: CacheBlocks = CacheBlocks()
    core_restarts: int = 0
    replicas_ready: int = 0
    state_snapshots: int = 0
    """Snapshots of recurrent states that can be found."""
    host_snapshots: int = 0
    """Snapshots in the host's memory; some are on the device too."""
    retained_scopes: int = 0
    """Scopes for which sessions retain cache."""
    retained_blocks: int = 0
    """Blocks that are retained for them, and that no sequence holds."""
    held_blocks: int = 0
    """Blocks that are held for other servers."""
    arriving: int = 0
    """Sequences that wait for another server's blocks."""
    splits: bool = True
    """Whether more ranks could share the model."""
    totals: EngineTotals = EngineTotals()

    def readings(self) -> Iterator[Reading]:
        totals = self.totals
        yield Reading("charonia_requests_running", self.running)
        for name, count in ({"0": 0} | dict(self.waiting)).items():
            yield Reading("charonia_requests_waiting", count, {"class": name})
        yield Reading("charonia_queue_age_seconds", self.queue_age)
        yield Reading("charonia_kv_cache_usage_ratio", self.kv_usage)
        yield Reading("charonia_prefix_cache_queries_total", totals.prefix_queries)
        yield Reading("charonia_prefix_cache_hits_total", totals.prefix_hits)
        yield Reading("charonia_prefix_cache_host_hits_total", totals.restored)
        if totals.directory:
            yield Reading("charonia_prefix_cache_directory_hits_total", totals.landed)
            yield from _directory_readings(totals.directory)
        yield Reading("charonia_state_snapshots", self.state_snapshots)
        yield Reading("charonia_state_host_snapshots", self.host_snapshots)
        yield Reading("charonia_state_snapshot_evictions_total", totals.state_evictions)
        yield Reading("charonia_state_snapshot_hits_total", totals.state_hits)
        yield Reading("charonia_state_snapshot_host_hits_total", totals.states_brought_back)
        yield Reading("charonia_state_missed_tokens_total", totals.state_misses)
        yield Reading("charonia_retained_scopes", self.retained_scopes)
        yield Reading("charonia_retained_blocks", self.retained_blocks)
        yield Reading("charonia_retention_refused_blocks_total", totals.retention_refused)
        yield Reading("charonia_retention_displaced_scopes_total", totals.retention_displaced)
        yield Reading("charonia_cache_event_batches_total", totals.event_batches)
        yield Reading("charonia_cache_event_batches_dropped_total", totals.event_batches_dropped)
        yield Reading("charonia_kv_transfer_held_blocks", self.held_blocks)
        yield Reading("charonia_kv_transfer_waiting", self.arriving)
        for name in _TRANSFER_TOTALS:
            yield Reading(f"charonia_kv_transfer_{name}_total", totals.transfers.get(name, 0))
        yield Reading("charonia_preemptions_total", totals.preemptions)
        yield Reading("charonia_core_restarts_total", self.core_restarts)
        yield Reading("charonia_replicas_ready", self.replicas_ready)
        yield Reading("charonia_grammars_compiled_total", totals.grammars_compiled)
        yield Reading("charonia_grammar_compile_seconds_total", totals.grammar_seconds)
        yield Reading("charonia_grammar_cache_hits_total", totals.grammar_hits)
        yield Reading("charonia_grammar_masks_total", totals.masks)
        yield Reading("charonia_grammar_mask_seconds_total", totals.mask_seconds)
        yield Reading("charonia_forced_tokens_total", totals.forced_tokens)
        yield Reading("charonia_drafters_off", totals.drafters_off)
        for name, drafter in totals.drafters.items():
            labels = {"drafter": name}
            yield Reading("charonia_drafts_total", drafter.drafts, labels)
            yield Reading("charonia_draft_tokens_total", drafter.draft_tokens, labels)
            yield Reading("charonia_accepted_tokens_total", drafter.accepted_tokens, labels)
            for place, accepted in enumerate(drafter.accepted_by_place or (0,)):
                yield Reading(
                    "charonia_accepted_tokens_per_position_total", accepted, labels | {"position": str(place)}
                )
            yield Reading("charonia_drafting_seconds_total", drafter.seconds, labels)
        for reason in EagerReason:
            labels = {"reason": reason.value}
            yield Reading("charonia_eager_steps_total", totals.eager_steps.get(reason.value, 0), labels)
        yield Reading("charonia_graph_capture_failures_total", totals.failed_captures)
        yield Reading("charonia_kv_cache_tokens", self.kv_capacity)
        yield Reading("charonia_tensor_parallel_exhausted", float(not self.splits))
        yield Reading("charonia_recomputed_tokens_total", totals.recomputed_tokens)
        for state, seconds in totals.sequence_seconds.items():
            yield Reading("charonia_sequence_seconds_total", seconds, {"state": str(state)})
        waiting = sum(self.waiting.values())
        requests = {"active": self.running + waiting, "max": self.most_running, "scheduled": self.running}
        for kind, number in (requests | {"context": self.prefilling, "waiting": waiting}).items():
            yield Reading("nv_trt_llm_request_metrics", number, {"request_type": kind})
        if self.blocks.size:
            yield from self.blocks.readings(totals.prefix_hits // self.blocks.size)


_TRANSFER_TOTALS = (
    *("sent", "sent_bytes", "expired", "dropped"),
    *("received", "received_bytes", "received_tokens", "failed", "seconds", "wait_seconds"),
)

_DIRECTORY_READINGS: Mapping[str, tuple[str, Labels]] = {
    "read": ("reads", {"outcome": "read"}),
    "missing": ("reads", {"outcome": "missing"}),
    "damaged": ("reads", {"outcome": "damaged"}),
    "read_failures": ("reads", {"outcome": "failed"}),
    "written": ("writes", {"outcome": "written"}),
    "write_failures": ("writes", {"outcome": "failed"}),
    "unwritten": ("writes", {"outcome": "dropped"}),
    **{decision.value: ("fetches", {"decision": decision.value}) for decision in FetchDecision},
    "read_bytes": ("read_bytes", {}),
    "read_seconds": ("read_seconds", {}),
    "written_bytes": ("written_bytes", {}),
    "write_seconds": ("write_seconds", {}),
    "evicted": ("evictions", {}),
    "waited_seconds": ("wait_seconds", {}),
}
"""By the name of a count in `EngineTotals.directory`: its metric of a cache's directory, and its labels."""


def _directory_readings(counts: Mapping[str, float]) -> Iterator[Reading]:
    for count, (name, labels) in _DIRECTORY_READINGS.items():
        yield Reading(f"charonia_cache_directory_{name}_total", counts.get(count, 0), labels)


class LlmMetrics:
    """The instruments of one language model, from its load to its unload, in seconds and tokens."""

    def __init__(self) -> None:
        self.ended = Counter(dict.fromkeys(_ALWAYS_REPORTED, 0))
        self.tenants = {"": TenantUsage()}
        self.merged_tokens = 0
        self.unread = TimeInState()
        self.durations = RequestDurations()
        self._histograms: dict[str, Histogram] = {}
        self.first_token = self._histogram("charonia_time_to_first_token_seconds", LATENCY_BOUNDS)
        self.first_response = self._histogram("nv_inference_first_response_histogram_ms", FIRST_RESPONSE_BOUNDS)
        self.inter_token = self._histogram("charonia_inter_token_latency_seconds", LATENCY_BOUNDS[:11])
        self.request = self._histogram("charonia_request_seconds", LATENCY_BOUNDS)
        self.queue = self._histogram("charonia_queue_seconds", LATENCY_BOUNDS)
        self.prefill = self._histogram("charonia_prefill_seconds", LATENCY_BOUNDS)
        self.decode = self._histogram("charonia_decode_seconds", LATENCY_BOUNDS)
        self.step = self._histogram("charonia_step_seconds", (0.0005, *LATENCY_BOUNDS[:10]))
        self.step_tokens = self._histogram("charonia_step_tokens", _STEP_SIZES)
        self.step_sequences = self._histogram("charonia_step_sequences", _STEP_SIZES)
        self.prompt_length = self._histogram("vllm:request_prompt_tokens", _LENGTHS)
        self.generation_length = self._histogram("vllm:request_generation_tokens", _LENGTHS)

    def _histogram(self, family: str, bounds: Sequence[float]) -> Histogram:
        histogram = self._histograms[family] = Histogram(bounds)
        return histogram

    def tenant(self, name: str) -> TenantUsage:
        return self.tenants.get(name) or self.tenants.setdefault(name, TenantUsage())

    def total(self, *outcomes: Outcome) -> int:
        """The number of requests that ended in one of these ways."""
        return sum(count for end, count in self.ended.items() if end.outcome in outcomes)

    @property
    def answered(self) -> int:
        return self.total(Outcome.STOP, Outcome.LENGTH)

    def readings(self, engine: EngineState) -> Iterator[Reading]:
        """Every series of the model, Triton's included."""
        yield from ended_readings(self.ended)
        for tenant, used in self.tenants.items():
            labels = {"tenant": tenant}
            yield Reading("charonia_prompt_tokens_total", used.prompt, labels)
            yield Reading("charonia_generation_tokens_total", used.generated, labels)
            yield Reading("charonia_tenant_waiting_seconds_total", used.waiting.seconds, labels)
            yield Reading("charonia_tenant_weight", used.weight, labels)
        yield Reading("charonia_merged_tokens_total", self.merged_tokens)
        yield Reading("charonia_unread_seconds_total", self.unread.seconds)
        for family, histogram in self._histograms.items():
            yield Reading(family, histogram)
        yield from engine.readings()
        yield from self._triton_readings(sum(engine.waiting.values()))

    def _triton_readings(self, pending: int) -> Iterator[Reading]:
        answered = self.answered
        shed = sum(self.ended[end] for end in QUEUE_FULL_ENDS.values())
        failures = {
            "REJECTED": shed + self.total(Outcome.TIMEOUT),
            "CANCELED": self.total(Outcome.CANCELLED),
            "BACKEND": self.total(Outcome.ERROR),
            "OTHER": self.total(Outcome.REJECTED) - shed,
        }
        yield Reading("nv_inference_request_success", answered)
        for reason, count in failures.items():
            yield Reading("nv_inference_request_failure", count, {"reason": reason})
        # A sequence joins steps by itself: as in Triton's own decoupled back ends, one request is one execution.
        yield Reading("nv_inference_count", answered)
        yield Reading("nv_inference_exec_count", answered)
        yield from self.durations.readings()
        yield Reading("nv_inference_pending_request_count", pending)


def ended_readings(ended: Mapping[RequestEnd, int]) -> Iterator[Reading]:
    for (outcome, reason), count in ended.items():
        yield Reading("charonia_requests_total", count, {"outcome": outcome.value, "reason": reason})


def sum_totals(totals: Iterable[EngineTotals]) -> EngineTotals:
    """What several cores have counted together."""
    cores = [msgspec.structs.asdict(total) for total in totals]
    drafters = sum_by_drafter(core.pop("drafters") for core in cores)
    sums = {name: _sum([core[name] for core in cores]) for name in cores[0]}
    return EngineTotals(drafters=drafters, **sums)


def _sum(counts: Sequence[Any]) -> Any:
    """The sum of numbers, or those of mappings by their keys."""
    if not isinstance(counts[0], dict):
        return sum(counts)
    return {name: sum(by_name.get(name, 0.0) for by_name in counts) for name in {*chain(*counts)}}


def record_request(metrics: LlmMetrics, context: RequestContext) -> None:
    """Count a request that has ended, and measure the phases of an answered one."""
    assert context.end is not None
    metrics.ended[context.end] += 1
    if not context.end.outcome.answered:
        return
    summary = context.summary
    arrived = context.arrived_at
    ended = context.ended_at
    submitted = summary.submitted or arrived
    begun = summary.begun or submitted
    last = summary.last or begun
    metrics.request.observe(ended - arrived)
    metrics.decode.observe(last - (summary.first or last))
    metrics.prompt_length.observe(summary.prompt or 0)
    metrics.generation_length.observe(summary.generated)
    spent = metrics.durations
    spent.request += _microseconds(ended - arrived)
    spent.compute_input += _microseconds(submitted - arrived)
    spent.queue += _microseconds(begun - submitted)
    spent.compute_infer += _microseconds(last - begun)
    spent.compute_output += _microseconds(ended - last)
    spent.last = int(time.time() * 1000)


def _microseconds(seconds: float) -> int:
    return int(max(seconds, 0.0) * 1e6)


def v2_statistics(metrics: LlmMetrics) -> VersionStatistics:
    """A language model's counters as v2's statistics, by the rules of its `nv_inference_` metrics: a request is one
    execution of batch size 1, and the time of failed ones is not measured."""
    answered, spent = metrics.answered, metrics.durations

    def took(microseconds: int) -> StatisticDuration:
        return StatisticDuration(answered, microseconds * 1000)

    computed = took(spent.compute_input), took(spent.compute_infer), took(spent.compute_output)
    failed = metrics.total(Outcome.ERROR, Outcome.REJECTED, Outcome.TIMEOUT, Outcome.CANCELLED)
    return VersionStatistics(
        last_inference=spent.last,
        inference_count=answered,
        execution_count=answered,
        inference=InferenceStatistics(took(spent.request), StatisticDuration(failed), took(spent.queue), *computed),
        batches=(BatchStatistics(1, *computed),) if answered else (),
    )
