"""A drafter that raises, or takes longer than it can save, is off; nothing else is."""

import time
from collections.abc import Sequence

import numpy as np
import pytest

from charonia.engine.drafters.custom import CALLS, GuardedDrafter
from charonia.scheduler.drafts.speculation import DraftRequest

ASKED = DraftRequest(np.array([1, 2], np.int32), [], 4, {})


class Misbehaving:
    def __init__(self, answer: object = None, seconds: float = 0.0) -> None:
        self.answer, self.seconds, self.calls = answer, seconds, 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        self.calls += 1
        time.sleep(self.seconds)
        if isinstance(self.answer, Exception):
            raise self.answer
        return [[7]] * len(requests) if self.answer is None else self.answer  # type: ignore[return-value]

    def finished(self, request: DraftRequest) -> None:
        if isinstance(self.answer, Exception):
            raise self.answer


@pytest.mark.parametrize(
    ("answer", "told"), [(ValueError("no such tree"), "ValueError: no such tree"), ([], "0 drafts for 2 requests")]
)
def test_what_raises_is_turned_off_by_name(answer: object, told: str, caplog: pytest.LogCaptureFixture) -> None:
    bad = Misbehaving(answer)
    drafter = GuardedDrafter(bad, "mine")
    assert [list(each) for each in drafter.propose([ASKED, ASKED])] == [[], []]
    assert [list(each) for each in drafter.propose([ASKED])] == [[]]
    assert bad.calls == 1
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("the drafter mine is turned off")
    assert told in line


def test_what_raises_when_a_text_has_ended_is_turned_off_too() -> None:
    guard = GuardedDrafter(Misbehaving(KeyError("text")), "mine")
    guard.finished(ASKED)
    assert guard.off


@pytest.mark.parametrize(("step", "off"), [(1e-5, True), (10.0, False), (None, False)])
def test_what_takes_longer_than_its_drafts_can_save_is_turned_off(step: float | None, off: bool) -> None:
    slow = Misbehaving(seconds=1e-4)
    guard, told = GuardedDrafter(slow, "mine"), list[bool]()
    guard.on_off = lambda: told.append(True)
    guard.step_seconds = lambda tokens: step
    for _ in range(CALLS + 1):
        guard.propose([ASKED])
    assert guard.off == off == bool(told)
    assert slow.calls == CALLS + (not off)
