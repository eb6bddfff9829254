"""Who gets blocks, who gives them up, and when they come back."""

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from charonia.kvcache.layer_groups import ONE_GROUP, LayerGroups
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.packed_step import PackedStep
from charonia.scheduler.plan import NO_ROWS, StepWork
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceSpec

from ..fuzz.scheduler_trial import SchedulerTrial, SchedulerWorld


def trial(
    blocks: int,
    *,
    admission: Literal["optimistic", "no_evict"] = "optimistic",
    ahead: int = 0,
    budget: int = 32,
    host_blocks: int = 0,
    groups: LayerGroups = ONE_GROUP,
    prefix_caching: bool = True,
) -> SchedulerTrial:
    config = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=budget, max_model_len=200, ahead=ahead, admission=admission
    )
    world = SchedulerWorld(blocks=blocks, block_size=4, live=100, host_blocks=host_blocks, scheduler=config)
    return SchedulerTrial(replace(world, groups=groups, prefix_caching=prefix_caching))


def turn(trial: SchedulerTrial) -> None:
    """Fill the pipeline, take one result."""
    while trial.schedule() is not None:
        pass
    trial.apply()


def first_closed(trial: SchedulerTrial) -> list[int]:
    """Run until the executor is told of rows that left; which ones."""
    while True:
        while (plan := trial.schedule()) is not None:
            if len(plan.closed):
                rows: list[int] = plan.closed.tolist()
                return rows
        trial.apply()


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_the_youngest_of_the_lowest_class_is_preempted_alone_and_comes_back(ahead: int) -> None:
    """Rows are given in the order of admission: the urgent sequence has 0, the old one 1, the young one 2."""
    one = trial(blocks=9, ahead=ahead)
    one.arrive(family=0, prompt=4, new=20, priority=1)
    one.arrive(family=1, prompt=4, new=20, priority=0)
    one.arrive(family=2, prompt=4, new=20, priority=1)
    assert first_closed(one) == [2]
    assert len(one.expected) == 3, "nobody has ended"
    assert (one.scheduler.running, one.scheduler.waiting) == (2, 1)
    one.drain()


def test_a_preempted_sequence_finds_what_is_left_of_it_in_the_cache() -> None:
    one = trial(blocks=10, budget=64)
    one.arrive(family=0, prompt=20, new=12)
    one.arrive(family=1, prompt=16, new=8)
    computed = 0
    while one.scheduler.has_work:
        plan = one.schedule()
        assert plan is not None
        computed += plan.tokens
        one.apply()
    recomputed = computed - (20 + 11) - (16 + 7)
    assert recomputed == 8, "of its four blocks two were taken meanwhile, the last ones first"
    assert one.scheduler.totals.recomputed_tokens == recomputed


def test_no_evict_admits_only_what_fits_to_its_last_token() -> None:
    one = trial(blocks=9, admission="no_evict")
    for family in range(3):
        one.arrive(family=family, prompt=4, new=13)
    turn(one)
    assert (one.scheduler.running, one.scheduler.waiting) == (2, 1)
    while one.scheduler.has_work:
        turn(one)
        assert one.scheduler.running + one.scheduler.waiting == len(one.expected), "nobody is preempted"


def test_what_admission_promises_is_counted_in_blocks_of_every_group() -> None:
    one = trial(blocks=18, admission="no_evict", groups=LayerGroups(full=2))
    one.arrive(family=0, prompt=4, new=12, priority=0)
    one.arrive(family=1, prompt=4, new=12, priority=0)
    one.arrive(family=2, prompt=4, new=12, priority=0)
    turn(one)
    assert (one.scheduler.running, one.scheduler.waiting) == (2, 1)
    one.drain()
    assert one.scheduler.totals.preemptions == 0


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_block_is_given_up_as_soon_as_no_token_sees_it(prefix_caching: bool) -> None:
    one = trial(blocks=16, groups=LayerGroups(full=0, sliding=1, window=7), prefix_caching=prefix_caching)
    one.arrive(family=0, prompt=8, new=150)
    while one.scheduler.has_work:
        turn(one)
        held, rows = one.cache.blocks - one.cache.free_blocks, one.scheduler._rows
        for row, table in rows.tables.items():
            assert table.slid == max(int(rows.computed[row]) + 1 - 7, 0) // 4
            assert held == len(table.blocks) - table.slid <= 3
    assert one.scheduler.totals.preemptions == 0


def test_a_small_one_does_not_overtake_who_waits_for_blocks() -> None:
    one = trial(blocks=8, admission="no_evict")
    one.arrive(family=0, prompt=4, new=17)
    turn(one)
    one.arrive(family=1, prompt=4, new=17)
    one.arrive(family=2, prompt=4, new=1)
    turn(one)
    assert (one.scheduler.running, one.scheduler.waiting) == (1, 2)


