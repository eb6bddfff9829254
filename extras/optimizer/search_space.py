"""The configurations that a search may choose from: knobs with their values, and what is known of them beforehand.

Knows which configurations cannot differ, and which cannot do what a smaller one could not; measures nothing.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...core.errors import InvalidArgument
from .search_goal import Configuration, KnobValue

_ENUMERATED, _DRAWN = 4096, 1024
"""Up to so many configurations are listed; of more, so many are drawn."""


class Knob(msgspec.Struct, frozen=True, kw_only=True):
    """One setting. `values`: those to try, in their order if they are `ordered`; `now`: the place of the one that holds
    without a search, or is nearest to it. `raises`: metrics that are never lower at a larger value, all else equal; the
    search trusts that of memory, and tries that of the others before it believes it."""

    name: str
    values: tuple[KnobValue, ...]
    now: int = 0
    ordered: bool = True
    raises: tuple[str, ...] = ()


class SearchSpace:
    """All combinations of the knobs' values. `same`: from a configuration's settings to those that nothing tells from
    it, one and the same for all of them.

    Raises:
        InvalidArgument: there is nothing to choose from.
    """

    def __init__(
        self,
        knobs: Sequence[Knob],
        same: Callable[[Mapping[str, KnobValue]], Mapping[str, KnobValue]] = lambda settings: settings,
        seed: int = 0,
    ) -> None:
        if not knobs:
            raise InvalidArgument("there is no knob to turn: name some with --sweep")
        self.knobs = tuple(knobs)
        self._same = same
        self._random = np.random.default_rng(seed)
        self._places = [{value: place for place, value in enumerate(knob.values)} for knob in knobs]
        self.combinations = math.prod(len(knob.values) for knob in knobs)
        self.start = self.canonical(tuple(knob.values[knob.now] for knob in knobs))
        found = map(self.canonical, self._listed() if self.combinations <= _ENUMERATED else self._drawn(_DRAWN))
        self.configurations = list(dict.fromkeys([self.start, *found]))

    @property
    def size(self) -> int:
        """Different configurations; of a space too large to list, all combinations."""
        return len(self.configurations) if self.combinations <= _ENUMERATED else self.combinations

    def _listed(self) -> Iterator[Configuration]:
        return product(*(knob.values for knob in self.knobs))

    def _drawn(self, count: int) -> Iterator[Configuration]:
        sizes = [len(knob.values) for knob in self.knobs]
        for places in self._random.integers(0, sizes, (count, len(sizes))).tolist():
            yield tuple(knob.values[place] for knob, place in zip(self.knobs, places, strict=True))

    def settings(self, configuration: Configuration) -> dict[str, KnobValue]:
        """The values by the knobs' names."""
        return {knob.name: value for knob, value in zip(self.knobs, configuration, strict=True)}

    def canonical(self, configuration: Configuration) -> Configuration:
        """The one of those that cannot differ which stands for them."""
        settings = self._same(self.settings(configuration))
        return tuple(settings[knob.name] for knob in self.knobs)

    def places(self, configuration: Configuration) -> tuple[int, ...]:
        """The place of each value among its knob's."""
        return tuple(places[value] for places, value in zip(self._places, configuration, strict=True))

    def points(self, configurations: Sequence[Configuration]) -> NDArray[np.float64]:
        """[configurations, dimensions]: from 0 to 1 for a knob whose values are ordered, one dimension a value for
        others, so that all of those are equally far apart."""
        columns: list[list[float]] = []
        for index, knob in enumerate(self.knobs):
            found = [self._places[index][configuration[index]] for configuration in configurations]
            if knob.ordered:
                columns.append([place / max(1, len(knob.values) - 1) for place in found])
            else:
                columns += [[math.sqrt(0.5) * (place == one) for place in found] for one in range(len(knob.values))]
        return np.array(columns).T

    def stepped(self, configuration: Configuration, index: int, by: int) -> Configuration | None:
        """The configuration with one knob so many places further; None where there is no such place."""
        place = self._places[index][configuration[index]] + by
        if not 0 <= place < len(self.knobs[index].values):
            return None
        stepped = (*configuration[:index], self.knobs[index].values[place], *configuration[index + 1 :])
        return self.canonical(stepped)

    def neighbours(self, configuration: Configuration) -> Iterator[Configuration]:
        """Those that differ in one knob: by a place if its values are ordered, in any other value if not."""
        for index, knob in enumerate(self.knobs):
            reach = 1 if knob.ordered else len(knob.values)
            for by in range(-reach, reach + 1):
                other = self.stepped(configuration, index, by)
                if other is not None and other != configuration:
                    yield other

    def asks_as_much(self, configuration: Configuration, other: Configuration) -> bool:
        """Whether it needs at least the memory of the other: equal but for larger values of what raises that."""
        mine, others = self.places(configuration), self.places(other)
        return all(
            one >= two if "memory" in knob.raises else one == two
            for knob, one, two in zip(self.knobs, mine, others, strict=True)
        )
