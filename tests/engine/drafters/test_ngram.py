"""The n-gram drafter: what followed the longest, latest match of a sequence's end."""

from random import Random
from typing import Any

import numpy as np
import pytest

from charonia.engine.drafters import ngram
from charonia.engine.drafters.ngram import NgramDrafter
from charonia.scheduler.drafts.speculation import DraftRequest


def drafted(drafter: NgramDrafter, prompt: list[int], outputs: list[int], k: int = 3) -> list[int]:
    return drafter.propose([DraftRequest(np.array(prompt, np.int32), outputs, k, {})])[0]


def test_the_longest_match_goes_on_and_of_equals_the_latest() -> None:
    drafter = NgramDrafter(2, 3)
    assert drafted(drafter, [1, 2, 3, 4, 9, 2, 3, 5], [2, 3]) == [5, 2, 3]  # of equals the latest
    assert drafted(drafter, [1, 2, 3, 4, 9, 2, 3, 5], [1, 2, 3]) == [4, 9, 2]  # a longer one, further back
    assert drafted(drafter, [1, 2, 3, 4, 9, 2, 3, 5], [7, 3]) == []  # one token is too few


def test_what_repeats_itself_is_repeated() -> None:
    assert drafted(NgramDrafter(2, 5), [8, 9], [8, 9], 5) == [8, 9, 8, 9, 8]
    assert drafted(NgramDrafter(1, 5), [7], [7], 4) == [7, 7, 7, 7]


@pytest.mark.parametrize("prompt", [[1], [1, 2], [1, 2, 3]])
def test_a_text_without_a_match_has_no_draft(prompt: list[int]) -> None:
    assert drafted(NgramDrafter(2, 4), prompt, []) == []


def test_each_token_is_read_once_and_nothing_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a search through all of the text, as it grows by bursts; small vocabularies repeat themselves."""
    monkeypatch.setattr(ngram, "LOOKS", 1000)
    random = Random(3)
    for _ in range(60):
        shortest = random.randint(1, 3)
        longest = shortest + random.randint(0, 2)
        drafter, state = NgramDrafter(shortest, longest), dict[str, Any]()
        prompt = [random.randrange(3) for _ in range(random.randint(1, 30))]
        outputs: list[int] = []
        for _ in range(12):
            request = DraftRequest(np.array(prompt, np.int32), outputs, 4, state)
            assert drafter.propose([request])[0] == searched([*prompt, *outputs], shortest, longest, 4)
            outputs += [random.randrange(3) for _ in range(random.randint(0, 4))]


def searched(text: list[int], shortest: int, longest: int, k: int) -> list[int]:
    for length in range(longest, shortest - 1, -1):
        for place in range(len(text) - 1, length - 1, -1):
            if len(text) > length and text[place - length : place] == text[len(text) - length :]:
                found = text[place : place + k]
                return [found[at % len(found)] for at in range(k)]
    return []
