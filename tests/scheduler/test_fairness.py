"""Who goes first among tenants: those served least, by weight, inside a class, and nobody waits forever."""

from collections import Counter
from statistics import median

import numpy as np
import pytest

from charonia.engine.worker.fake_executor import FakeExecutor
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import Sequence, SequenceSpec
from charonia.scheduler.tenants.fairness import OUTPUT_WEIGHT, Fairness
from charonia.scheduler.waiting_queue import RANK_ONLY_INTERVAL

from ..fuzz.scheduler_trial import SchedulerTrial, SchedulerWorld


def trial(*, rows: int = 1, budget: int = 8, ageing: int = 100) -> SchedulerTrial:
    config = SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=budget, max_model_len=200, ageing_steps=ageing)
    return SchedulerTrial(SchedulerWorld(blocks=64, live=1000, tenants=2, prefix_caching=False, scheduler=config))


def arrivals(trial: SchedulerTrial, tenant: int, count: int, priority: int = 0) -> list[int]:
    return [trial.arrive(family=0, prompt=4, new=4, tenant=tenant, priority=priority) for _ in range(count)]


def head(rank: int = 0) -> Sequence:
    """A tenant's first waiting sequence."""
    request = SequenceSpec(key=rank, prompt=np.zeros(1, np.int32), max_tokens=1)
    return Sequence(request, arrival_number=rank, seniority=0, rank=rank, hashes=[])


def test_tenants_of_equal_weight_take_turns() -> None:
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=8, max_model_len=200)
    scheduler = Fleet(config)
    for key in range(20):
        scheduler.add(key, "many")
    for key in range(20, 26):
        scheduler.add(key, "few")
    owners = ["few" if key >= 20 else "many" for key in scheduler.run()]
    assert Counter(owners[:12]) == {"many": 6, "few": 6}


def test_weights_divide_the_service() -> None:
    one = trial()
    light, heavy = arrivals(one, 0, 40), arrivals(one, 1, 40)
    first = one.drain()[:36]
    assert len(set(first) & set(heavy)) == pytest.approx(24, abs=2), "the second tenant weighs twice the first"
    assert [key for key in first if key in light] == light[: len(set(first) & set(light))], "each in its own order"


def test_an_urgent_class_goes_before_any_service() -> None:
    one = trial()
    patient = arrivals(one, 1, 3, priority=1)
    urgent = arrivals(one, 0, 6)
    assert one.drain()[:6] == urgent
    assert patient


def test_time_that_was_not_used_is_no_credit() -> None:
    fairness = Fairness(ageing_steps=10, credit=0)
    busy, idle = fairness.slot_of("busy", 1.0), fairness.slot_of("idle", 1.0)
    fairness.set_head(busy, head())
    fairness.charge_prompt(busy, 500)
    fairness.sequence_arrived(idle)
    assert fairness.service[idle] == 500
    fairness.set_head(busy, None)
    late = fairness.slot_of("late", 1.0)
    fairness.sequence_arrived(late)
    assert fairness.service[late] == 500, "as much as the last one who had somebody in line"


def test_a_little_credit_may_be_saved() -> None:
    fairness = Fairness(ageing_steps=10, credit=64)
    busy, idle = fairness.slot_of("busy", 1.0), fairness.slot_of("idle", 1.0)
    fairness.set_head(busy, head())
    fairness.sequence_arrived(idle)
    fairness.charge_prompt(busy, 50)
    fairness.sequence_arrived(idle)
    assert fairness.service[idle] == 0
    fairness.charge_prompt(busy, 50)
    fairness.sequence_arrived(idle)
    assert fairness.service[idle] == 36
    for _ in range(3):
        fairness.sequence_ended(idle)
    fairness.sequence_arrived(idle)
    assert fairness.service[idle] == 100, "who was idle has saved nothing"


def test_a_tenant_in_line_is_not_lifted() -> None:
    fairness = Fairness(ageing_steps=10, credit=0)
    one, two = fairness.slot_of("one", 1.0), fairness.slot_of("two", 1.0)
    fairness.set_head(one, head())
    fairness.charge_prompt(two, 500)
    fairness.set_head(two, head())
    fairness.sequence_arrived(one)
    assert fairness.service[one] == 0


def test_prompts_and_outputs_are_charged_by_weight() -> None:
    fairness = Fairness(ageing_steps=10, credit=0)
    one, two = fairness.slot_of("one", 1.0), fairness.slot_of("two", 4.0)
    fairness.charge_prompt(two, 100)
    fairness.charge_outputs([one, two, one], [1, 2, 3])
    assert fairness.service[[one, two]].tolist() == [OUTPUT_WEIGHT * 4, 25 + OUTPUT_WEIGHT * 2 / 4]


