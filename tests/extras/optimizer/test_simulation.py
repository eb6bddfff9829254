"""The simulation: real scheduler, cache, admission and routing, on a clock that nobody waits for."""

from itertools import pairwise
from math import inf
from random import Random

import pytest
from msgspec.structs import replace

from charonia.engine.core.messages import AddRequest, FromCore, RequestUpdates, Shutdown
from charonia.engine.core.step_loop import EngineCore
from charonia.engine.core.warm_up import warm_up
from charonia.engine.worker.executor import StepFuture
from charonia.engine.worker.fake_executor import FakeExecutor
from charonia.extras.optimizer.simulated_machine import SimulatedMachine, StepSpread
from charonia.extras.optimizer.simulated_request import SimulatedRequest, SimulatedResult
from charonia.extras.optimizer.simulation import EngineShape, Simulation
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.plan import MaskSource, StepPlan
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceSpec

MACHINE = SimulatedMachine(weights=10e-3, token=0.2e-3, head=0.1e-3, rest=1e-3)
ENGINE = EngineShape(scheduler=SchedulerConfig(max_num_seqs=8, max_model_len=1024), blocks=512)


def run(
    requests: list[SimulatedRequest], engine: EngineShape = ENGINE, replicas: int = 1
) -> tuple[Simulation, list[SimulatedResult]]:
    simulation = Simulation(MACHINE, engine, replicas)
    results = simulation.run(requests)
    simulation.check_integrity()
    assert all(len(result.tokens) == result.arrival.new or result.refused for result in results)
    return simulation, results


def test_every_request_gets_its_tokens_in_order_and_time_passes() -> None:
    _, results = run([SimulatedRequest(0.1 * at, 50 + 13 * at % 200, 5 + at % 7) for at in range(60)])
    for result in results:
        assert result.tokens == sorted(set(result.tokens))
        assert result.ttft > 0


def test_replicas_share_the_load_and_first_tokens_come_sooner() -> None:
    requests = [SimulatedRequest(0.02 * at, 300, 40) for at in range(120)]
    one, few = run(requests)
    four, many = run(requests, replicas=4)
    assert sum(each.ttft for each in many) < sum(each.ttft for each in few) / 3
    steps = [replica.steps for replica in four.replicas]
    assert min(steps) > max(steps) / 2
    assert four.now < one.now


def test_a_shared_beginning_is_computed_once_and_goes_to_the_replica_that_has_it() -> None:
    requests = [SimulatedRequest(0.5 * at, 400, 4, shared=320, prefix=at % 2) for at in range(20)]
    simulation, results = run(requests, replicas=2)
    assert [result.cached for result in results[:2]] == [0, 0]
    assert {result.cached for result in results[2:]} == {320}
    assert {replica.scheduler.totals.prefix_hits for replica in simulation.replicas} == {9 * 320}
    _, apart = run([each._replace(tenant=str(at)) for at, each in enumerate(requests)])
    assert {each.cached for each in apart} == {0}, "tenants share nothing"


def test_a_model_with_states_finds_a_beginning_when_one_was_kept_where_prompts_part() -> None:
    requests = [SimulatedRequest(float(at), 400, 4, shared=320) for at in range(6)]
    _, results = run(requests, replace(ENGINE, snapshots=10))
    assert [result.cached for result in results] == [0, 0, 320, 320, 320, 320]


def test_beginnings_that_the_device_has_no_room_for_are_found_in_the_hosts_memory() -> None:
    requests = [SimulatedRequest(float(at), 400, 4, shared=320, prefix=at % 4) for at in range(16)]
    small = replace(ENGINE, blocks=70, snapshots=2)
    assert {result.cached for result in run(requests, small)[1]} == {0}
    _, results = run(requests, replace(small, host_blocks=400, host_snapshots=40))
    assert [result.cached for result in results] == [0] * 8 + [320] * 8


def test_a_step_moves_the_state_of_each_sequence_once_whatever_its_tokens() -> None:
    machine = SimulatedMachine(weights=0, token=0, head=0, decode_context=0, prompt_context=0, rest=0, state=1e-3)
    steps: list[tuple[int, int, float]] = []

    def watch(plan: StepPlan, seconds: float) -> None:
        steps.append((len(plan.rows), int(plan.counts.sum()), seconds))

    Simulation(machine, ENGINE, watch=watch).run([SimulatedRequest(0.0, 40, 5) for _ in range(4)])
    assert [seconds for *_, seconds in steps] == pytest.approx([1e-3 * sequences for sequences, *_ in steps])
    assert {(4, 160), (4, 4)} <= {(sequences, tokens) for sequences, tokens, _ in steps}


