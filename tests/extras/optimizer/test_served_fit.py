"""What a server adds to steps, and a machine that only its client saw. The client sees a simulation."""

import pytest
from msgspec.structs import replace

from charonia.extras.optimizer.served_fit import (
    ServedDecode,
    ServedLoad,
    ServedPrompt,
    ServedTimes,
    add_serving,
    fit_served_machine,
)
from charonia.extras.optimizer.simulated_machine import SimulatedMachine, StepLoad
from charonia.extras.optimizer.simulated_request import SimulatedRequest
from charonia.extras.optimizer.simulation import EngineShape, Simulation
from charonia.scheduler.config import SchedulerConfig

ENGINE = EngineShape(scheduler=SchedulerConfig(max_num_seqs=32, max_model_len=2048), blocks=4096)
ALONE = SimulatedMachine(weights=10e-3, token=0.4e-3, head=0.1e-3, rest=1e-3)
SERVED = replace(ALONE, between=0.4e-3, between_token=30e-6, arrival=3e-3, arrival_token=4e-6)


def seen(machine: SimulatedMachine) -> ServedTimes:
    """What a client of that machine sees."""
    decodes, prompts = [], []
    for rows, context in ((1, 16), (4, 16), (8, 16), (16, 16), (32, 16), (4, 512)):
        results = Simulation(machine, ENGINE).run([SimulatedRequest(0.0, context, 48) for _ in range(rows)])
        begin, end = max(each.tokens[0] for each in results), min(each.tokens[-1] for each in results)
        gaps = [gap for each in results for gap in each.gaps(begin, end)]
        decodes.append(ServedDecode(rows, context + 24, gaps))
    for tokens in (16, 128, 512, 1500):
        [result] = Simulation(machine, ENGINE).run([SimulatedRequest(0.0, tokens, 1)])
        prompts.append(ServedPrompt(tokens, [result.ttft] * 3))
    return ServedTimes(decodes, prompts)


def waits(machine: SimulatedMachine, overhead: float = 0.0) -> list[ServedLoad]:
    """What a server on that machine tells, which counts so much more to each step."""
    found = []
    together = [[SimulatedRequest(0.0, 16, 48)] * rows for rows in (1, 4, 8, 16, 32)]
    alone = [[SimulatedRequest(100.0 * at, tokens, 2) for at in range(3)] for tokens in (16, 128, 512, 1500)]
    for requests, begun in (*((each, 1) for each in together), *((each, 3) for each in alone)):
        simulation = Simulation(machine, ENGINE)
        ends = [each.tokens[-1] - each.arrival.at for each in simulation.run(requests)]
        [replica] = simulation.replicas
        waited = (sum(ends) if begun > 1 else max(ends)) - replica.busy - overhead * replica.steps
        tokens = sum(request.new - 1 for request in requests)
        found.append(ServedLoad(begun, begun * requests[0].prompt, replica.steps, tokens, waited))
    return found


@pytest.mark.parametrize(("slower", "overhead"), [(1.0, 0.0), (1.4, 0.3e-3)])
def test_what_a_server_adds_is_found_again_however_long_its_steps_take(slower: float, overhead: float) -> None:
    found = add_serving(ALONE, waits(SERVED.slowed(slower), overhead), overhead)
    for rows in (1, 8, 32):
        assert found.seconds_between(rows) == pytest.approx(SERVED.seconds_between(rows), rel=0.05)
    for tokens in (16, 512, 1500):
        assert found.arrival_seconds(tokens) == pytest.approx(SERVED.arrival_seconds(tokens), rel=0.05)
    assert replace(found, between=0.0, between_token=0.0, arrival=0.0, arrival_token=0.0) == ALONE


def test_a_server_that_adds_nothing_adds_nothing() -> None:
    found = add_serving(replace(ALONE, between=1.0), waits(ALONE), 0.0)
    assert max(found.between, found.between_token, found.arrival, found.arrival_token) == pytest.approx(0, abs=1e-5)


def test_a_machine_is_found_from_what_a_client_sees() -> None:
    found = fit_served_machine(seen(SERVED)).machine
    for rows in (1, 4, 16, 32):
        load = StepLoad.of_decoding(rows, 64)
        assert found.seconds(load) == pytest.approx(SERVED.seconds(load) + SERVED.seconds_between(rows), rel=0.05)
    [near] = Simulation(found, ENGINE).run([SimulatedRequest(0.0, 900, 1)])
    [true] = Simulation(SERVED, ENGINE).run([SimulatedRequest(0.0, 900, 1)])
    assert near.ttft == pytest.approx(true.ttft, rel=0.1)
