"""The proof of the simulation, in small: what it compares, and how. A server of its own is only asked in earnest."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from charonia.bench.load.driver import OK, LoadRecord
from charonia.bench.load.planned_requests import PlannedRequest
from charonia.core.errors import Unavailable
from charonia.extras.optimizer.machine_file import MachineFile, MachineOrigin
from charonia.extras.optimizer.simulated_machine import SimulatedMachine
from charonia.extras.optimizer.simulated_request import SimulatedRequest
from charonia.extras.optimizer.simulation import EngineShape, Simulation
from charonia.scheduler.config import SchedulerConfig

from . import simulation as proof

MACHINE = MachineFile(
    origin=MachineOrigin(how="by hand"),
    machine=SimulatedMachine(weights=5e-3, token=0.2e-3, head=0.1e-3, rest=1e-3),
    engine=EngineShape(scheduler=SchedulerConfig(max_num_seqs=8, max_model_len=1024), blocks=512),
    block_bytes=1,
)
JOBS = [PlannedRequest(at, 0.05 * at, 20 + 37 * at % 200, 10 + 7 * at % 40) for at in range(200)]
FIGURES = proof.RunFigures(100.0, 0.05, 0.2, 1.0, 2.0)


def test_a_load_asks_for_its_share_of_the_capacity() -> None:
    capacity = proof.find_capacity(MACHINE.machine, MACHINE.engine, JOBS)
    simulation = Simulation(MACHINE.machine, MACHINE.engine)
    simulation.run([SimulatedRequest(0.0, job.prompt, job.new) for job in JOBS])
    assert capacity == pytest.approx(sum(job.new for job in JOBS) / simulation.now, rel=0.1)
    for load in (0.5, 1.2):
        planned = proof.SimulationRecord(asked="").plan(MACHINE, "code", JOBS, load, 3.0)
        assert sum(each.new for each in planned) / 3.0 == pytest.approx(load * capacity, rel=0.1)
        assert max(each.due for each in planned) < 3.0


def test_figures_of_a_client_and_of_a_simulation_are_the_same_figures() -> None:
    """The records are what a client of the simulated server would have noted."""
    results = Simulation(MACHINE.machine, MACHINE.engine).run(
        [SimulatedRequest(job.due, job.prompt, job.new) for job in JOBS]
    )
    records = [
        LoadRecord(
            index=at,
            due=each.arrival.at,
            sent=each.arrival.at,
            ended=each.tokens[-1],
            status=OK,
            times=each.tokens,
            tokens=len(each.tokens),
            prompt_tokens=each.arrival.prompt,
            frames=len(each.tokens),
            size=1,
        )
        for at, each in enumerate(results)
    ]
    assert proof.figures_of(records) == proof.simulated_figures(MACHINE.machine, MACHINE.engine, JOBS)
    records[3].status = "HTTP 500"
    with pytest.raises(Unavailable, match="HTTP 500"):
        proof.figures_of(records)


@pytest.mark.parametrize(
    ("changes", "off"),
    [
        ({}, []),
        ({"throughput": 104.0, "itl_p50": 0.0476, "itl_p99": 0.219, "ttft_p50": 0.91}, []),
        ({"throughput": 94.0, "itl_p50": 0.053}, ["throughput", "itl_p50"]),
        ({"itl_p99": 0.23, "ttft_p90": 1.7}, ["itl_p99", "ttft_p90"]),
    ],
)
def test_what_is_off_by_more_than_its_bound_is_told(changes: dict[str, float], off: Sequence[str]) -> None:
    verdicts = proof.judge([FIGURES, FIGURES], replace(FIGURES, **changes))
    assert [verdict.name for verdict in verdicts if not verdict.holds] == list(off)


def test_runs_that_differ_allow_for_more_and_so_does_the_queue_beyond_capacity() -> None:
    other = replace(FIGURES, ttft_p50=1.4, throughput=140.0)
    verdicts = {each.name: each for each in proof.judge([FIGURES, other], replace(FIGURES, ttft_p50=1.7))}
    assert verdicts["ttft_p50"].bound == pytest.approx(1.5 * 0.4 / 1.2)
    assert verdicts["ttft_p50"].holds
    assert verdicts["throughput"].bound == 0.05
    [_, _, _, _, late] = proof.judge([FIGURES], replace(FIGURES, ttft_p90=3.0), [replace(FIGURES, ttft_p90=1.9)])
    assert late.bound == pytest.approx(0.55)


def test_a_table_has_what_was_measured_and_a_record_of_another_load_is_none(tmp_path: Path) -> None:
    planned = {("code", 1.2): JOBS[:50], ("code", 0.5): JOBS[:50]}
    simulated = proof.simulated_figures(MACHINE.machine, MACHINE.engine, JOBS[:50])
    run = proof.MeasuredRun(trace="code", load=1.2, requests=50, figures=simulated)
    table, holds = proof.compare(MACHINE, proof.SimulationRecord(asked="a", runs=[run, run]), planned)  # type: ignore[arg-type]
    assert holds
    assert table.row_count == len(proof.RunFigures.__struct_fields__)
    _, holds = proof.compare(
        MACHINE,
        proof.SimulationRecord(asked="a", runs=[replace(run, figures=replace(simulated, throughput=1.0))]),
        planned,  # type: ignore[arg-type]
    )
    assert not holds
    (tmp_path / "simulation.json").write_bytes(msgspec.json.encode(proof.SimulationRecord(asked="a", runs=[run])))
    assert proof.read_record(tmp_path / "simulation.json", "a").of("code", 1.2) == [run]
    assert proof.read_record(tmp_path / "simulation.json", "b").runs == []


def test_a_load_stays_as_it_was_planned_when_the_machine_is_calibrated_again() -> None:
    record, slower = (
        proof.SimulationRecord(asked=""),
        replace(MACHINE, machine=MACHINE.machine.slowed(2)),
    )
    planned = record.plan(MACHINE, "code", JOBS, 0.8, 3.0)
    assert record.plan(slower, "code", JOBS, 0.8, 3.0) == planned
    assert proof.SimulationRecord(asked="").plan(slower, "code", JOBS, 0.8, 3.0) != planned