def test_a_full_queue_refuses_and_what_is_too_long_never_waits() -> None:
    engine = replace(ENGINE, max_queued_requests=4)
    _, results = run([SimulatedRequest(0.0, 100, 50) for _ in range(40)], engine)
    assert [result.refused for result in results].count("max_queued_requests") == 40 - 4
    _, (short, long) = run([SimulatedRequest(0.0, 100, 5), SimulatedRequest(0.0, 1020, 5)])
    assert not short.refused
    assert long.refused == "tokens exceed the model's 1024"


def test_a_small_cache_preempts_and_all_end() -> None:
    simulation, _ = run([SimulatedRequest(0.0, 100, 300) for _ in range(8)], replace(ENGINE, blocks=90))
    assert simulation.replicas[0].scheduler.totals.preemptions > 0
    assert simulation.replicas[0].most_held == 90


def test_a_heavier_tenant_is_served_more_and_an_urgent_class_first() -> None:
    requests = [SimulatedRequest(0.0, 200, 20, tenant=name) for name in "ab" for _ in range(40)]
    _, results = run([request._replace(weight=4.0) if request.tenant == "b" else request for request in requests])
    assert mean_ttft(results, "b") < 0.7 * mean_ttft(results, "a")
    _, results = run([request._replace(priority=int(request.tenant == "a")) for request in requests])
    assert mean_ttft(results, "b") < 0.7 * mean_ttft(results, "a")


def mean_ttft(results: list[SimulatedResult], tenant: str) -> float:
    found = [result.ttft for result in results if result.arrival.tenant == tenant]
    return sum(found) / len(found)


def test_a_step_ahead_is_launched_before_the_last_one_ends() -> None:
    """So a prompt that comes meanwhile waits for one step more."""
    ahead = replace(ENGINE, scheduler=replace(ENGINE.scheduler, ahead=1))
    requests = [SimulatedRequest(0.0, 16, 100), SimulatedRequest(0.5005, 16, 2)]
    (_, (_, now)), (_, (_, later)) = run(requests), run(requests, ahead)
    assert now.ttft < later.ttft < 2 * now.ttft


def test_nothing_to_do_takes_no_time() -> None:
    simulation, results = run([])
    assert (simulation.now, simulation.busy, results) == (0.0, 0.0, [])
    assert simulation.replicas[0].next_at == inf


@pytest.mark.parametrize("spread", [(1.0,), (0.9, 1.1), (0.8, 0.9, 1.0, 1.1, 1.2)])
def test_steps_vary_as_the_quantiles_say(spread: tuple[float, ...]) -> None:
    seconds: list[float] = []
    machine = replace(MACHINE, spread=(StepSpread(1.0, spread),), decode_context=0.0)
    simulation = Simulation(
        machine, ENGINE, watch=lambda plan, each: seconds.append(each) if plan.tokens == 1 else None
    )
    simulation.run([SimulatedRequest(0.0, 16, 1000)])
    assert min(seconds) >= spread[0] * 11e-3
    assert max(seconds) <= spread[-1] * 11e-3 * 1.001
    assert sum(seconds) / len(seconds) == pytest.approx(11e-3, rel=0.01)


def test_what_lies_between_steps_delays_each_and_what_lies_before_the_engine_the_first() -> None:
    machine = replace(MACHINE, between=1e-3, between_token=2e-3, arrival=5e-3, arrival_token=1e-4)
    [plain] = Simulation(MACHINE, ENGINE).run([SimulatedRequest(1.0, 50, 3)])
    [served] = Simulation(machine, ENGINE).run([SimulatedRequest(1.0, 50, 3)])
    assert served.ttft == pytest.approx(plain.ttft + 5e-3 + 50e-4)
    for before, after in zip(plain.gaps(0, inf), served.gaps(0, inf), strict=True):
        assert after == pytest.approx(before + 3e-3)


def test_a_long_prompt_may_be_overtaken_on_its_way_into_the_engine() -> None:
    machine = replace(MACHINE, arrival_token=1e-3)
    long, short = Simulation(machine, ENGINE).run([SimulatedRequest(0.0, 500, 1), SimulatedRequest(0.1, 10, 1)])
    assert short.tokens[0] < long.tokens[0]


