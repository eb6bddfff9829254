"""The instruments of one language model, and its series at a scrape."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..core.metrics import Histogram, Reading
from ..core.request_context import QUEUE_FULL_ENDS, Outcome, RequestEnd

_SECONDS_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_INTER_TOKEN_BOUNDS = _SECONDS_BOUNDS[:11]
_STEP_SECONDS_BOUNDS = (0.0005, *_SECONDS_BOUNDS[:10])
_STEP_SIZE_BOUNDS = tuple(2**power for power in range(15))
FIRST_RESPONSE_BOUNDS = (100, 500, 2000, 5000)
"""Triton's bounds, milliseconds."""

_LENGTH_BOUNDS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))


_ALWAYS_REPORTED = (
    *(RequestEnd(outcome) for outcome in Outcome if outcome is not Outcome.REJECTED),
    *QUEUE_FULL_ENDS.values(),
)


@dataclass(slots=True)
class TenantTokens:
    """Tokens of one tenant; requests without a key belong to the tenant ""."""

    prompt: int = 0
    generated: int = 0


@dataclass(slots=True)
class RequestDurations:
    """Triton's sums over successful requests: the whole, and what it was made of. `last`: when the last one ended, in
    milliseconds since the epoch."""

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


class EngineState(NamedTuple):
    """An engine at a scrape. `waiting`: requests not begun, by class. Counters outlive the core that counted."""

    running: int = 0
    waiting: Mapping[str, int] = {}
    queue_age: float = 0.0
    kv_usage: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    core_restarts: int = 0
    replicas_ready: int = 0


def _seconds() -> Histogram:
    return Histogram(_SECONDS_BOUNDS)


def _sizes() -> Histogram:
    return Histogram(_STEP_SIZE_BOUNDS)


def _lengths() -> Histogram:
    return Histogram(_LENGTH_BOUNDS)


@dataclass(frozen=True, slots=True)
class LlmMetrics:
    """The instruments of one language model, from its load to its unload. Seconds and tokens throughout."""

    ended: Counter[RequestEnd] = field(default_factory=lambda: Counter(dict.fromkeys(_ALWAYS_REPORTED, 0)))
    tenants: dict[str, TenantTokens] = field(default_factory=lambda: {"": TenantTokens()})
    durations: RequestDurations = field(default_factory=RequestDurations)
    first_token: Histogram = field(default_factory=_seconds)
    first_response: Histogram = field(default_factory=lambda: Histogram(FIRST_RESPONSE_BOUNDS))
    inter_token: Histogram = field(default_factory=lambda: Histogram(_INTER_TOKEN_BOUNDS))
    request: Histogram = field(default_factory=_seconds)
    queue: Histogram = field(default_factory=_seconds)
    prefill: Histogram = field(default_factory=_seconds)
    decode: Histogram = field(default_factory=_seconds)
    step: Histogram = field(default_factory=lambda: Histogram(_STEP_SECONDS_BOUNDS))
    step_tokens: Histogram = field(default_factory=_sizes)
    step_sequences: Histogram = field(default_factory=_sizes)
    prompt_length: Histogram = field(default_factory=_lengths)
    generation_length: Histogram = field(default_factory=_lengths)

    def tenant(self, name: str) -> TenantTokens:
        return self.tenants.setdefault(name, TenantTokens())

    def total(self, *outcomes: Outcome) -> int:
        """Requests that ended in one of these ways."""
        return sum(count for end, count in self.ended.items() if end.outcome in outcomes)

    @property
    def answered(self) -> int:
        return self.total(Outcome.STOP, Outcome.LENGTH)

    def readings(self, engine: EngineState) -> Iterator[Reading]:
        """Every series of the model, Triton's included."""
        yield from ended_readings(self.ended)
        yield from self._tokens()
        yield from self._histograms()
        yield from _engine_readings(engine)
        yield from self._triton(sum(engine.waiting.values()))

    def _tokens(self) -> Iterator[Reading]:
        for tenant, tokens in self.tenants.items():
            yield Reading("charonia_prompt_tokens_total", tokens.prompt, {"tenant": tenant})
            yield Reading("charonia_generation_tokens_total", tokens.generated, {"tenant": tenant})

    def _histograms(self) -> Iterator[Reading]:
        yield Reading("charonia_time_to_first_token_seconds", self.first_token)
        yield Reading("nv_inference_first_response_histogram_ms", self.first_response)
        yield Reading("charonia_inter_token_latency_seconds", self.inter_token)
        yield Reading("charonia_request_seconds", self.request)
        yield Reading("charonia_queue_seconds", self.queue)
        yield Reading("charonia_prefill_seconds", self.prefill)
        yield Reading("charonia_decode_seconds", self.decode)
        yield Reading("charonia_step_seconds", self.step)
        yield Reading("charonia_step_tokens", self.step_tokens)
        yield Reading("charonia_step_sequences", self.step_sequences)
        yield Reading("vllm:request_prompt_tokens", self.prompt_length)
        yield Reading("vllm:request_generation_tokens", self.generation_length)

    def _triton(self, pending: int) -> Iterator[Reading]:
        answered = self.answered
        yield Reading("nv_inference_request_success", answered)
        for reason, count in self._failures().items():
            yield Reading("nv_inference_request_failure", count, {"reason": reason})
        # A sequence joins steps by itself: as in Triton's own decoupled back ends, one request is one execution.
        yield Reading("nv_inference_count", answered)
        yield Reading("nv_inference_exec_count", answered)
        yield from self.durations.readings()
        yield Reading("nv_inference_pending_request_count", pending)

    def _failures(self) -> dict[str, int]:
        shed = sum(self.ended[end] for end in QUEUE_FULL_ENDS.values())
        return {
            "REJECTED": shed + self.total(Outcome.TIMEOUT),
            "CANCELED": self.total(Outcome.CANCELLED),
            "BACKEND": self.total(Outcome.ERROR),
            "OTHER": self.total(Outcome.REJECTED) - shed,
        }


def ended_readings(ended: Mapping[RequestEnd, int]) -> Iterator[Reading]:
    """Requests by how they ended."""
    for (outcome, reason), count in ended.items():
        yield Reading("charonia_requests_total", count, {"outcome": outcome.value, "reason": reason})


def _engine_readings(state: EngineState) -> Iterator[Reading]:
    yield Reading("charonia_requests_running", state.running)
    for name, count in ({"0": 0} | dict(state.waiting)).items():
        yield Reading("charonia_requests_waiting", count, {"class": name})
    yield Reading("charonia_queue_age_seconds", state.queue_age)
    yield Reading("charonia_kv_cache_usage_ratio", state.kv_usage)
    yield Reading("charonia_prefix_cache_queries_total", state.prefix_queries)
    yield Reading("charonia_prefix_cache_hits_total", state.prefix_hits)
    yield Reading("charonia_preemptions_total", state.preemptions)
    yield Reading("charonia_core_restarts_total", state.core_restarts)
    yield Reading("charonia_replicas_ready", state.replicas_ready)
