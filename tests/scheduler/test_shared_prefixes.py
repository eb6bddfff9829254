"""Whoever waits for a block that another computes is no later than if it computed the block itself."""

import sys
from collections.abc import Callable
from dataclasses import replace
from random import Random
from types import FrameType
from typing import Any

import msgspec
import pytest

from charonia.scheduler.config import SchedulerConfig

from ..fuzz.scheduler_trial import SchedulerTrial, SchedulerWorld

CONFIG = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=32, max_model_len=200, ageing_steps=100)
WORLD = SchedulerWorld(blocks=800, block_size=4, live=1000, adapters=300, scheduler=CONFIG)


def turn(trial: SchedulerTrial) -> None:
    trial.schedule()
    trial.apply()


def load(trial: SchedulerTrial, prompt: int) -> None:
    """Another urgent sequence, which shares nothing with any."""
    trial.arrive(family=1, prompt=prompt, new=1, adapter=trial.plans + 1)


@pytest.mark.parametrize("snapshots", [None, 8], ids=["blocks", "states"])
def test_an_urgent_sequence_does_not_wait_for_what_finds_no_turn(snapshots: int | None) -> None:
    """A background one has begun with the prefix, and urgent ones leave no tokens for it."""
    trial = SchedulerTrial(replace(WORLD, snapshots=snapshots))
    background = trial.arrive(family=0, prompt=180, new=1, priority=5)
    turn(trial)
    load(trial, 60)
    urgent = trial.arrive(family=0, prompt=100, new=1)
    for _ in range(20):
        load(trial, 40)
        turn(trial)
    assert urgent not in trial.expected
    assert background in trial.expected
    trial.drain()


def test_those_of_a_class_compute_a_prefix_once() -> None:
    trial = SchedulerTrial(WORLD)
    first = trial.arrive(family=0, prompt=160, new=1)
    turn(trial)
    later = [trial.arrive(family=0, prompt=161, new=1), trial.arrive(family=0, prompt=80, new=1, priority=1)]
    turn(trial)
    assert trial.scheduler.waiting == 2
    plans = 0
    while trial.scheduler.has_work:
        plan = trial.schedule()
        assert plan is not None
        plans += plan.tokens
        trial.apply()
    assert plans == 160 - 64 + 1 + 4
    assert not {first, *later} & trial.expected.keys()


@pytest.mark.parametrize("seed", [3, 7, 10])
def test_sharing_makes_nobody_later(seed: int) -> None:
    """The same load twice: in one of them the last to arrive shares its prefix with another, which may be less
    urgent, longer, or served less."""
    started: list[int] = []
    for family in (0, 3):
        random = Random(seed)
        trial = SchedulerTrial(WORLD, seed)
        for _ in range(random.randint(1, 4)):
            trial.arrive(family=0, prompt=random.randint(60, 190), new=1, priority=random.choice((0, 1, 6)))
        prompt = random.randint(16, 32)
        for _ in range(random.randint(0, 6)):
            turn(trial)
        asked = trial.plans
        probe = trial.arrive(family=family, prompt=random.randint(20, 190), new=1, priority=random.choice((0, 0, 1)))
        while probe in trial.expected:
            if trial.plans < 40:
                load(trial, prompt + random.randint(0, 10))
            turn(trial)
        started.append(trial.plans - asked)
    shared, alone = started
    assert shared <= alone, f"{shared} steps, and {alone} by itself"


def lines_of(call: Callable[[], object]) -> int:
    """How many lines of Python it runs."""
    lines = 0

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines


def test_waiting_for_a_prefix_costs_nothing_for_rows_that_decode() -> None:
    """Many wait for a prefix that one row computes: that takes no more work beside many other rows than beside few."""
    waiting, few, many = 40, 4, 44
    config = msgspec.structs.replace(CONFIG, max_num_seqs=many + 2, max_num_batched_tokens=many + 160)
    lines: list[int] = []
    for decoding in (few, many):
        trial = SchedulerTrial(replace(WORLD, scheduler=config))
        for adapter in range(1, decoding + 1):
            trial.arrive(family=0, prompt=8, new=40, adapter=adapter)
        while trial.scheduler.waiting:
            turn(trial)
        turn(trial)
        for _ in range(1 + waiting):
            trial.arrive(family=0, prompt=100, new=1)
        lines.append(lines_of(trial.scheduler.schedule))
        assert trial.scheduler.waiting == waiting
    assert lines[1] - lines[0] < waiting * (many - few)