def test_simultaneous_requests_compute_a_shared_prefix_once() -> None:
    one = trial(blocks=64, budget=16)
    one.arrive(family=0, prompt=40, new=2)
    one.arrive(family=0, prompt=50, new=2)
    computed, started = 0, dict[int, int]()
    while one.scheduler.has_work:
        plan = one.schedule()
        assert plan is not None
        computed += plan.tokens
        updates = one.apply()
        assert updates is not None
        started.update(updates.started)
    assert started == {0: 0, 1: 40}, "the second waited for the whole blocks that it shares with the first"
    assert computed == (40 + 1) + (10 + 1)


def test_whoever_waits_for_a_block_goes_on_when_its_computation_is_given_up() -> None:
    one = trial(blocks=64, budget=16)
    computing = one.arrive(family=0, prompt=40, new=2)
    one.arrive(family=0, prompt=50, new=2)
    turn(one)
    assert (one.scheduler.running, one.scheduler.waiting) == (1, 1)
    one.leave(computing)
    turn(one)
    assert (one.scheduler.running, one.scheduler.waiting) == (1, 0)
    one.drain()


def test_generated_blocks_are_found_by_a_prompt_that_repeats_them() -> None:
    one = trial(blocks=64)
    one.arrive(family=0, prompt=6, new=10)
    one.drain()
    one.arrive(family=0, prompt=17, new=1)
    one.schedule()
    updates = one.apply()
    assert updates is not None
    assert updates.started == [(1, 12)], "15 tokens were computed: three full blocks"


def test_equal_prompts_of_other_salt_share_nothing() -> None:
    cache = KVCacheManager(32, 4)
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64), cache)
    prompt = np.arange(9, dtype=np.int32)
    for key, salt in enumerate("ab"):
        hashes = cache.digest(prompt, ("", "", salt))
        scheduler.add(SequenceSpec(key=key, prompt=prompt, max_tokens=1, hashes=hashes, salt=salt))
    plan = scheduler.schedule()
    assert plan is not None
    assert [new.computed for new in plan.new] == [0, 0]
    assert plan.tokens == 18


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_an_aborted_sequence_is_free_within_ahead_plus_one_steps(ahead: int) -> None:
    one = trial(blocks=16, ahead=ahead)
    key = one.arrive(family=0, prompt=4, new=40)
    for _ in range(5):
        turn(one)
    while one.schedule() is not None:
        pass
    one.leave(key)
    steps = 0
    while one.cache.free_blocks < 16:
        one.apply()
        steps += 1
    assert steps <= ahead + 1
    assert not one.scheduler.has_work


def test_nothing_is_heard_of_an_aborted_sequence() -> None:
    one = trial(blocks=16)
    key = one.arrive(family=0, prompt=4, new=40)
    one.schedule()
    one.leave(key)
    updates = one.apply()
    assert updates is not None
    assert not any(updates)


def test_a_waiting_sequence_is_aborted_at_once() -> None:
    one = trial(blocks=16)
    one.leave(one.arrive(family=0, prompt=4, new=40))
    assert not one.scheduler.has_work
    one.scheduler.abort([0, 12345])


def test_every_kind_of_end_returns_every_block() -> None:
    one = trial(blocks=16, ahead=1)
    one.arrive(family=0, prompt=5, new=3)
    one.arrive(family=1, prompt=5, new=9, stop=4)
    aborted = one.arrive(family=2, prompt=5, new=9)
    for _ in range(3):
        turn(one)
    one.leave(aborted)
    one.drain()


@pytest.mark.parametrize("ahead", [0, 1])
def test_evicted_blocks_come_back_from_the_host(ahead: int) -> None:
    """Two long prompts take turns in a cache that has room for one of them."""
    one = trial(blocks=12, ahead=ahead, host_blocks=16)
    computed = []
    for family in (0, 1, 0, 1):
        one.arrive(family=family, prompt=40, new=4)
        plans = 0
        while one.scheduler.has_work:
            while (plan := one.schedule()) is not None:
                plans += plan.tokens
            one.apply()
        computed.append(plans)
    totals = one.scheduler.totals
    assert totals.prefix_hits == 2 * 36
    assert totals.restored >= 2 * 28
    assert computed[2:] == [each - 36 for each in computed[:2]]


def test_a_row_that_a_step_leaves_out_keeps_the_blocks_that_it_got() -> None:
    """As one whose drafts find no room: no later plan would have these blocks."""
    one = trial(blocks=16)
    one.arrive(family=0, prompt=4, new=8)
    one.arrive(family=1, prompt=4, new=8)
    turn(one)
    rows = one.scheduler._rows
    assert rows.extend(0, 8)
    assert rows.extend(1, 8)
    counts = np.array([0, 1, 0, 0])
    plan, _ = PackedStep(rows, 1, StepWork(1, 4), counts, {}).write((), NO_ROWS)
    assert plan.rows.tolist() == [1]
    assert plan.appended.tolist() == [[row, rows.tables[row].blocks[-1]] for row in (0, 1)]
    assert rows.appended == []
    assert rows.extend(0, 12)
    rows.remove(0)
    assert rows.appended == [], "it has left"