def test_more_tenants_than_slots() -> None:
    fairness = Fairness(ageing_steps=10, credit=0)
    slots = [fairness.slot_of(f"tenant {number}", 1.0) for number in range(100)]
    for slot in slots:
        fairness.set_head(slot, head(slot))
        fairness.charge_prompt(slot, 1000 - slot)
    assert fairness.next_tenants(0, by_rank=False) == [99]
    assert fairness.next_tenants(0, by_rank=True) == [0]


def test_a_half_computed_prompt_gives_way_to_who_was_served_less() -> None:
    one = trial(rows=2, budget=8)
    one.arrive(family=0, prompt=1, new=1, tenant=1)
    one.drain()
    one.arrive(family=0, prompt=40, new=1, tenant=0)
    one.schedule()
    one.apply()
    other = one.arrive(family=1, prompt=40, new=1, tenant=1)
    plan = one.schedule()
    assert plan is not None
    assert plan.counts.tolist() == [8], "the whole step is the newcomer's, long as its prompt is"
    assert plan.new[0].row == plan.rows[0]
    assert other in one.expected


def test_no_crowd_of_tenants_keeps_anybody_waiting_forever() -> None:
    """Each step a tenant nobody has seen wants the only row; the first one has been served a lot."""
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=8, max_model_len=200)
    fleet = Fleet(config)
    fleet.add(0, "old")
    for _ in range(6):
        fleet.step()
    fleet.add(1, "old")
    key = 2
    while 1 not in fleet.started:
        fleet.add(key, f"new {key}")
        fleet.step()
        key += 1
        assert key < 200
    assert list(fleet.started).index(1) <= RANK_ONLY_INTERVAL + 1


# One floods, the other does not


class Fleet:
    """A scheduler and the executor that counts, without any checks; `started` and `first` in steps."""

    def __init__(self, config: SchedulerConfig, blocks: int = 4096) -> None:
        cache = KVCacheManager(blocks, 16, prefix_caching=False)
        self.scheduler = Scheduler(config, cache)
        self._executor = FakeExecutor(block_size=16, threaded=False)
        self._executor.allocate(blocks)
        self.now = 0
        self.ended = 0
        self.arrived: dict[int, int] = {}
        self.started: dict[int, int] = {}
        self.first: dict[int, int] = {}

    def add(self, key: int, tenant: str, prompt: int = 4, new: int = 4) -> None:
        tokens = np.zeros(prompt, np.int32)
        self.arrived[key] = self.now
        self.scheduler.add(SequenceSpec(key=key, prompt=tokens, max_tokens=new, tenant=tenant))

    def step(self) -> None:
        self.now += 1
        plan = self.scheduler.schedule()
        if plan is None:
            return
        updates = self.scheduler.apply(self._executor.execute(plan).result())
        self.ended += len(updates.finished)
        self.started |= {key: self.now for key, _ in updates.started}
        for key in updates.keys:
            self.first.setdefault(key, self.now)

    def run(self) -> list[int]:
        while self.scheduler.has_work:
            self.step()
        return list(self.started)


BUSY = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=64, max_model_len=200)
PROMPT, NEW, STEPS = 48, 24, 1000
LONGEST_LINE = 100
"""Of the flood: what is more would be refused at the door."""


def saturation() -> float:
    """Requests a step that are served when somebody always waits."""
    fleet = Fleet(BUSY)
    for key in range(1000):
        fleet.add(key, "flood", PROMPT, NEW)
    for _ in range(1000):
        fleet.step()
    return fleet.ended / fleet.now


def arriving(rate: float, seed: int, tenant: str) -> list[tuple[int, str]]:
    """At random, `rate` a step: (step, tenant)."""
    times = np.random.default_rng(seed).exponential(1 / rate, int(2 * rate * STEPS)).cumsum()
    return [(step, tenant) for step in times[times < STEPS].astype(int).tolist()]


def waits_beside(other_rate: float, own_rate: float, seed: int) -> list[int]:
    """Steps from arrival to first token of each of a tenant's requests, beside another tenant's."""
    fleet, mine = Fleet(BUSY), list[int]()
    due = sorted(arriving(own_rate, seed, "own") + arriving(other_rate, seed + 1, "other"))
    for key, (step, tenant) in enumerate(due):
        while fleet.now < step:
            fleet.step()
        if tenant == "own" or fleet.scheduler.waiting < LONGEST_LINE:
            fleet.add(key, tenant, PROMPT, NEW)
            mine += [key] if tenant == "own" else []
    return [fleet.first.get(key, fleet.now) - fleet.arrived[key] for key in mine]


def test_a_flood_hardly_delays_the_other_tenant() -> None:
    rate = saturation()
    beside_an_equal, beside_a_flood = (waits_beside(other, rate / 2, seed=11) for other in (rate / 2, 10 * rate))
    assert median(beside_a_flood) <= 1.5 * median(beside_an_equal), (beside_a_flood, beside_an_equal)
