"""Guided sequences by themselves: masks, what follows tokens, ends, failures."""

from collections.abc import Sequence

import numpy as np

from charonia.engine.core.guides import Guides, SequenceGuide, ThinkingLimit
from charonia.engine.grammars.backend import TokenMask
from charonia.scheduler.plan import Continuation, IntArray, StepPlan, StepResult

VOCABULARY = 40


class Script:
    """A matcher of one text: `forced` says how many tokens of it have to come without a choice."""

    def __init__(self, *tokens: int, forced: int = 0, breaks: bool = False) -> None:
        self._tokens, self._forced, self._breaks = list(tokens), forced, breaks
        self.error = ""

    @property
    def complete(self) -> bool:
        return not self._tokens

    finished = complete

    def fill_mask(self, mask: TokenMask) -> None:
        mask[:] = 0
        mask[self._tokens[0] // 32] = np.array(1 << self._tokens[0] % 32, np.uint32).view(np.int32)
        self.error = "it broke" if self._breaks else self.error

    def accept(self, tokens: Sequence[int]) -> bool:
        for token in tokens:
            if not self._tokens or self._tokens.pop(0) != token:
                self.error = "not allowed"
        return not self.error

    def acceptable(self, tokens: Sequence[int]) -> int:
        return next((at for at in range(len(tokens)) if self._tokens[: at + 1] != [*tokens[: at + 1]]), len(tokens))

    def forced_tokens(self) -> list[int]:
        return self._tokens[: self._forced]

    def rollback(self, tokens: int) -> None:
        raise NotImplementedError


def ints(*values: int) -> IntArray:
    return np.array(values, np.int32)


def plan(*rows: int) -> StepPlan:
    ones = np.ones(len(rows), np.int32)
    return StepPlan(0, ints(*rows), ones, ones, ones.astype(bool), ones, np.zeros((0, 2), np.int32), (), ints())


def result(**tokens: int) -> StepResult:
    """Row r3 got this token."""
    rows = ints(*(int(row[1:]) for row in tokens))
    return StepResult(0, rows, rows, np.ones_like(rows), ints(*tokens.values()))


def test_only_rows_that_ask_are_masked_in_the_order_of_their_masks() -> None:
    guides = Guides(VOCABULARY)
    guides.add(7, SequenceGuide(Script(35)))
    guides.add(8, SequenceGuide(None, ThinkingLimit(3, [5])))
    guides.add(9, SequenceGuide(Script(2)))
    masked, source = guides.mask_plan(plan(4, 5, 6, 7), {4: 9, 5: 8, 7: 7})
    assert masked.masked.tolist() == [4, 7]
    assert source is not None
    bits = np.unpackbits(source().view(np.uint8), axis=1, bitorder="little")
    assert [np.flatnonzero(row).tolist() for row in bits] == [[2], [35]]


def test_what_has_to_come_follows_and_the_end_is_told() -> None:
    guides = Guides(VOCABULARY)
    guides.add(7, SequenceGuide(Script(1, 2, 3, 4, forced=2)))
    guides.add(8, SequenceGuide(Script(1, 2)))
    rows = {3: 7, 4: 8}
    assert guides.follow(result(r3=1, r4=1), rows) == ({3: Continuation([2, 3])}, [])
    assert guides.follow(result(r3=4, r4=2), rows) == ({3: Continuation([], True), 4: Continuation([], True)}, [])


def test_nothing_is_skipped_where_every_token_is_to_be_reported() -> None:
    guide = SequenceGuide(Script(1, 2, 3, forced=2), jumps=False)
    assert guide.follow(1) == Continuation([])
    assert guide.follow(2) == Continuation([])
    assert guide.follow(3) == Continuation([], True)


def test_a_sequence_that_cannot_go_on_is_told_with_its_parameter() -> None:
    guides = Guides(VOCABULARY)
    guides.add(7, SequenceGuide(Script(1, breaks=True), parameter="guided_regex"))
    _, source = guides.mask_plan(plan(3), {3: 7})
    assert source is not None
    assert (source() == -1).all(), "any token will do: it is not kept"
    ways, (failed,) = guides.follow(result(r3=1), {3: 7})
    assert (failed.key, failed.message, failed.field) == (7, "guided_regex: it broke", "guided_regex")
    assert not ways


def test_a_grammar_that_takes_too_long_is_ended() -> None:
    guide = SequenceGuide(Script(*[1] * 9))
    guide._allowance = -1.0
    guide.fill_mask(np.zeros(2, np.int32))
    assert "too long" in guide.error


def test_rows_of_sequences_that_have_ended_are_left_alone() -> None:
    guides = Guides(VOCABULARY)
    guides.add(7, SequenceGuide(Script(1, 2)))
    guides.discard([7, 99])
    assert not guides
    assert guides.follow(result(r3=1), {3: 7}) == ({}, [])
    assert guides.mask_plan(plan(3), {3: 7})[1] is None


def thought(guide: SequenceGuide, *tokens: int) -> list[int]:
    found: list[int] = []
    for token in tokens:
        found += [token, *guide.follow(token).tokens]
    return found


def test_thinking_ends_at_its_limit_once() -> None:
    assert thought(SequenceGuide(None, ThinkingLimit(2, [8, 9])), 1, 2, 3, 4) == [1, 2, 8, 9, 3, 4]
    assert thought(SequenceGuide(None, ThinkingLimit(4, [8, 9])), 1, 8, 9, 2, 3, 4, 5) == [1, 8, 9, 2, 3, 4, 5]


def test_no_thinking_at_all_begins_with_its_end() -> None:
    guide, mask = SequenceGuide(None, ThinkingLimit(0, [35, 9])), np.zeros(2, np.int32)
    assert guide.wants_mask
    guide.fill_mask(mask)
    assert np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist() == [35]
    assert guide.follow(35) == Continuation([9])
    assert not guide.wants_mask


def test_thinking_whose_tokens_are_reported_is_ended_token_by_token() -> None:
    guide, mask = SequenceGuide(None, ThinkingLimit(1, [8, 9]), jumps=False), np.zeros(2, np.int32)
    for token, allowed in ((1, None), (8, 8), (9, 9)):
        if allowed is not None:
            guide.fill_mask(mask)
            assert np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist() == [allowed]
        assert guide.follow(token) == Continuation([])
    assert not guide.wants_mask


def test_a_grammar_that_begins_within_the_end_of_thinking_says_what_follows() -> None:
    guide = SequenceGuide(Script(1, 8, 5), ThinkingLimit(1, [8, 9]))
    assert guide.follow(1) == Continuation([8])
    assert guide.follow(5) == Continuation([], True)
