"""The suffix drafter: what mostly followed the longest match, in the text and in answers of the same tenant."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.engine.drafters.suffix import ServedAnswers, SuffixDrafter
from charonia.scheduler.drafts.speculation import DraftRequest

SMALL = st.lists(st.integers(0, 2), max_size=24)


def asked(prompt: Sequence[int], outputs: Sequence[int] = (), k: int = 6, **more: Any) -> DraftRequest:
    return DraftRequest(np.array(prompt, np.int32), list(outputs), k, more.pop("state", {}), **more)


def drafted(drafter: SuffixDrafter, *args: Any, **more: Any) -> list[int]:
    return drafter.propose([asked(*args, **more)])[0]


def learnt(drafter: SuffixDrafter, answer: Sequence[int], **scope: Any) -> SuffixDrafter:
    drafter.finished(asked([0], answer, **scope))
    return drafter


def naive(text: list[int], corpus: list[list[int]], own: bool, k: int, least: float) -> tuple[list[int], float]:
    """Every place of every text is compared; `own`: it goes on with what is drafted."""
    found: dict[int, list[list[int]]] = {}
    for other in corpus:
        for place in range(len(other) - 1, 1, -1):
            length = next((n for n in range(place) if n >= len(text) or other[place - 1 - n] != text[-1 - n]), place)
            if min(length, len(text)) >= 2:
                found.setdefault(length, []).append(other[place:])
    if not found:
        return [], 0.0
    longest = max(found)
    alive, tokens, probability, score = found[longest], list[int](), 1.0, 0.0
    for at in range(min(k, longest)):
        following = [
            tokens[at - len(each)] if own and at >= len(each) else (each[at : at + 1] or [-1])[0] for each in alive
        ]
        counts = Counter(token for token in following if token != -1)
        best = next((token for token in following if token != -1 and counts[token] == max(counts.values())), None)
        if best is None or (probability := probability * counts[best] / len(alive)) < least:
            break
        tokens.append(best)
        score += probability
        alive = [each for each, token in zip(alive, following, strict=True) if token == best]
    return tokens, score


@settings(max_examples=60)
@given(
    answers=st.lists(SMALL, max_size=4),
    prompt=SMALL.filter(bool),
    bursts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), max_size=5),
    least=st.sampled_from([0.0, 0.3, 0.6]),
)
def test_what_is_drafted_is_what_a_search_through_everything_finds(
    answers: list[list[int]], prompt: list[int], bursts: list[list[int]], least: float
) -> None:
    drafter, state, outputs = SuffixDrafter(depth=99, least_probability=least), dict[str, Any](), list[int]()
    for answer in answers:
        learnt(drafter, answer)
    for burst in [[], *bursts]:
        outputs += burst
        text = [*prompt, *outputs]
        own, own_score = naive(text, [text], True, 6, least)
        others, score = naive(text, answers[::-1], False, 6, least)
        assert drafted(drafter, prompt, outputs, state=state) == (others if score > own_score else own)


def test_the_longer_the_match_the_more_is_drafted() -> None:
    drafter = learnt(SuffixDrafter(), [1, 2, 3, 4, 5, 6, 7, 8])
    assert drafted(drafter, [9, 1, 2]) == [3, 4]
    assert drafted(drafter, [1, 2, 3]) == [4, 5, 6]
    assert drafted(drafter, [9, 2]) == []
    assert drafted(learnt(SuffixDrafter(factor=2.0), range(1, 9)), [9, 1, 2]) == [3, 4, 5, 6]
    assert drafted(SuffixDrafter(), [7, 8, 7, 8, 7, 8]) == [7, 8, 7, 8]


def test_answers_are_known_to_their_tenant_and_salt_alone() -> None:
    drafter = learnt(SuffixDrafter(), [1, 2, 3, 4], tenant="a", extras=("", "a", "salt"))
    assert drafted(drafter, [1, 2], tenant="a", extras=("", "a", "salt")) == [3, 4]
    assert drafted(drafter, [1, 2], tenant="b", extras=("", "b", "salt")) == []
    assert drafted(drafter, [1, 2], tenant="a", extras=("", "a", "")) == []
    assert drafted(learnt(SuffixDrafter(remembered=0), [1, 2, 3, 4]), [1, 2]) == []


def test_the_oldest_answers_are_forgotten() -> None:
    few, small = SuffixDrafter(remembered=2), SuffixDrafter(kept_tokens=16)
    following = dict[str, Any]()
    learnt(few, [1, 2, 3, 4])
    assert drafted(few, [1, 2], state=following) == [3, 4]
    for begin in (10, 20):
        learnt(few, range(begin, begin + 4))
    assert drafted(few, [1, 2], state=following) == []
    assert drafted(few, [10, 11]) == [12, 13]
    for begin in (1, 10, 20, 30):
        learnt(small, range(begin, begin + 4))
    assert [drafted(small, [begin, begin + 1]) for begin in (1, 10, 20, 30)] == [[], [12, 13], [22, 23], [32, 33]]
    learnt(small, range(100, 200))  # of a long one its end
    assert drafted(small, [195, 196]) == [197, 198]
    assert drafted(small, [150, 151]) == []


def test_numbers_that_pairs_share_mislead_nobody() -> None:
    answers = ServedAnswers(8, 100)
    for text in ([1, 2, 3], [4, 5, 6]):
        answers.add(text, owner=-3)
    found = {(first, second): list(answers.places(first, second, -3)) for first in range(9) for second in range(9)}
    assert {pair for pair, places in found.items() if places} == {(1, 2), (4, 5)}
