"""Any interleaving hypothesis can think of, and many that chance draws, with everything checked after each call."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from charonia.scheduler import step_packer

from ..fuzz.scheduler_trial import SchedulerTrial, SchedulerWorld
from ..proofs.scheduler import drive_randomly

DRIVERS = 20
OPERATIONS = 5_000
FEWER = 2_000
"""In the suite, which leaves 100,000 calls to the proofs."""


@pytest.mark.parametrize(
    ("seed", "least"),
    [
        *((seed, FEWER) for seed in (0, 2, 3)),
        *(pytest.param(seed, OPERATIONS, marks=pytest.mark.proof) for seed in range(DRIVERS)),
    ],
)
def test_random_interleavings(seed: int, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In random worlds of at most 64 blocks, half of them over pipelines whose few rows are shared out among the plans
    too."""
    monkeypatch.setattr(step_packer, "MIN_PIPELINE_GROUP", 1)
    random, operations = Random(seed), 0
    while operations < least:
        trial = SchedulerTrial(SchedulerWorld.drawn(random).staged(max(seed % 4, 1)), seed)
        drive_randomly(trial, random, 500)
        operations += trial.operations


@pytest.mark.one_in(7)
@pytest.mark.parametrize("seed", range(7))
def test_random_interleavings_of_a_model_with_states(seed: int) -> None:
    """Few snapshots and many, kept often and rarely, on the device and on the host; a plan that reads a state at
    another count fails. It goes on until a snapshot came back from the host."""
    random, operations, found, evicted, brought_back, resumed = Random(seed), 0, 0, 0, 0, 0
    while operations < OPERATIONS or (not brought_back and operations < 4 * OPERATIONS):
        world = SchedulerWorld.drawn(random).staged(max(seed % 4, 1)).with_states(random)
        if random.random() < 0.5:
            world = replace(world, drafts=2, draft_states=8, host_blocks=40, host_snapshots=12)
        trial = SchedulerTrial(world, seed)
        drive_randomly(trial, random, 250)
        operations += trial.operations
        found += trial.scheduler.totals.prefix_hits
        if trial.cache.states is not None:
            evicted += trial.cache.states.evicted
            brought_back += trial.cache.states.brought_back
        resumed += trial.resumed
    assert found
    assert evicted
    assert brought_back
    assert resumed


class SchedulerMachine(RuleBasedStateMachine):
    """The same calls in an order that hypothesis chooses, and shrinks when something breaks."""

    @initialize(seed=st.integers(0, 2**16), stages=st.sampled_from((1, 1, 2, 3)))
    def begin(self, seed: int, stages: int) -> None:
        self.trial = SchedulerTrial(SchedulerWorld.drawn(Random(seed)).staged(stages), seed)

    @precondition(lambda self: not self.trial.crowded)
    @rule(
        data=st.data(),
        family=st.integers(0, 2),
        priority=st.integers(0, 2),
        stop=st.none() | st.integers(1, 12),
        tenant=st.integers(0, 3),
        scored=st.booleans(),
        constrained=st.booleans(),
    )
    def arrive(
        self,
        data: st.DataObject,
        family: int,
        priority: int,
        stop: int | None,
        tenant: int,
        scored: bool,
        constrained: bool,
    ) -> None:
        longest = self.trial.longest()
        prompt = data.draw(st.integers(1, min(longest - 1, 24)))
        new = data.draw(st.integers(0, min(longest - prompt, 12)))
        tenant %= self.trial.world.tenants
        self.trial.arrive(
            family=family,
            prompt=prompt,
            new=new,
            priority=priority,
            stop=stop,
            tenant=tenant,
            scored=scored,
            constrained=constrained,
        )

    @precondition(lambda self: self.trial.expected)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.trial.leave(data.draw(st.sampled_from(sorted(self.trial.expected))))

    @rule()
    def schedule(self) -> None:
        self.trial.schedule()

    @precondition(lambda self: self.trial.in_flight)
    @rule()
    def apply(self) -> None:
        self.trial.apply()

    @rule(steps=st.integers(1, 5))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.trial.schedule()
            self.trial.apply()

    def teardown(self) -> None:
        if hasattr(self, "trial"):
            self.trial.drain()


SchedulerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestSchedulerMachine = SchedulerMachine.TestCase
