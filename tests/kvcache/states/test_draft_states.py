"""States before drafts: which a row goes on from, and that none is lost."""

import numpy as np
import pytest

from charonia.kvcache.states.draft_states import DraftStates

ONE_OF_EACH = np.ones(3, np.int32)
"""A plan computes a token of each row."""


def test_a_row_goes_on_from_the_state_after_what_was_accepted() -> None:
    states = DraftStates(first=7, size=4)
    kept = dict(states.reserve(row=2, position=50, drafts=3))
    assert sorted(kept) == [50, 51, 52]
    assert set(kept.values()) < {7, 8, 9, 10}
    states.accept(2, 51)
    assert states.free == 3, "those of other places are forgotten at once"
    states.check_integrity([2])
    assert states.resume(np.array([1, 1, 0], np.int32)) == [], "the plan has no token of it"
    assert states.resume(ONE_OF_EACH) == [(2, kept[51])]
    assert states.free == 3, "the plan in the making reads it"
    states.plan_is_made()
    assert states.free == 4
    assert states.resume(ONE_OF_EACH) == []


def test_a_row_whose_drafts_were_right_goes_on_from_its_own_state() -> None:
    states = DraftStates(first=0, size=2)
    states.reserve(0, 10, 2)
    states.accept(0, 12)
    assert states.resume(ONE_OF_EACH) == []
    assert states.free == 2


def test_what_a_row_holds_is_free_when_it_leaves() -> None:
    states = DraftStates(first=0, size=3)
    states.reserve(0, 10, 2)
    with pytest.raises(AssertionError, match="a row keeps what it left"):
        states.check_integrity([])
    states.leave(0)
    states.leave(1)
    assert states.free == 3
    states.check_integrity([])
