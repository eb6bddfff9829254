"""Figures of simulated loads, objectives, and the smallest fleet."""

from itertools import pairwise

import pytest

from charonia.core.errors import InvalidArgument
from charonia.extras.optimizer.fleet_figures import (
    FleetFigures,
    Objective,
    Spread,
    compute_fleet_figures,
    find_fleet,
    keeps,
    parse_slo,
)
from charonia.extras.optimizer.fleet_load import make_requests
from charonia.extras.optimizer.options import FleetLoad
from charonia.extras.optimizer.simulated_machine import SimulatedMachine
from charonia.extras.optimizer.simulated_request import SimulatedRequest
from charonia.extras.optimizer.simulation import EngineShape, Simulation
from charonia.scheduler.config import SchedulerConfig

FAST = SimulatedMachine(weights=10e-3, token=0.2e-3, head=0.1e-3, rest=1e-3)
ENGINE = EngineShape(scheduler=SchedulerConfig(max_num_seqs=16, max_model_len=1024), blocks=512)


def test_percentiles_interpolate_between_neighbours() -> None:
    spread = Spread.of([float(value) for value in range(101)])
    assert spread == Spread(count=101, mean=50.0, p50=50.0, p90=90.0, p95=95.0, p99=99.0, max=100.0)
    two = Spread.of([1.0, 2.0])
    assert two is not None
    assert (two.p50, two.p90) == (1.5, pytest.approx(1.9))
    assert Spread.of([]) is None


def test_figures_are_those_of_a_run_by_hand() -> None:
    """Two tokens each: a step for the prompt, and one to decode."""
    machine = SimulatedMachine(weights=0.0, token=1e-3, head=0.0, decode_context=0.0, prompt_context=0.0, rest=0.0)
    simulation = Simulation(machine, ENGINE)
    results = simulation.run([SimulatedRequest(1.0, 100, 2, tenant="a"), SimulatedRequest(2.0, 2000, 2, tenant="b")])
    seen = compute_fleet_figures(simulation, results)
    assert seen.all.ttft == Spread(1, *[pytest.approx(0.1)] * 6)
    assert seen.all.itl == Spread(1, *[pytest.approx(0.001)] * 6)
    assert seen.all.e2e == Spread(1, *[pytest.approx(0.101)] * 6)
    assert (seen.all.requests, seen.all.prompt_tokens, seen.all.output_tokens) == (2, 100, 2)
    assert seen.all.rejected == {"tokens exceed the model's 1024": 1}
    assert {name: each.output_tokens for name, each in seen.tenants.items()} == {"a": 2, "b": 0}
    assert seen.tenants["b"].ttft is None
    assert seen.cache_most == pytest.approx(7 / 512)


def test_an_objective_is_read_with_its_unit() -> None:
    assert parse_slo("ttft_p95=1s, itl_p99=100ms,rejected=1%") == [
        Objective("ttft", "p95", 1.0),
        Objective("itl", "p99", pytest.approx(0.1)),
        Objective("rejected", "", 0.01),
    ]
    assert parse_slo("e2e_mean=2m") == [Objective("e2e", "mean", 120.0), Objective("rejected", "", 0.0)]


@pytest.mark.parametrize("text", ["", "ttft=1s", "ttft_p95=1", "ttft_p42=1s", "speed_p95=1s", "rejected=3"])
def test_what_is_no_objective_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="is no objective"):
        parse_slo(text)


def simulate(replicas: int) -> FleetFigures:
    simulation = Simulation(FAST, ENGINE, replicas)
    requests = make_requests(FleetLoad(rate=60, duration=3, prompt="100-300", new="30"), 1024)
    return compute_fleet_figures(simulation, simulation.run(requests))


def test_the_smallest_fleet_that_keeps_an_objective_is_found() -> None:
    slo = parse_slo("ttft_p95=200ms")
    tried = sorted(find_fleet(simulate, slo, 64), key=lambda each: each.replicas)
    kept = [keeps(each, slo) for each in tried]
    first = kept.index(True)
    assert first > 0, "one replica would do: the load says nothing"
    assert all(kept[first:])
    assert tried[first].replicas - tried[first - 1].replicas == 1
    assert all(few.replicas < many.replicas for few, many in pairwise(tried))


def test_an_objective_that_no_fleet_keeps_ends_at_the_most() -> None:
    slo = parse_slo("ttft_p50=1ms")
    tried = list(find_fleet(simulate, slo, 3))
    assert [each.replicas for each in tried] == [1, 2, 3]
    assert not any(keeps(each, slo) for each in tried)
