"""Sequences that bring what an encoder made: one a step, for work on it comes before the step's own."""

import numpy as np

from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.encoders.encoder_rows import EncoderRows
from charonia.scheduler.plan import StepPlan, StepResult
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceSpec


def request(key: int, encoded: EncoderRows | None) -> SequenceSpec:
    return SequenceSpec(key=key, prompt=np.array([5, 6], np.int32), max_tokens=40, encoded=encoded)


def counted(plan: StepPlan) -> StepResult:
    """The next token is 1, always."""
    rows, ones = plan.rows[plan.samples], np.ones(int(plan.samples.sum()), np.int32)
    return StepResult(plan.step, rows, (plan.starts + plan.counts)[plan.samples], ones, ones)


def test_one_sequence_a_step_enters_with_an_encoders_output() -> None:
    cache = KVCacheManager(128, 4)
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64), cache)
    sounds = [EncoderRows(2, bytes([number]), b"rows", "float32") for number in range(4)]
    for key in range(8):
        scheduler.add(request(key, sounds[key // 2] if key % 2 else None))
    brought: list[list[EncoderRows]] = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan is not None
        brought.append([sequence.encoded for sequence in plan.new if sequence.encoded is not None])
        scheduler.apply(counted(plan))
    assert [len(own) for own in brought[:8]].count(1) == 4
    assert max(len(own) for own in brought) == 1
    assert [own[0] for own in brought if own] == sounds
    cache.check_integrity()


def test_a_preempted_sequence_brings_it_again() -> None:
    """Six blocks for two sequences of up to six each."""
    cache = KVCacheManager(6, 4)
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=24)
    scheduler = Scheduler(config, cache)
    sounds = [EncoderRows(2, bytes([number]), b"rows", "float32") for number in range(2)]
    for key, sound in enumerate(sounds):
        spec = SequenceSpec(key=key, prompt=np.array([5, 6], np.int32), max_tokens=20, encoded=sound)
        scheduler.add(spec)
    brought: list[EncoderRows | None] = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan is not None
        brought += [sequence.encoded for sequence in plan.new]
        scheduler.apply(counted(plan))
    assert scheduler.totals.preemptions > 0
    assert brought.count(sounds[0]) == 1
    assert brought.count(sounds[1]) == 1 + scheduler.totals.preemptions
    cache.check_integrity()
