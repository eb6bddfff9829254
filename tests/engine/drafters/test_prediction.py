"""Predicted outputs: where a text stands in its prediction, and what is drafted of it."""

import numpy as np
import pytest

from charonia.engine.drafters.prediction import PredictionDrafter, PredictionFollower
from charonia.scheduler.drafts.speculation import DraftRequest

PREDICTED = list(range(20, 50))


def follower(*tokens: int) -> PredictionFollower:
    made = PredictionFollower(PREDICTED)
    made.extend(tokens)
    return made


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([], [20, 21, 22]),
        ([20, 21], [22, 23, 24]),
        ([20, 21, 99], [23, 24, 25]),  # as if 99 were in place of 22
        ([20, 21, 99, 23], [24, 25, 26]),
        ([20, 21, 99, 98], []),  # lost
        ([20, 21, 99, 98, 97, 24], []),  # one token is too few to be found again
        ([20, 21, 99, 98, 97, 24, 25], [26, 27, 28]),
        ([20, 21, 30, 31], [32, 33, 34]),  # some were left out
        ([20, 21, 22, 23, 20, 21], [22, 23, 24]),  # or come again
        ([1, 2, 3, 20, 21], [22, 23, 24]),  # what stands before it, such as reasoning
        (PREDICTED, []),
        ([*PREDICTED, 7, 20, 21], [22, 23, 24]),
    ],
)
def test_a_text_leaves_the_prediction_and_comes_back(text: list[int], expected: list[int]) -> None:
    assert follower(*text).expected(3) == expected
    stepwise = PredictionFollower(PREDICTED)
    for token in text:
        stepwise.extend([token])
    assert stepwise.expected(3) == expected


def test_of_equal_places_the_next_one_counts_and_of_others_the_longest_match() -> None:
    prediction = [1, 2, 3, 8, 1, 2, 4, 8, 1, 2, 5]
    made = PredictionFollower(prediction)
    made.extend([1, 2, 3, 8, 7, 6, 1, 2])
    assert made.expected(1) == [4]
    made = PredictionFollower(prediction)
    made.extend([9, 9, 4, 8, 1, 2])
    assert made.expected(1) == [5]


def test_after_long_a_text_is_found_again_within_eight_tokens() -> None:
    made = follower(*[1] * 1000)
    assert made.expected(1) == []
    made.extend(PREDICTED[:8])
    made.extend(PREDICTED[8:10])
    assert made.expected(2) == PREDICTED[10:12]
    assert made.accepted == 10


def test_each_token_of_the_prediction_counts_once() -> None:
    made = follower(20, 21, 99, 23, 24, 23, 24, 25)
    assert (made.accepted, made.rejected) == (5, len(PREDICTED) - 5)
    assert follower(*PREDICTED).rejected == 0
    assert follower(1, 2, 3).accepted == 0


def test_nothing_is_drafted_where_the_prediction_says_nothing() -> None:
    prompt, predicted = np.array([1, 2], np.int32), np.array(PREDICTED, np.int32)
    requests = [
        DraftRequest(prompt, [20, 21], 4, {}, prediction=predicted),
        DraftRequest(prompt, [20, 21], 4, {}),
        DraftRequest(prompt, [3, 3, 3], 1, {}, prediction=predicted),
    ]
    assert [*map(list, PredictionDrafter().propose(requests))] == [[22, 23, 24, 25], [], []]
