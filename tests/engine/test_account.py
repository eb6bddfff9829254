"""The account of a request: phases by given times, one end, one record; and totals that outlive their core."""

import asyncio
import logging

import pytest

from charonia.core.errors import CharoniaError, InvalidArgument, QueueFull, RequestTimeout, Unavailable
from charonia.core.metrics import End, LlmMetrics, Outcome
from charonia.core.request import FinishReason
from charonia.engine.account import Account, Accounts
from charonia.engine.client import Lifelong
from charonia.engine.messages import Totals


def ended(metrics: LlmMetrics) -> dict[End, int]:
    return {end: count for end, count in metrics.ended.items() if count}


def test_phases_and_tokens() -> None:
    metrics = LlmMetrics()
    account = Account(metrics)
    account.name_tenant("t")
    account.submit(prompt=40)
    start = account.submitted
    assert start is not None
    account.begin(cached=32, at=start + 2)
    account.receive(1, at=start + 3)
    account.receive(2, at=start + 5)
    assert (metrics.queue.sum, metrics.prefill.sum) == (pytest.approx(2), pytest.approx(1))
    assert metrics.first_token.sum == pytest.approx(start + 3 - account.arrived)
    assert (metrics.inter_token.sum, sum(metrics.inter_token.counts)) == (pytest.approx(2), 2)
    assert (metrics.tenant("t").prompt, metrics.tenant("t").generated) == (40, 3)


def test_a_step_cannot_begin_before_its_request_came() -> None:
    account = Account(LlmMetrics())
    account.submit(prompt=1)
    account.begin(cached=0, at=0.0)
    assert account.begun == account.submitted


@pytest.mark.parametrize(
    ("error", "submitted", "end"),
    [
        (QueueFull("full", retry_after=1), False, End(Outcome.REJECTED, "queue_full")),
        (InvalidArgument("no"), True, End(Outcome.REJECTED, "invalid_argument")),
        (Unavailable("not yet"), False, End(Outcome.REJECTED, "unavailable")),
        (Unavailable("no longer"), True, End(Outcome.ERROR, "unavailable")),
        (RequestTimeout(), True, End(Outcome.TIMEOUT)),
        (CharoniaError("what"), True, End(Outcome.ERROR, "unknown")),
        (ZeroDivisionError(), False, End(Outcome.ERROR, "internal")),
        (asyncio.CancelledError(), True, End(Outcome.CANCELLED)),
        (GeneratorExit(), False, End(Outcome.CANCELLED)),
    ],
)
def test_what_an_exception_means(error: BaseException, submitted: bool, end: End) -> None:
    metrics = LlmMetrics()

    def request() -> None:
        with Accounts("m", "1", metrics).open("") as account:
            if submitted:
                account.submit(prompt=1)
            raise error

    with pytest.raises(type(error)):
        request()
    assert ended(metrics) == {end: 1}


def test_one_record_ends_a_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "charonia.requests")
    metrics = LlmMetrics()

    def request() -> None:
        with Accounts("m", "1", metrics).open("r-7") as account:
            account.submit(prompt=3)
            account.begin(cached=0, at=account.arrived)
            account.receive(2, at=account.arrived + 1)
            account.finish(FinishReason.STOP)
            raise GeneratorExit  # leaving after the last token cancels nothing

    with pytest.raises(GeneratorExit):
        request()
    [record] = caplog.records
    assert ended(metrics) == {End(Outcome.STOP): 1}
    assert (record.request_id, record.model, record.outcome, record.finish_reason) == ("r-7", "m", "stop", "stop")
    assert (record.prompt_tokens, record.cached_tokens, record.generated_tokens) == (3, 0, 2)
    assert record.ttft_ms == 1000
    assert record.getMessage().startswith("request_id=r-7 model=m version=1 outcome=stop finish_reason=stop")


def test_a_refusal_has_no_times(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "charonia.requests")
    with pytest.raises(QueueFull), Accounts("m", "1", LlmMetrics()).open(""):
        raise QueueFull("full", retry_after=1)
    [record] = caplog.records
    assert (record.queue_ms, record.ttft_ms, record.prompt_tokens) == (None, None, None)
    assert record.getMessage().startswith("model=m version=1 outcome=rejected reason=queue_full generated_tokens=0")


@pytest.mark.parametrize("reason", FinishReason)
def test_every_finish_reason_is_an_outcome(reason: FinishReason) -> None:
    account = Account(LlmMetrics())
    account.finish(reason)
    assert account.end is not None
    assert account.end.outcome is (Outcome.CANCELLED if reason is FinishReason.ABORT else Outcome(reason.value))


def test_totals_outlive_their_core() -> None:
    lifelong = Lifelong()
    lifelong.see(Totals(1, 10, 5))
    lifelong.see(Totals(2, 20, 6))
    lifelong.start_over()
    assert lifelong.sums == Totals(2, 20, 6)
    lifelong.see(Totals(1, 1, 0))
    lifelong.start_over()
    lifelong.start_over()
    assert lifelong.sums == Totals(3, 21, 6)
