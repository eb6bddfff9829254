"""Places of an image that see one another are computed in one step, however prompts are cut."""

import numpy as np
import pytest

from charonia.core.errors import InvalidArgument
from charonia.scheduler.encoders.encoder_rows import EmbeddedSpan
from charonia.scheduler.sequence import Sequence, SequenceSpec

from .test_steps import step, trial


def image(start: int, length: int, bidirectional: bool = True, grid: tuple[int, int, int] = (0, 0, 0)) -> EmbeddedSpan:
    return EmbeddedSpan(start, length, b"image", b"", "float32", grid, bidirectional)


def test_a_chunk_ends_before_an_image_or_behind_it() -> None:
    one = trial(budget=12, rows=1)
    one.arrive(family=0, prompt=40, new=1, embedded=(image(10, 8), image(18, 12), image(31, 3, bidirectional=False)))
    assert [step(one) for _ in range(4)] == [{0: 10}, {0: 8}, {0: 12}, {0: 10}]
    assert not one.scheduler.has_work


def test_an_image_waits_for_a_step_that_has_room_for_it() -> None:
    one = trial(budget=12, rows=4)
    one.arrive(family=0, prompt=6, new=5)
    one.arrive(family=1, prompt=11, new=1, embedded=(image(0, 9),))
    one.arrive(family=2, prompt=4, new=1)
    assert step(one) == {0: 6}  # nobody overtakes it
    assert step(one) == {0: 1, 1: 11}
    assert step(one) == {0: 1, 1: 4}


def test_short_prompts_leave_a_long_one_the_room_for_its_image() -> None:
    one = trial(rows=8, budget=16)
    one.arrive(family=0, prompt=100, new=1, embedded=(image(16, 9), image(30, 9), image(60, 9)))
    step(one)
    for _ in range(40):
        one.arrive(family=1, prompt=8, new=1)
        one.arrive(family=1, prompt=8, new=1)
        step(one)
    assert 0 not in one.expected


def test_what_is_preempted_comes_back_uncut() -> None:
    one = trial(budget=12, rows=3)
    for family in range(3):
        one.arrive(family=family, prompt=30, new=4, embedded=(image(3, 7), image(12, 10)))
    while one.scheduler.has_work:
        plan = one.schedule()
        assert plan is not None
        for start, count in zip(plan.starts.tolist(), plan.counts.tolist(), strict=True):
            for span in (image(3, 7), image(12, 10)):
                assert not span.start < start + count < span.end
        one.apply()


@pytest.mark.parametrize(
    ("spans", "reason"),
    [
        ((image(0, 6),), "one step, which has room for 5: max_num_batched_tokens is too low"),
        ((image(3, 4), image(6, 2)), "or in others of the kind"),
        ((image(28, 4),), "lie outside of the prompt"),
        ((image(0, 4, grid=(1, 2, 3)),), r"not those of a grid of \(1, 2, 3\)"),
    ],
)
def test_what_can_never_run_is_refused(spans: tuple[EmbeddedSpan, ...], reason: str) -> None:
    one = trial(budget=8, rows=4)
    with pytest.raises(InvalidArgument, match=reason):
        one.arrive(family=0, prompt=30, new=1, embedded=spans)


def test_an_image_is_calm_once() -> None:
    """What was computed of it before a preemption is hurried as a text is."""
    spec = SequenceSpec(key=0, prompt=np.zeros(30, np.int32), max_tokens=4, embedded=(image(3, 7), image(12, 10)))
    sequence = Sequence(spec, 0, 0, 0, [])
    assert sequence.has_media_after(0)
    assert not sequence.has_media_after(22)
    sequence.preempted_at = 20
    assert sequence.has_media_after(0)
    sequence.preempted_at = 22
    assert not sequence.has_media_after(0)