def turns(session: int, prompts: list[int], pause: float, **wish: float) -> list[SimulatedRequest]:
    """A conversation whose requests all are there at once, and wait for one another."""
    requests = [
        SimulatedRequest(
            0.0, prompt, 4, session=session, conversation=session, pause=pause, retained=wish.get("retained", 0.0)
        )
        for prompt in prompts
    ]
    return [*requests[:-1], requests[-1]._replace(last=True)]


def test_a_session_goes_on_after_its_answer_with_all_that_was_said() -> None:
    _, results = run(turns(1, [100, 140, 200], pause=2.0))
    assert [result.cached for result in results] == [0, 96, 128], "answers are found, too"
    for before, after in pairwise(results):
        assert after.arrival.at == before.tokens[-1] + 2.0
    _, results = run(turns(1, [2000, 140, 100], pause=2.0))
    assert [bool(result.refused) for result in results] == [True, False, False], "a refused one holds nobody up"


def test_what_a_session_retains_is_there_when_others_have_filled_the_cache() -> None:
    requests = [SimulatedRequest(0.3 * at, 400, 4) for at in range(40)]
    small = replace(ENGINE, blocks=100)
    for engine, wish, cached in (
        (small, 60.0, 0),
        (replace(small, retained_blocks=30), 0.0, 0),
        (replace(small, retained_blocks=30), 60.0, 288),
    ):
        simulation, results = run([*requests, *turns(1, [300, 320], pause=5.0, retained=wish)], engine)
        assert [result.cached for result in results if result.arrival.session] == [0, cached]
    retention = simulation.replicas[0].cache.retention
    assert retention is not None
    assert (len(retention), retention.blocks) == (1, 0), "it was released: the record of what scopes share is left"


class NotingExecutor(FakeExecutor):
    """One that keeps what it is asked to compute."""

    def __init__(self) -> None:
        super().__init__(threaded=False)
        self.asked: list[PlannedRows] = []

    def execute(self, plan: StepPlan, masks: MaskSource | None = None) -> StepFuture:
        self.asked.append(rows_of(plan))
        return super().execute(plan, masks)


PlannedRows = list[tuple[int, int, int]]


def rows_of(plan: StepPlan) -> PlannedRows:
    return list(zip(plan.rows.tolist(), plan.starts.tolist(), plan.counts.tolist(), strict=True))


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("blocks", [40, 512])
def test_the_real_engine_core_computes_the_same_steps(ahead: int, blocks: int) -> None:
    """With a pace that no time decides: shared beginnings, tenants, classes and preemptions among them."""
    random = Random(blocks + ahead)
    rule = replace(ENGINE.scheduler, target_itl_ms=0, ahead=ahead, max_num_batched_tokens=64)
    engine = replace(ENGINE, scheduler=rule, blocks=blocks)
    requests = [
        SimulatedRequest(
            0.0,
            random.randrange(1, 150),
            random.randrange(60, 150),
            tenant=random.choice("ab"),
            weight=2.0,
            priority=random.randrange(2),
            shared=random.choice((0, 64)),
        )
        for _ in range(16)
    ]
    requests = [request._replace(shared=min(request.shared, request.prompt - 1)) for request in requests]
    simulated: list[PlannedRows] = []
    simulation = Simulation(MACHINE, engine, watch=lambda plan, seconds: simulated.append(rows_of(plan)))
    simulated.clear()  # the warm-up's
    simulation.run(requests)
    assert simulated == core_steps(engine, requests)
    assert bool(simulation.replicas[0].scheduler.totals.preemptions) == (blocks == 40)


def core_steps(engine: EngineShape, requests: list[SimulatedRequest]) -> list[PlannedRows]:
    cache, executor = KVCacheManager(engine.blocks, engine.block_size), NotingExecutor()
    executor.allocate(engine.blocks)
    core = EngineCore(Scheduler(engine.scheduler, cache), cache, executor)
    warm_up(core)
    executor.asked.clear()
    left = len(requests)

    def send(message: FromCore) -> None:
        nonlocal left
        assert isinstance(message, RequestUpdates)
        left -= len(message.updates.finished)
        if not left:
            core.inbox.accept(Shutdown())

    for key, each in enumerate(requests):
        spec = SequenceSpec(
            key=key,
            prompt=each.tokens(key),
            max_tokens=each.new,
            priority=each.priority,
            tenant=each.tenant,
            weight=each.weight,
        )
        core.inbox.accept(AddRequest(spec))
    core.run(send)
    return executor.asked
