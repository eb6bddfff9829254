"""`charonia simulate`, run as a command line is."""

from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from msgspec.structs import replace

from charonia.cli.app import app
from charonia.core.errors import InvalidArgument
from charonia.extras.optimizer.machine_file import MachineFile, MachineOrigin, write_machine_file
from charonia.extras.optimizer.options import SimulatedEngineOptions
from charonia.extras.optimizer.simulate import SimulationReport, resolve_engine
from charonia.extras.optimizer.simulated_machine import SimulatedMachine
from charonia.extras.optimizer.simulation import EngineShape
from charonia.scheduler.config import SchedulerConfig

FILE = MachineFile(
    origin=MachineOrigin(how="by hand"),
    machine=SimulatedMachine(weights=10e-3, token=0.2e-3, head=0.1e-3, rest=1e-3),
    engine=EngineShape(scheduler=SchedulerConfig(max_num_seqs=16, max_model_len=1024), blocks=512),
    block_bytes=1000,
)
LOAD = ("--rate", "20", "--duration", "3", "--prompt", "50-200", "--new", "20")


@pytest.fixture
def machine(tmp_path: Path) -> str:
    write_machine_file(tmp_path / "machine.json", FILE)
    return str(tmp_path / "machine.json")


def run(capsys: pytest.CaptureFixture[str], machine: str, *arguments: str) -> tuple[int, str]:
    status = app(["simulate", "--machine", machine, *arguments], result_action="return_value")
    seen = capsys.readouterr()
    return int(status), seen.out or seen.err


def report(capsys: pytest.CaptureFixture[str], machine: str, *arguments: str) -> SimulationReport:
    _, said = run(capsys, machine, *LOAD, "--json", *arguments)
    return msgspec.json.decode(said, type=SimulationReport, dec_hook=lambda kind, value: kind(value))


def test_a_load_is_told_of_as_a_table_and_as_an_object(machine: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = run(capsys, machine, *LOAD, "--tenant", "[/a]=1", "--tenant", "b=2,4")
    assert status == 0
    for word in ("TTFT", "ITL", "e2e", "cache in use", "requests, [/a]", "preemptions", "times as fast", "by hand"):
        assert word in said
    [fleet] = report(capsys, machine, "--tenant", "a=1", "--tenant", "b=2,4").fleets
    assert fleet.all.requests == sum(value.requests for value in fleet.tenants.values())
    assert set(fleet.tenants) == {"a", "b"}
    assert fleet.replicas == 1


def test_the_fewest_replicas_that_keep_an_objective_are_the_answer(
    machine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = report(capsys, machine, "--slo", "ttft_p95=60ms", "--plot", str(tmp_path / "slo.svg"))
    assert found.replicas in [fleet.replicas for fleet in found.fleets]
    alone = report(capsys, machine, "--replicas", str(found.replicas)).fleets[0]
    fewer = report(capsys, machine, "--replicas", str((found.replicas or 0) - 1)).fleets[0]
    assert alone.all.ttft is not None
    assert fewer.all.ttft is not None
    assert alone.all.ttft.p95 <= 0.06 < fewer.all.ttft.p95
    picture = ElementTree.fromstring((tmp_path / "slo.svg").read_text())
    texts = [text.text or "" for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert any("cache in use" in text for text in texts), "the terminal's figures are below it"
    lines = list(picture.iter("{http://www.w3.org/2000/svg}polyline"))
    ends = [line.attrib["points"].split()[-1].split(",")[0] for line in lines[:2]]
    assert len({*ends}) == 1, "curves go on to the last fleet"
    assert len(list(picture.iter("{http://www.w3.org/2000/svg}polyline"))) == 3


def test_what_no_fleet_keeps_ends_with_status_one(machine: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = run(capsys, machine, *LOAD, "--slo", "itl_p50=1ms", "--most-replicas", "8")
    assert status == 1
    assert "not kept by 8 replicas" in said


def test_slower_steps_are_slower_and_a_page_has_the_tables(
    machine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [plain] = report(capsys, machine).fleets
    [slower] = report(capsys, machine, "--slower", "1.5", "--plot", str(tmp_path / "page.html")).fleets
    assert plain.all.itl is not None
    assert slower.all.itl is not None
    assert slower.all.itl.p50 > 1.2 * plain.all.itl.p50
    assert "cache in use" in (tmp_path / "page.html").read_text()


def test_options_change_the_engine_that_was_calibrated() -> None:
    options = SimulatedEngineOptions(max_num_seqs=4, target_itl_ms=80, kv_cache_bytes=64_500, max_queued_requests=9)
    shape = resolve_engine(FILE, options)
    assert (shape.scheduler.max_num_seqs, shape.scheduler.target_itl_ms) == (4, 80)
    assert (shape.blocks, shape.max_queued_requests, shape.prefix_caching) == (64, 9, True)
    assert resolve_engine(FILE, SimulatedEngineOptions()) == FILE.engine
    assert resolve_engine(FILE, SimulatedEngineOptions(kv_cache_blocks=7)).blocks == 7


def test_engines_that_cannot_be_are_refused() -> None:
    for wrong, says in (
        (SimulatedEngineOptions(max_num_seqs=600), "max_num_seqs 600 must be"),
        (SimulatedEngineOptions(kv_cache_bytes=999), "no room for a block of 1000 bytes"),
        (SimulatedEngineOptions(kv_cache_bytes=9000, kv_cache_blocks=9), "give one of"),
    ):
        with pytest.raises(InvalidArgument, match=says):
            resolve_engine(FILE, wrong)
    with pytest.raises(InvalidArgument, match="give --kv-cache-blocks"):
        resolve_engine(replace(FILE, block_bytes=0), SimulatedEngineOptions(kv_cache_bytes=9000))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--slo", "fast"), "'fast' is no objective"),
        (("--plot", "x.png"), "--plot draws .svg or .html, got x.png"),
        (("--plot", "/no/where/x.svg"), "cannot write /no/where/x.svg: there is no directory /no/where"),
        (("--kv-cache-blocks", "1", "--plot", "{tmp}/x.svg"), "no request was served: there is nothing to draw"),
        (("--slo", "ttft_p95=1s", "--replicas", "2"), "leave --replicas out"),
        (("--most-replicas", "2"), "--most-replicas is of --slo"),
    ],
)
def test_what_means_nothing_is_refused_in_a_line(
    machine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    given = [argument.format(tmp=tmp_path) for argument in arguments]
    status = app(["simulate", "--machine", machine, *LOAD, *given], result_action="return_value")
    assert status == 1
    assert says in capsys.readouterr().err


def test_a_file_that_is_no_machine_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = run(capsys, str(tmp_path / "none.json"), *LOAD)
    assert (status, said.startswith("charonia: cannot read ")) == (1, True)
