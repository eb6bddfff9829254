"""Measures one sequence, the times of its phases and the tokens it used, and a model's requests.

Knows nothing of protocols. Written by the event loop that serves the request; a chunk costs less than a microsecond.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from ...core.errors import RequestTimeout
from ...core.metrics import BatchStatistics, InferenceStatistics, StatisticDuration, VersionStatistics
from ...core.request import FinishReason, GenerateRequest, SamplingParams
from ...core.request_context import CANCELLED, Outcome, RequestContext, RequestEnd, end_for_error
from ...telemetry.llm_metrics import LlmMetrics

_ENDS: dict[FinishReason, RequestEnd] = {
    reason: CANCELLED if reason is FinishReason.ABORT else RequestEnd(Outcome(reason.value)) for reason in FinishReason
}

_DEFAULTS = SamplingParams()


class SequenceStats:
    """A `core.request_context.SequenceRecord`. `arrived`: when an endpoint got the request that it is for. Tests and
    benchmarks measure sequences that have no request and context."""

    def __init__(
        self, metrics: LlmMetrics, request: GenerateRequest | None = None, context: RequestContext | None = None
    ) -> None:
        self.metrics = metrics
        self.tokens = metrics.tenant("" if context is None else context.tenant)
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
        self.drafts: list[tuple[int, int]] = []  # tokens drafted and accepted in each step that drafted, if reported
        self.finish_reason: FinishReason | None = None
        self.end: RequestEnd | None = None

    def time_left(self, limit: float) -> float:
        """The rest of `limit` seconds since the request arrived; 0 is no limit.

        Raises:
            RequestTimeout: they are over.
        """
        left = limit - (time.monotonic() - self.arrived)
        if limit and left <= 0:
            raise RequestTimeout
        return left if limit else 0.0

    def record_submission(self, prompt: int) -> None:
        self.prompt = prompt
        self.submitted = time.monotonic()

    @property
    def seconds_waited(self) -> float:
        """Seconds since the engine got it."""
        return time.monotonic() - (self.submitted or self.opened)

    def record_start(self, cached: int, at: float) -> None:
        submitted = self.opened if self.submitted is None else self.submitted
        self.begun = max(at, submitted)
        self.cached = cached
        self.tokens.prompt += self.prompt or 0
        self.metrics.queue.observe(self.begun - submitted)

    def record_tokens(self, count: int, at: float) -> None:
        self.generated += count
        self.tokens.generated += count
        if self.last is None:
            self.first = at
            self.metrics.first_token.observe(at - self.arrived)
            self.metrics.first_response.observe(1000 * (at - self.arrived))
            if self.begun is not None:
                self.metrics.prefill.observe(at - self.begun)
        else:
            self.metrics.inter_token.observe((at - self.last) / count, count)
        self.last = at

    def record_finish(self, reason: FinishReason) -> None:
        """The last token goes to the client now."""
        self.finish_reason = reason
        self.end = _ENDS[reason]


@contextmanager
def open_sequence(metrics: LlmMetrics, request: GenerateRequest, context: RequestContext) -> Iterator[SequenceStats]:
    """The stats of one of a request's sequences, which ends with the block: a reader that leaves before the last token
    has cancelled it."""
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


def record_request(metrics: LlmMetrics, context: RequestContext) -> None:
    """Count a request to the model that has ended; measure the phases of an answered one, and Triton's sums of them."""
    assert context.end is not None
    metrics.ended[context.end] += 1
    if not context.end.outcome.answered:
        return
    summary, arrived, ended = context.summary, context.arrived_at, context.ended_at
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
    """A language model's counters as v2's statistics, by the same rules as its `nv_inference_` metrics. One request is
    one execution of batch size 1, as in Triton's own decoupled back ends; the time of failed ones is not measured."""
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
