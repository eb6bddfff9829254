"""Prompts."""

from charonia.bench.load.plan import Prompts
from charonia.bench.load.planned_requests import PlannedRequest


def test_prompts_are_distinct_as_long_as_asked_and_reproducible() -> None:
    prompts = Prompts(vocab=50, seed=3)
    one, two = prompts.write(PlannedRequest(0, 0, 20, 1)), prompts.write(PlannedRequest(1, 0, 20, 1))
    assert len(one) == len(two) == 20
    assert one != two
    assert one == Prompts(vocab=50, seed=3).write(PlannedRequest(0, 0, 20, 1))
    assert all(isinstance(token, int) and 0 <= token < 50 for token in one)


def test_prompts_may_share_their_beginning() -> None:
    prompts = Prompts(shared=8)
    one, two = prompts.write(PlannedRequest(0, 0, 12, 1)), prompts.write(PlannedRequest(1, 0, 12, 1))
    assert one[:8] == two[:8]
    assert one[8:] != two[8:]
    assert len(prompts.write(PlannedRequest(2, 0, 5, 1))) == 5


def test_text_has_a_word_for_each_token() -> None:
    text = Prompts(form="text").write(PlannedRequest(0, 0, 9, 1))
    assert isinstance(text, str)
    assert len(text.split()) == 9
