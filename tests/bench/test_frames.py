"""What a frame's cost beside a bare handler's says, and the text that is measured with."""

import sys
from collections.abc import Iterator

import pytest

from charonia.bench.frames import app, judge
from charonia.bench.load.bare_frames import bare_server
from charonia.bench.load.driver import EndpointName, LoadRecord, LoopMode, RequestOptions
from charonia.bench.load.fake_text import build_text_tokenizer
from charonia.bench.load.frames_meter import FramesRun, figures_between
from charonia.bench.load.plan import WORDS, Prompts
from charonia.bench.load.planned_requests import uniform_jobs
from charonia.bench.load.worker import LoadRun, LoadTarget, WorkerOutcome, run_here
from charonia.bench.server_process import ServerAddress
from charonia.core.errors import Unavailable


def turn(cpu: float) -> FramesRun:
    return FramesRun(frames=1, sent=1, size=1, seconds=1.0, own=cpu, frontends=0.0, kernel=0.0)


def test_costs_are_held_against_the_bare_ones_of_the_same_round() -> None:
    verdict = judge("chat", "plain", {"charonia": [turn(30), turn(60)], "bare": [turn(20), turn(40)]})
    assert (verdict.value, verdict.bar, verdict.met) == (1.5, 1.5, True)
    assert not judge("chat", "plain", {"charonia": [turn(31)], "bare": [turn(20)]}).met
    assert judge("chat", "logprobs", {"charonia": [turn(40)], "bare": [turn(20)]}).met
    assert not judge("grpc", "plain", {"charonia": [turn(27)], "bare": [turn(20)]}).met


def record(times: list[float], status: str = "ok") -> LoadRecord:
    return LoadRecord(
        index=0, due=0, sent=0, ended=9, status=status, times=times, tokens=3, prompt_tokens=1, frames=4, size=400
    )


def metered(*records: LoadRecord) -> FramesRun:
    """What is measured of a process that uses a core, half of it in the kernel."""
    marks = [(at / 10, {1: (at / 20, at / 20)}) for at in range(100)]
    return figures_between(marks, 1, [WorkerOutcome(list(records), 0.0, 9.0)])


def test_only_the_time_in_which_all_streams_run_counts() -> None:
    short = [1.0 + at / 10 + 0.05 for at in range(30)]
    measured = metered(record([0.01, *short]), record([0.5, *short, 8.0]))
    assert measured.seconds == pytest.approx(3.4)  # from 0.5, the mark before 3.95
    assert measured.frames == 1 + 2 * 29
    assert measured.own == pytest.approx(3.4 / 59 * 1e6)
    assert measured.kernel == pytest.approx(measured.own / 2)
    assert (measured.sent, measured.size) == (32, 100)


def test_streams_that_fail_or_do_not_meet_give_no_figure() -> None:
    with pytest.raises(Unavailable, match="streams failed: timeout"):
        metered(record([1.0], "timeout"))
    with pytest.raises(Unavailable, match="same time for long"):
        metered(record([0.1, 2.0]), record([1.9, 8.0]))


def test_tokens_in_a_row_are_text() -> None:
    tokenizer = build_text_tokenizer(4096)
    assert tokenizer.get_vocab_size() == 4096
    text = tokenizer.decode(range(256, 4096))
    assert "\ufffd" not in text
    assert {"界", "\n", '"', "ж"} <= set(text)
    assert "\ufffd" in tokenizer.decode([257]), "a character in two tokens"
    starts = {tokenizer.encode(f"and {word}").ids[-1] for word in WORDS}
    assert len(starts) == len(set(WORDS))
    assert min(starts) >= 256


@pytest.fixture(scope="module")
def bare() -> Iterator[ServerAddress]:
    with bare_server(0.001) as place:
        yield place


@pytest.mark.parametrize("door", ["completions", "grpc"])
def test_the_bare_handlers_send_what_they_are_asked_for(bare: ServerAddress, door: EndpointName) -> None:
    load = LoadRun(
        target=LoadTarget(
            host=bare.host,
            port=bare.grpc_port if door == "grpc" else bare.http_port,
            door=door,
            manner=RequestOptions("any", counted=False),
        ),
        jobs=uniform_jobs([0.0] * 3, 1, 5),
        prompts=Prompts(fixed=[5, 200]),
        pace=LoopMode(concurrency=3),
        warm_up=0,
    )
    outcome = run_here(load)
    assert [(record.status, len(record.times)) for record in outcome.records] == [("ok", 5)] * 3
    assert all(980 <= record.size <= 1010 for record in outcome.records)


@pytest.mark.proof
@pytest.mark.parametrize("flags", [("--kinds", "plain", "logprobs"), ("--stages",), ("--beside",)])
def test_the_command_runs(flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert sys.platform == "linux"
    small = ["--streams", "4", "--tokens", "60", "--step-ms", "20", "--repeats", "1", "--vocab", "4096"]
    app([*small, "--doors", "chat", "grpc", *flags], result_action="return_value")
    assert "chat" in capsys.readouterr().out
