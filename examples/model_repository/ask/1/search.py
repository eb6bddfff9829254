"""Rankings: of texts by the words that they share with a question (BM25), and of several rankings together."""

import math
import re
from collections import Counter
from collections.abc import Sequence

_SATURATION, _BY_LENGTH = 1.2, 0.75
_FIRST_PLACES = 10


class WordIndex:
    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = [Counter(re.findall(r"\w+", text.lower())) for text in texts]
        lengths = [each.total() for each in self._texts]
        mean = sum(lengths) / len(lengths)
        self._norms = [_SATURATION * (1 - _BY_LENGTH + _BY_LENGTH * length / mean) for length in lengths]
        containing = Counter(word for each in self._texts for word in each)
        self._weights = {word: math.log(1 + len(texts) / (count + 0.5)) for word, count in containing.items()}

    def rank(self, question: str) -> list[int]:
        """The places of all texts, the best first."""
        words = set(re.findall(r"\w+", question.lower()))

        def score(place: int) -> float:
            counts, norm = self._texts[place], self._norms[place]
            return sum(
                self._weights[w] * counts[w] * (_SATURATION + 1) / (counts[w] + norm) for w in words & counts.keys()
            )

        return sorted(range(len(self._texts)), key=lambda place: -score(place))


def fuse(rankings: Sequence[tuple[float, Sequence[int]]]) -> dict[int, float]:
    """The scores of weighted rankings together, the best first: reciprocal rank fusion."""
    scores: Counter[int] = Counter()
    for weight, ranking in rankings:
        for place, each in enumerate(ranking):
            scores[each] += weight / (_FIRST_PLACES + place)  # type: ignore[assignment]
    return dict(scores.most_common())
