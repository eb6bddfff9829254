"""Guided sequences by themselves: masks, what follows tokens, ends, failures."""

from collections.abc import Callable, Sequence

import numpy as np

from charonia.engine.core.constraints import ConstrainedSequences, SequenceConstraint, ThinkingLimit
from charonia.engine.grammars.backend import TokenMask
from charonia.scheduler.constraints.constrained_rows import ForcedTokens
from charonia.scheduler.plan import IntArray, StepPlan, StepResult

VOCABULARY = 40


def script(*tokens: int, forced: int = 0, breaks: bool = False, too_much: int = -1) -> Callable[[], "Script"]:
    return lambda: Script(*tokens, forced=forced, breaks=breaks, too_much=too_much)


class Script:
    """A matcher of one text: `forced` says how many tokens of it have to come without a choice, `too_much` is one that
    it cannot take."""

    def __init__(self, *tokens: int, forced: int, breaks: bool, too_much: int) -> None:
        self._text, self._done, self._forced, self._breaks = list(tokens), 0, forced, breaks
        self._too_much = too_much
        self.error = ""

    @property
    def _tokens(self) -> list[int]:
        return self._text[self._done :]

    @property
    def complete(self) -> bool:
        return not self._tokens

    finished = complete

    def fill_mask(self, mask: TokenMask) -> None:
        mask[:] = 0
        for token in self._tokens[:1]:
            mask[token // 32] = np.array(1 << token % 32, np.uint32).view(np.int32)
        self.error = "it broke" if self._breaks else self.error

    def accept(self, tokens: Sequence[int]) -> bool:
        for token in tokens:
            if self._tokens[:1] != [token]:
                self.error = "not allowed"
            self.error = "too much" if token == self._too_much else self.error
            self._done += 1
        return not self.error

    def acceptable(self, tokens: Sequence[int]) -> int:
        return next((at for at in range(len(tokens)) if self._tokens[: at + 1] != [*tokens[: at + 1]]), len(tokens))

    def forced_tokens(self) -> list[int]:
        return self._tokens[: self._forced]

    def rollback(self, tokens: int) -> None:
        self._done -= tokens


def allowed(constraint: SequenceConstraint, *drafts: int) -> list[list[int]]:
    """Tokens that may come next, and after each draft."""
    masks = np.zeros((1 + len(drafts), 2), np.int32)
    constraint.fill_masks(masks, drafts)
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return [np.flatnonzero(row).tolist() for row in bits]


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
    constraints = ConstrainedSequences(VOCABULARY)
    constraints.live[7] = SequenceConstraint(script(35))
    constraints.live[8] = SequenceConstraint(None, ThinkingLimit(3, [5]))
    constraints.live[9] = SequenceConstraint(script(2))
    masked, source = constraints.mask_plan(plan(4, 5, 6, 7), {4: 9, 5: 8, 7: 7})
    assert masked.masked.tolist() == [4, 7]
    assert source is not None
    bits = np.unpackbits(source().view(np.uint8), axis=1, bitorder="little")
    assert [np.flatnonzero(row).tolist() for row in bits] == [[2], [35]]


def test_what_has_to_come_follows_and_the_end_is_told() -> None:
    constraints = ConstrainedSequences(VOCABULARY)
    constraints.live[7] = SequenceConstraint(script(1, 2, 3, 4, forced=2))
    constraints.live[8] = SequenceConstraint(script(1, 2))
    rows = {3: 7, 4: 8}
    first, failed = constraints.follow(result(r3=1, r4=1), rows)
    assert (first.tokens.tolist(), first.counts.tolist(), first.forced.tolist()) == ([1, 2, 3, 1], [3, 1], [2, 0])
    assert (first.ending, failed) == (frozenset(), [])
    last, failed = constraints.follow(result(r3=4, r4=2), rows)
    assert (last.tokens.tolist(), last.ending, failed) == ([4, 2], {3, 4}, [])


def test_nothing_is_skipped_where_every_token_is_to_be_reported() -> None:
    constraint = SequenceConstraint(script(1, 2, 3, forced=2), jumps=False)
    assert constraint.follow([1]) == ForcedTokens([])
    assert constraint.follow([2]) == ForcedTokens([])
    assert constraint.follow([3]) == ForcedTokens([], True)


def test_a_sequence_that_cannot_go_on_is_told_with_its_parameter() -> None:
    constraints = ConstrainedSequences(VOCABULARY)
    constraints.live[7] = SequenceConstraint(script(1, breaks=True), parameter="guided_regex")
    _, source = constraints.mask_plan(plan(3), {3: 7})
    assert source is not None
    assert (source() == -1).all(), "any token will do: it is not kept"
    sampled = result(r3=1)
    followed, (failed,) = constraints.follow(sampled, {3: 7})
    assert (failed.key, failed.error.message, failed.error.field) == (7, "guided_regex: it broke", "guided_regex")
    assert followed is sampled


def test_a_grammar_that_takes_too_long_is_ended() -> None:
    constraint = SequenceConstraint(script(*[1] * 9))
    constraint._allowance = -1.0
    allowed(constraint)
    assert "too long" in constraint.error


def test_rows_of_sequences_that_have_ended_are_left_alone() -> None:
    constraints = ConstrainedSequences(VOCABULARY)
    constraints.live[8] = SequenceConstraint(script(1, 2))
    ended = result(r3=1)
    assert constraints.follow(ended, {3: 7}) == (ended, [])
    assert constraints.mask_plan(plan(3), {3: 7})[1] is None


def thought(constraint: SequenceConstraint, *tokens: int) -> list[int]:
    found: list[int] = []
    for token in tokens:
        found += [token, *constraint.follow([token]).tokens]
    return found


def test_thinking_ends_at_its_limit_once() -> None:
    assert thought(SequenceConstraint(None, ThinkingLimit(2, [8, 9])), 1, 2, 3, 4) == [1, 2, 8, 9, 3, 4]
    assert thought(SequenceConstraint(None, ThinkingLimit(4, [8, 9])), 1, 8, 9, 2, 3, 4, 5) == [1, 8, 9, 2, 3, 4, 5]


def test_no_thinking_at_all_begins_with_its_end() -> None:
    constraint = SequenceConstraint(None, ThinkingLimit(0, [35, 9]))
    assert constraint.wants_masks()
    assert allowed(constraint) == [[35]]
    assert constraint.follow([35]) == ForcedTokens([9])
    assert not constraint.wants_masks()


def test_thinking_whose_tokens_are_reported_is_ended_token_by_token() -> None:
    constraint = SequenceConstraint(None, ThinkingLimit(1, [8, 9]), jumps=False)
    for token, due in ((1, None), (8, 8), (9, 9)):
        if due is not None:
            assert allowed(constraint) == [[due]]
        assert constraint.follow([token]) == ForcedTokens([])
    assert not constraint.wants_masks()


def test_a_grammar_that_begins_within_the_end_of_thinking_says_what_follows() -> None:
    constraint = SequenceConstraint(script(1, 8, 5), ThinkingLimit(1, [8, 9]))
    assert constraint.follow([1]) == ForcedTokens([8])
    assert constraint.follow([5]) == ForcedTokens([], True)


def test_drafts_are_cut_where_the_grammar_forbids_them() -> None:
    constraint = SequenceConstraint(script(1, 2, 3, 4))
    assert constraint.possible_drafts([1, 2, 9, 4], 9) == [1, 2]
    assert constraint.possible_drafts([1, 2, 3, 4], 3) == [1, 2, 3]
    assert constraint.possible_drafts([5], 3) == []
    assert constraint.possible_drafts([], 3) == []
    assert constraint.possible_drafts([1, 2, 3, 4, 7], 9) == [1, 2, 3], "4 is the last"
    assert allowed(constraint, 1, 2) == [[1], [2], [3]], "nothing was accepted yet"


def test_a_draft_says_what_is_forced_after_it() -> None:
    """After 1 there is no choice about 2 and 3: a draft that says otherwise ends there."""
    constraint = SequenceConstraint(script(1, 2, 3, 4, 5, forced=2))
    assert constraint.possible_drafts([1, 9, 9, 9], 9) == [1, 2, 3]
    assert constraint.possible_drafts([1, 2, 3, 4], 9) == [1, 2, 3, 4]
    assert constraint.possible_drafts([1, 2, 3, 4], 2) == [1, 2]
    assert constraint.follow([1, 2]) == ForcedTokens([3]), "the rest of what is forced follows"
    assert constraint.follow([4]) == ForcedTokens([5], True)


def test_what_is_forced_is_drafted_where_every_token_is_reported() -> None:
    constraint = SequenceConstraint(script(1, 2, 3, 4, forced=2), jumps=False)
    assert constraint.possible_drafts([], 9) == [1, 2, 3]
    assert constraint.possible_drafts([1], 2) == [1, 2]
    assert constraint.follow([1, 2, 3]) == ForcedTokens([])


def test_the_end_of_thinking_is_drafted_and_alone_allowed() -> None:
    for matcher in (None, script(1, 2, 8, 9, 5)):
        constraint = SequenceConstraint(matcher, ThinkingLimit(2, [8, 9]))
        assert constraint.wants_masks(2)
        assert constraint.possible_drafts([1, 2, 3, 4], 9)[:4] == [1, 2, 8, 9]
        assert allowed(constraint, 1, 2, 8)[2:] == [[8], [9]]
        assert constraint.follow([1, 2, 8]) == ForcedTokens([9])
    free = SequenceConstraint(None, ThinkingLimit(4, [8, 9]))
    assert not free.wants_masks(3)
    assert free.possible_drafts([1, 8, 9, 4, 5, 6], 9) == [1, 8, 9, 4, 5, 6]
    assert free.follow([1, 8, 9]) == ForcedTokens([])
    assert not free.wants_masks(9)


def test_a_row_with_drafts_has_a_mask_at_each_place() -> None:
    constraints = ConstrainedSequences(VOCABULARY)
    for key in (7, 8):
        constraints.live[key] = SequenceConstraint(script(1, 2, 35))
    ones = plan(4, 5)
    drafting = ones._replace(counts=ints(3, 1), drafts=ints(2, 0), drafted=ints(1, 2))
    masked, source = constraints.mask_plan(drafting, {4: 7, 5: 8})
    assert masked.masked.tolist() == [4, 4, 4, 5]
    assert source is not None
    bits = np.unpackbits(source().view(np.uint8), axis=1, bitorder="little")
    assert [np.flatnonzero(row).tolist() for row in bits] == [[1], [2], [35], [1]]
    tokens = StepResult(0, ints(4, 5), ints(1, 1), ints(3, 1), ints(1, 2, 35, 1))
    followed, failed = constraints.follow(tokens, {4: 7, 5: 8})
    assert (followed.tokens.tolist(), followed.ending, failed) == ([1, 2, 35, 1], {4}, [])


def test_a_draft_that_is_too_much_for_a_grammar_ends_nothing() -> None:
    constraint = SequenceConstraint(script(1, 2, 3, 4, too_much=3))
    assert constraint.follow([1]) == ForcedTokens([])
    assert constraint.possible_drafts([2, 3, 4], 9) == [2, 3]
    assert constraint.error == ""
    assert constraint.possible_drafts([2, 3, 4], 9) == [], "it is asked no more"
    assert allowed(constraint) == [[2]]
    assert constraint.follow([2]) == ForcedTokens([])
    constraint.follow([3])
    assert constraint.error == "too much"
