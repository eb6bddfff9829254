"""What can never run is refused at once, and names the field; what is out of turn is the engine's own fault."""

import numpy as np
import pytest

from charonia.core.errors import InvalidArgument
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.plan import StepResult
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceSpec


def scheduler(blocks: int = 4, max_model_len: int = 100) -> Scheduler:
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=max_model_len)
    return Scheduler(config, KVCacheManager(blocks, 4))


def request(prompt: int, new: int, key: int = 0) -> SequenceSpec:
    return SequenceSpec(key=key, prompt=np.zeros(prompt, np.int32), max_tokens=new)


@pytest.mark.parametrize(
    ("prompt", "new", "field"),
    [
        (0, 1, "prompt"),
        (1, -1, "max_tokens"),
        (90, 11, "max_tokens"),
        (100, 1, "prompt"),
        (10, 8, "max_tokens"),
        (17, 1, "prompt"),
    ],
)
def test_a_request_that_can_never_run_is_refused(prompt: int, new: int, field: str) -> None:
    one = scheduler()
    with pytest.raises(InvalidArgument) as refused:
        one.add(request(prompt, new))
    assert refused.value.field == field
    assert not one.has_work


def test_what_just_fits_is_taken() -> None:
    one = scheduler()
    one.add(request(10, 7))
    plan = one.schedule()
    assert plan is not None
    assert plan.tokens == 8


def test_a_key_is_not_taken_twice() -> None:
    one = scheduler()
    one.add(request(1, 1))
    with pytest.raises(InvalidArgument):
        one.add(request(1, 1))


def test_a_result_out_of_turn_is_refused() -> None:
    one = scheduler()
    one.add(request(1, 1))
    one.schedule()
    with pytest.raises(RuntimeError, match="out of turn"):
        one.apply(StepResult(7, *(np.zeros(0, np.int32) for _ in range(4))))


def test_a_result_that_leaves_a_hole_is_refused() -> None:
    one = scheduler()
    one.add(request(3, 2))
    one.schedule()
    row, offset, count, token = (np.array([value], np.int32) for value in (0, 5, 1, 9))
    with pytest.raises(RuntimeError, match="do not begin"):
        one.apply(StepResult(0, row, offset, count, token))


def test_a_budget_without_room_for_every_row_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"max_num_seqs 4 .* max_num_batched_tokens 3") as refused:
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=3)
    assert refused.value.field == "max_num_seqs"
