"""What is measured of one sequence: the times of its phases, its tokens, and its part in the model's counts."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...core.errors import RequestTimeout
from ...core.request import FinishReason, GenerateRequest
from ...core.request_context import CANCELLED, Outcome, RequestContext, RequestEnd, end_for_error
from ...core.sampling import SamplingParams
from ...telemetry.llm_metrics import LlmMetrics

_ENDS: dict[FinishReason, RequestEnd] = {
    reason: CANCELLED if reason is FinishReason.ABORT else RequestEnd(Outcome(reason.value)) for reason in FinishReason
}

_DEFAULTS = SamplingParams()


class SequenceStats:
    """A `core.request_context.SequenceRecord`. `arrived`: when an endpoint got the request. Tests and benchmarks
    measure sequences without a request or a context."""

    def __init__(
        self, metrics: LlmMetrics, request: GenerateRequest | None = None, context: RequestContext | None = None
    ) -> None:
        self.metrics = metrics
        self.tenant = metrics.tenant("" if context is None else context.tenant)
        if context is not None:
            self.tenant.weight = context.tenant_weight
        self.sampling = _DEFAULTS if request is None else request.sampling
        self.choice = 0 if request is None else request.choice
        self.opened = time.monotonic()
        self.arrived = self.opened if context is None else context.arrived_at
        self.submitted: float | None = None
        self.begun: float | None = None
        self.first: float | None = None
        self.last: float | None = None
        self.prompt: int | None = None
        self.cached: int | None = None
        self.generated = 0
        self.drafts: list[tuple[int, int]] = []
        """Tokens drafted and accepted in each step that drafted, if the configuration has them reported."""
        self.held: dict[str, Any] | None = None  # how another server finds what was computed, if one is to go on
        self.finish_reason: FinishReason | None = None
        self.end: RequestEnd | None = None
        self._waits = False

    def time_left(self, limit: float) -> float:
        """The rest of `limit` seconds since the request arrived; 0 is no limit. Raises `RequestTimeout` if none is
        left."""
        left = limit - (time.monotonic() - self.arrived)
        if limit and left <= 0:
            raise RequestTimeout
        return left if limit else 0.0

    def record_submission(self, prompt: int) -> None:
        self.prompt = prompt
        self.submitted = time.monotonic()
        self._waits = True
        self.tenant.waiting.add(1)

    def end_wait(self) -> None:
        """Count the sequence as waiting no longer; may be called again."""
        self.tenant.waiting.add(-self._waits)
        self._waits = False

    @property
    def seconds_waited(self) -> float:
        """Seconds since the engine got the sequence."""
        return time.monotonic() - (self.submitted or self.opened)

    def record_start(self, cached: int, at: float) -> None:
        submitted = self.opened if self.submitted is None else self.submitted
        self.begun = max(at, submitted)
        self.cached = cached
        self.end_wait()
        self.tenant.prompt += self.prompt or 0
        self.metrics.queue.observe(self.begun - submitted)

    def record_tokens(self, count: int, at: float) -> None:
        self.generated += count
        self.tenant.generated += count
        if self.last is None:
            self.first = at
            self.metrics.first_token.observe(at - self.arrived)
            self.metrics.first_response.observe(1000 * (at - self.arrived))
            if self.begun is not None:
                self.metrics.prefill.observe(at - self.begun)
        else:
            self.metrics.inter_token.observe((at - self.last) / count, count)
        self.last = at

    def record_alike(self, sequences: int, last: float | None, at: float) -> None:
        """Count a token for each of so many sequences of its tenant, which had their last one at `last`: what
        `record_tokens` does beside the sequences themselves."""
        self.tenant.generated += sequences
        if last is not None:
            self.metrics.inter_token.observe(at - last, sequences)

    def record_finish(self, reason: FinishReason) -> None:
        """Record the end, when the last token goes to the client."""
        self.finish_reason = reason
        self.end = _ENDS[reason]


@contextmanager
def open_sequence(metrics: LlmMetrics, request: GenerateRequest, context: RequestContext) -> Iterator[SequenceStats]:
    """The stats of one sequence, for the block: one that ends before the last token has cancelled it."""
    stats = SequenceStats(metrics, request, context)
    context.add_sequence(stats)
    try:
        yield stats
    except Exception as error:
        stats.end = end_for_error(error, stats.submitted is not None)
        raise
    finally:
        if stats.end is None:
            stats.end = CANCELLED
