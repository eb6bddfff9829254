"""Figures out of records that were made by hand."""

from charonia.bench.load.driver import LoadRecord
from charonia.bench.load.figures import Slo, compute_figures


def record(index: int = 0, due: float = 0.0, times: tuple[float, ...] = (), **fields: object) -> LoadRecord:
    ended = times[-1] if times else due + 1
    plain = {"sent": due, "ended": ended, "status": "ok", "prompt_tokens": 10, "frames": len(times), "size": 100}
    return LoadRecord(index=index, due=due, times=list(times), **{"tokens": len(times), **plain, **fields})  # type: ignore


def test_latencies_count_from_when_a_request_was_due() -> None:
    seen = compute_figures([record(due=1.0, sent=1.5, times=(2.0, 2.25, 3.0))])
    assert seen.ttft is not None
    assert seen.itl is not None
    assert seen.tpot is not None
    assert seen.end_to_end is not None
    assert seen.lateness is not None
    assert seen.ttft.p50 == 1.0
    assert (seen.itl.count, seen.itl.mean, seen.itl.max) == (2, 0.5, 0.75)
    assert seen.tpot.p50 == 0.5
    assert seen.end_to_end.p50 == 2.0
    assert seen.lateness.p50 == 0.5


def test_tokens_that_come_together_count_each() -> None:
    seen = compute_figures([record(times=(1.0, 2.0), tokens=5)])
    assert seen.tpot is not None
    assert seen.tpot.p50 == 0.25
    assert seen.output_tokens == 5


def test_rates_run_to_the_last_end() -> None:
    seen = compute_figures([record(0, times=(1.0, 2.0)), record(1, times=(3.0, 4.0))])
    assert seen.seconds == 4.0
    assert seen.per_second(seen.output_tokens) == 1.0
    assert seen.per_second(seen.succeeded) == 0.5


def test_failures_are_counted_by_what_went_wrong_and_are_in_no_latency() -> None:
    failed = record(1, status="HTTP 429", ended=9.0)
    seen = compute_figures([record(0, times=(1.0,)), failed, failed])
    assert seen.statuses == {"HTTP 429": 2, "ok": 1}
    assert seen.errors == {"HTTP 429": 2}
    assert (seen.requests, seen.succeeded, seen.prompt_tokens) == (3, 1, 10)
    assert seen.ttft is not None
    assert seen.ttft.count == 1
    assert seen.tpot is None, "a single token has no pace"


def test_a_good_request_keeps_every_limit_that_was_given() -> None:
    quick = record(0, times=(0.1, 0.2))
    late = record(1, times=(0.3, 0.4))
    slow = record(2, times=(0.1, 0.4))
    failed = record(3, status="timeout", times=(0.1, 0.2))
    records = [quick, late, slow, failed]
    assert compute_figures(records, Slo()).good == 3
    assert compute_figures(records, Slo(ttft_ms=200)).good == 2
    assert compute_figures(records, Slo(itl_ms=200)).good == 2
    assert compute_figures(records, Slo(200, 200)).good == 1


def test_nothing_is_nothing() -> None:
    seen = compute_figures([])
    assert seen.requests == seen.succeeded == 0
    assert seen.per_second(1) == 0.0
