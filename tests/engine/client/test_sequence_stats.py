"""The account of a sequence: phases by given times, one end; what is measured of requests."""

import time

import pytest

from charonia.core.request import FinishReason, GenerateRequest
from charonia.core.request_context import Outcome, RequestContext, RequestEnd
from charonia.engine.client.admission import AdmissionControl, QueueLimits
from charonia.engine.client.sequence_stats import SequenceStats, open_sequence
from charonia.engine.client.token_stream import TokenStream
from charonia.telemetry.llm_metrics import LlmMetrics, record_request


def of_tenant(name: str) -> RequestContext:
    context = RequestContext("test")
    context.tenant = name
    return context


def ended(metrics: LlmMetrics) -> dict[RequestEnd, int]:
    return {end: count for end, count in metrics.ended.items() if count}


def test_phases_and_tokens() -> None:
    metrics = LlmMetrics()
    account = SequenceStats(metrics, GenerateRequest(id="1", prompt=""), of_tenant("t"))
    account.record_submission(prompt=40)
    start = account.submitted
    assert start is not None
    account.record_start(cached=32, at=start + 2)
    account.record_tokens(1, at=start + 3)
    account.record_tokens(2, at=start + 5)
    assert (metrics.queue.sum, metrics.prefill.sum) == (pytest.approx(2), pytest.approx(1))
    assert metrics.first_token.sum == pytest.approx(start + 3 - account.arrived)
    assert (metrics.inter_token.sum, sum(metrics.inter_token.counts)) == (pytest.approx(2), 2)
    assert (metrics.tenant("t").prompt, metrics.tenant("t").generated) == (40, 3)


def test_a_step_cannot_begin_before_its_request_came() -> None:
    account = SequenceStats(LlmMetrics())
    account.record_submission(prompt=1)
    account.record_start(cached=0, at=0.0)
    assert account.begun == account.submitted


def test_a_sequence_is_of_its_request_and_ends_with_its_block() -> None:
    metrics = LlmMetrics()
    context = of_tenant("t")

    def request() -> None:
        with context:
            with open_sequence(metrics, GenerateRequest(id="1", prompt=""), context) as account:
                assert account.arrived == context.arrived_at
                account.record_submission(prompt=3)
                account.record_start(cached=0, at=account.opened)
                account.record_tokens(2, at=account.opened + 1)
                account.record_finish(FinishReason.STOP)
            with open_sequence(metrics, GenerateRequest(id="1", prompt="", choice=1), context):
                raise GeneratorExit

    with pytest.raises(GeneratorExit):
        request()
    record_request(metrics, context)
    assert [sequence.end for sequence in context.sequences] == [RequestEnd(Outcome.STOP), RequestEnd(Outcome.CANCELLED)]
    assert ended(metrics) == {RequestEnd(Outcome.CANCELLED): 1}


def test_one_answered_request_is_measured_once_however_many_answers() -> None:
    metrics = LlmMetrics()
    context = RequestContext("test")
    with context:
        for choice in range(3):
            with open_sequence(metrics, GenerateRequest(id="1", prompt="", choice=choice), context) as account:
                account.record_submission(prompt=5)
                account.record_start(cached=0, at=account.opened)
                account.record_tokens(2, at=account.opened)
                account.record_finish(FinishReason.LENGTH)
    record_request(metrics, context)
    assert ended(metrics) == {RequestEnd(Outcome.LENGTH): 1}
    assert (metrics.prompt_length.sum, metrics.generation_length.sum, sum(metrics.request.counts)) == (5, 6, 1)
    assert metrics.durations.request >= metrics.durations.compute_input
    assert time.time() * 1000 - 60_000 < metrics.durations.last <= time.time() * 1000


@pytest.mark.parametrize("reason", FinishReason)
def test_every_finish_reason_is_an_outcome(reason: FinishReason) -> None:
    account = SequenceStats(LlmMetrics())
    account.record_finish(reason)
    assert account.end is not None
    assert account.end.outcome is (Outcome.CANCELLED if reason is FinishReason.ABORT else Outcome(reason.value))


def test_a_tenant_waits_from_submission_until_its_sequence_begins_or_is_given_up() -> None:
    metrics, context = LlmMetrics(), of_tenant("t")
    context.tenant_weight = 2.5
    admission = AdmissionControl(QueueLimits(1, 100))
    for begins in (True, False):
        with admission.admit() as ticket:
            account = SequenceStats(metrics, context=context)
            account.record_submission(prompt=3)
            stream = TokenStream(account, ticket)
            waited = metrics.tenant("t").waiting.seconds
            assert metrics.tenant("t").waiting.seconds > waited
            if begins:
                stream.start(cached=0, at=account.opened)
                waited = metrics.tenant("t").waiting.seconds
                assert metrics.tenant("t").waiting.seconds == waited
            stream.close()
        waited = metrics.tenant("t").waiting.seconds
        assert metrics.tenant("t").waiting.seconds == waited
    assert metrics.tenant("t").weight == 2.5


async def test_tokens_that_come_while_others_are_unread_are_counted_and_how_long() -> None:
    metrics = LlmMetrics()
    ticket = AdmissionControl(QueueLimits(1, 100)).admit()
    stream = TokenStream(SequenceStats(metrics), ticket)
    stream.push([1], at=1.0)
    assert (await stream.read()).token_ids == (1,)
    assert (metrics.merged_tokens, metrics.unread.seconds) == (0, 0)
    for tokens in ([2], [3, 4], [5]):
        stream.push(tokens, at=2.0)
    behind = metrics.unread.seconds
    assert metrics.unread.seconds > behind >= 0
    assert (await stream.read()).token_ids == (2, 3, 4, 5)
    assert metrics.merged_tokens == 3
    for tokens in ([6], [7]):
        stream.push(tokens, at=3.0)
    stream.close()
    behind = metrics.unread.seconds
    assert metrics.unread.seconds == behind
