"""One machine's table: what is measured once is kept, and what there is no time for is told."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from charonia.bench import machine
from charonia.bench.engine_speed_report import OfflineComparison, OfflineRun
from charonia.bench.load.figures import Spread
from charonia.bench.machine import (
    MachineOptions,
    MachineRecord,
    MachineRun,
    ServedTrace,
    as_markdown,
    machine_facts,
    read_record,
    record_path,
    write_record,
)
from charonia.bench.roofline import MachinePeaks, OfflineJob
from charonia.bench.server_start import ServerStart
from charonia.bench.trial import TrialVerdict
from charonia.core.errors import Unavailable

WANTED = MachineOptions(precisions=("bf16", "int8"), sequences=(1, 4), repeats=2)


class Field:
    """Contenders that only count their turns."""

    def comparison(self, checkpoint: str, turns: list[OfflineRun]) -> OfflineComparison:
        return OfflineComparison(checkpoint=checkpoint, threads=2, about={}, ways={"bf16": "mm"}, turns=turns)


def turns_of(job: OfflineJob) -> Iterator[OfflineRun]:
    for name, precision, speed in (("charonia", "bf16", 8.0), ("openvino", "bf16", 4.0), ("charonia", "int8", 20.0)):
        machine = MachinePeaks(30e9, 200e9)
        yield OfflineRun(
            name=name,
            precision=precision,  # type: ignore[arg-type]
            job=job,
            speed=speed * job.sequences,
            machine=machine,
            limit=10.0 * job.sequences,
            agreement=1.0,
        )


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is measured, in order; every measurement is made up."""
    seen: list[str] = []

    @contextmanager
    def warm_contenders(*_: object) -> Iterator[Field]:
        seen.append("contenders")
        yield Field()

    def play_round(_: Field, job: OfflineJob, seed: int, log: object) -> Iterator[OfflineRun]:
        seen.append(f"{job.sequences} sequences, turn {seed}")
        return turns_of(job)

    def row_seconds(precision: str, rows: tuple[int, ...], enough: float) -> dict[int, float]:
        seen.append(f"products {precision}")
        return {row: 1.0 + row / 10 for row in rows}

    def start(*what: str) -> ServerStart:
        seen.append("kept" if list(Path(what[-1]).iterdir()) else "start")
        (Path(what[-1]) / "packed").touch()
        return ServerStart(1.0, 5.0 if seen[-1] == "start" else 2.0, 0.0, 0.0, "")

    def run_trials(_: Path, precision: str, *rest: Any) -> list[TrialVerdict]:
        seen.append(f"beside {precision}")
        return [TrialVerdict("TTFT", 1.5, 1.9, False)]

    fakes = SimpleNamespace(**{name: value for name, value in locals().items() if callable(value)})
    for name, fake in vars(fakes).items():
        monkeypatch.setattr(machine, name, fake)
    return seen


def run(scratch: Path, wanted: MachineOptions = WANTED) -> tuple[MachineRecord, list[str]]:
    """One run of the command, without its console."""
    facts, said = machine_facts(scratch / "qwen", wanted), list[str]()
    record = read_record(record_path(scratch), facts) or MachineRecord(facts=facts)
    MachineRun(record, scratch / "qwen", scratch, wanted, said.append).run()
    return record, said


def test_everything_is_measured_once_over_all_runs(tmp_path: Path, asked: list[str]) -> None:
    record, _ = run(tmp_path)
    parts = ["products bf16", "products int8", "contenders"]
    turns = [f"{sequences} sequences, turn {turn}" for turn in (1, 2) for sequences in (1, 4)]
    assert asked == [*parts, *turns, *["start", "kept"] * 2, "beside int8", "beside bf16"]
    assert record.starts == {"bf16": (5.0, 2.0), "int8": (5.0, 2.0)}
    asked.clear()
    assert run(tmp_path)[0].offline == record.offline
    assert asked == []


def test_a_run_that_was_interrupted_goes_on_where_it_was(
    tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    play = machine.play_round

    def interrupted(field: Any, job: OfflineJob, seed: int, log: Any) -> Iterator[OfflineRun]:
        if seed == 2:
            raise KeyboardInterrupt
        return play(field, job, seed, log)

    monkeypatch.setattr(machine, "play_round", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    monkeypatch.setattr(machine, "play_round", play)
    asked.clear()
    run(tmp_path)
    assert asked[:4] == ["contenders", "1 sequences, turn 2", "4 sequences, turn 2", "start"]


def test_a_part_that_fails_says_why_and_is_tried_again(
    tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> list[TrialVerdict]:
        raise Unavailable("1 of 1 requests failed: HTTP 400")

    with monkeypatch.context() as patched:
        patched.setattr(machine, "run_trials", refused)
        record, said = run(tmp_path)
    assert "beside, int8: 1 of 1 requests failed: HTTP 400" in said
    assert record.beside == {}
    asked.clear()
    assert list(run(tmp_path)[0].beside) == ["int8", "bf16"]
    assert asked == ["beside int8", "beside bf16"]


def test_what_there_is_no_time_for_is_told(tmp_path: Path, asked: list[str]) -> None:
    facts = machine_facts(tmp_path / "qwen", WANTED)
    write_record(record_path(tmp_path), MachineRecord(facts=facts, spent=60 * 13.0))
    record, said = run(tmp_path)
    assert asked == ["products bf16", "products int8", *["start", "kept"] * 2, "beside int8", "beside bf16"]
    assert "the engine without a server: not measured, the time is over" in said
    write_record(record_path(tmp_path), MachineRecord(facts=facts, spent=60 * 14.9))
    asked.clear()
    record, said = run(tmp_path)
    assert asked == []
    assert "beside, int8: not measured, the time is over" in said
    assert record.spent >= 60 * 14.9


@pytest.mark.usefixtures("asked")
def test_another_machine_begins_anew_and_so_does_a_broken_record(tmp_path: Path) -> None:
    record, _ = run(tmp_path)
    path = record_path(tmp_path)
    assert read_record(path, record.facts) == record
    other = machine_facts(tmp_path / "qwen", MachineOptions(precisions=("int8",)))
    assert read_record(path, other) is None
    path.write_bytes(path.read_bytes()[:-9])
    assert read_record(path, record.facts) is None


@pytest.mark.usefixtures("asked")
def test_the_table_has_every_figure(tmp_path: Path) -> None:
    record, _ = run(tmp_path)
    spread = Spread(9, 0.2, 0.1, 1.25, 2.0, 2.5, 3.0)
    record.traces["int8"] = ServedTrace(ttft=spread, itl=None, end_to_end=spread)
    table = as_markdown(record)
    for row in (
        "| 128 + 64 tokens, tokens/s at | 1 / 4 sequences |",
        "| the machine's limit, bf16 | 10.0 / 40.0 |",
        "| charonia bf16, of its limit | 8.0 / 32.0, 80 / 80 % |",
        "| charonia over openvino, bf16 | 2.00 / 2.00 |",
        "| charonia, int8 over bf16 | 2.50 / 2.50 |",
        "| bandwidth and best products beside them | 30 to 30 GB/s, bf16 200 to 200 GOP/s |",
        "| Qwen2.5-0.5B's products of 2 / 4 / 8 / 12 rows over one row's time, int8 | 1.09 / 1.27 / 1.64 / 2.00 |",
        "| start to ready, then with packed weights kept, int8 | 5.0 s, 2.0 s |",
        "| TTFT, int8 | 1.50 |",
        "TTFT p50 / p90 / p99, ms | 100 / 1,250 / 2,500 |",
        "ITL p50 / p90 / p99, ms | none |",
    ):
        assert row in table
