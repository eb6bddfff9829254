"""The trials against a server that counts instead of computing, and their figures out of records made by hand."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from charonia.bench.load.driver import LoadRecord
from charonia.bench.load.fake_model import NAME, VOCAB, write_repository
from charonia.bench.load.planned_requests import uniform_jobs
from charonia.bench.server_process import own_server
from charonia.bench.server_trials import (
    TrialSizes,
    TrialTarget,
    beside,
    gaps_during,
    mixed,
    prefill,
    prefix,
    speed,
    steady_gaps,
    without_generator,
)
from charonia.bench.trial import TrialVerdict
from charonia.core.errors import Unavailable

SMALL = TrialSizes(
    prompt=8, new=4, long=64, running=2, running_new=250, longs=1, shorts=3, shared=64, sharing=3, repeats=1
)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrialTarget]:
    slow = {"fake_step_seconds": 0.004, "fake_token_seconds": 0.0001}
    repository = write_repository(tmp_path_factory.mktemp("fake") / "models", slow)
    with own_server("--model-repository", str(repository)) as place:
        yield TrialTarget(place, NAME, VOCAB)


def record(index: int, times: tuple[float, ...], sent: float = 0.0) -> LoadRecord:
    plain = {"status": "ok", "tokens": len(times), "prompt_tokens": 1, "frames": len(times), "size": 1}
    return LoadRecord(index=index, due=sent, sent=sent, ended=times[-1], times=list(times), **plain)  # type: ignore[arg-type]


STREAMS = [record(0, (1.0, 2.0, 4.0, 5.0)), record(1, (1.5, 2.5, 3.5, 6.0))]


def test_steady_gaps_are_those_while_all_streams_run() -> None:
    assert sorted(steady_gaps(STREAMS)) == [1.0, 1.0, 1.0, 1.0, 2.0, 2.5]


def test_streams_that_never_run_together_have_no_steady_gaps() -> None:
    with pytest.raises(Unavailable, match="before the last one began"):
        steady_gaps([*STREAMS, record(2, (99.0, 100.0))])


def test_gaps_count_that_overlap_the_wait_for_the_long_prompt() -> None:
    long = record(2, (3.0,), sent=2.2)
    assert sorted(gaps_during([*STREAMS, long], 2)) == [1.0, 1.0, 2.0]


def test_streams_that_end_before_the_long_prompt_is_computed_prove_nothing() -> None:
    with pytest.raises(Unavailable, match="give them more --running-new"):
        gaps_during([*STREAMS, record(2, (5.5,), sent=2.2)], 2)


def test_a_rate_is_net_of_the_cores_that_the_generator_took() -> None:
    assert without_generator(90.0, 0.2, 2) == pytest.approx(100.0)


def test_a_bar_holds_from_its_own_side() -> None:
    assert [TrialVerdict("", value, 2.0, True).met for value in (1.9, 2.0, 2.1)] == [False, True, True]
    assert [TrialVerdict("", value, 2.0, False).met for value in (1.9, 2.0, 2.1)] == [True, True, False]


@pytest.mark.proof
def test_every_trial_gives_its_ratio_over_a_real_server(asked: TrialTarget) -> None:
    said: list[str] = []
    first, gaps = beside(asked, replace(SMALL, new=60), said.append)
    assert first.value > 0 < gaps.value
    assert len(said) == 2
    for trial in (prefill, mixed, prefix):
        (verdict,) = trial(asked, SMALL, said.append)
        assert verdict.value > 0
    assert len(said) == 7


def test_a_load_whose_requests_fail_is_no_measurement(asked: TrialTarget) -> None:
    with pytest.raises(Unavailable, match="1 of 1 requests failed: HTTP 400"):
        asked.put(uniform_jobs([0.0], 8, 100_000))


def test_speed_counts_every_token_to_the_last_end(asked: TrialTarget) -> None:
    outcome = asked.put(uniform_jobs([0.0, 0.0], 8, 5), concurrency=2)
    assert speed(outcome) == pytest.approx(10 / max(record.ended for record in outcome.records))
