"""The configurations that a search may choose from: parameters with their values, and what is known of them beforehand.

Knows which configurations cannot differ, and which cannot do what a smaller one could not; measures nothing.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...core.errors import InvalidArgument
from .search_goal import Configuration, ParameterValue

_ENUMERATED, _DRAWN = 4096, 1024
"""Up to so many configurations are listed; of more, so many are drawn."""


Canonicalize: TypeAlias = Callable[[Mapping[str, ParameterValue]], Mapping[str, ParameterValue]]
"""Makes settings the ones that stand for all that nothing tells from them."""


class TunedParameter(msgspec.Struct, frozen=True, kw_only=True):
    """One setting. `values`: those to try, in their order if they are `ordered`; `now`: the index of the one that holds
    without a search, or is nearest to it. `monotone_metrics`: those that are never lower at a larger value, all else
    equal; the search trusts that of memory, and tries that of the others before it believes it."""

    name: str
    values: tuple[ParameterValue, ...]
    now: int = 0
    ordered: bool = True
    monotone_metrics: tuple[str, ...] = ()


class SearchSpace:
    """All combinations of the parameters' values. `canonicalize`: from a configuration's settings to those that nothing
    tells from it, one and the same for all of them.

    Raises:
        InvalidArgument: there is nothing to choose from.
    """

    def __init__(
        self,
        parameters: Sequence[TunedParameter],
        canonicalize: Canonicalize = lambda settings: settings,
        seed: int = 0,
    ) -> None:
        if not parameters:
            raise InvalidArgument("there is no knob to turn: name some with --sweep")
        self.parameters = tuple(parameters)
        self._canonicalize = canonicalize
        self._random = np.random.default_rng(seed)
        self._indices = [{value: index for index, value in enumerate(parameter.values)} for parameter in parameters]
        self.combinations = math.prod(len(parameter.values) for parameter in parameters)
        self.start = self.canonical(tuple(parameter.values[parameter.now] for parameter in parameters))
        drawn = self._listed() if self.combinations <= _ENUMERATED else self._drawn(_DRAWN)
        self.configurations = list(dict.fromkeys([self.start, *map(self.canonical, drawn)]))

    @property
    def size(self) -> int:
        """Different configurations; of a space too large to list, all combinations."""
        return len(self.configurations) if self.combinations <= _ENUMERATED else self.combinations

    def _listed(self) -> Iterator[Configuration]:
        return product(*(parameter.values for parameter in self.parameters))

    def _drawn(self, count: int) -> Iterator[Configuration]:
        sizes = [len(parameter.values) for parameter in self.parameters]
        for indices in self._random.integers(0, sizes, (count, len(sizes))).tolist():
            yield tuple(parameter.values[index] for parameter, index in zip(self.parameters, indices, strict=True))

    def settings(self, configuration: Configuration) -> dict[str, ParameterValue]:
        return {parameter.name: value for parameter, value in zip(self.parameters, configuration, strict=True)}

    def canonical(self, configuration: Configuration) -> Configuration:
        """The one of those that cannot differ which stands for them."""
        settings = self._canonicalize(self.settings(configuration))
        return tuple(settings[parameter.name] for parameter in self.parameters)

    def indices(self, configuration: Configuration) -> tuple[int, ...]:
        """The index of each value among its parameter's."""
        return tuple(indices[value] for indices, value in zip(self._indices, configuration, strict=True))

    def points(self, configurations: Sequence[Configuration]) -> NDArray[np.float64]:
        """[configurations, dimensions]: from 0 to 1 for a parameter whose values are ordered, one dimension a value for
        others, so that all of those are equally far apart."""
        columns: list[list[float]] = []
        for number, parameter in enumerate(self.parameters):
            column = [self._indices[number][configuration[number]] for configuration in configurations]
            if parameter.ordered:
                columns.append([index / max(1, len(parameter.values) - 1) for index in column])
            else:
                values = range(len(parameter.values))
                columns += [[math.sqrt(0.5) * (index == value) for index in column] for value in values]
        return np.array(columns).T

    def stepped(self, configuration: Configuration, number: int, by: int) -> Configuration | None:
        """The configuration with the parameter of this number so many values further; None where there is none."""
        parameter = self.parameters[number]
        index = self._indices[number][configuration[number]] + by
        if not 0 <= index < len(parameter.values):
            return None
        return self.canonical((*configuration[:number], parameter.values[index], *configuration[number + 1 :]))

    def neighbours(self, configuration: Configuration) -> Iterator[Configuration]:
        """The configurations that differ in one parameter: by the next value if they are ordered, in any other value if
        not."""
        for number, parameter in enumerate(self.parameters):
            reach = 1 if parameter.ordered else len(parameter.values)
            for by in range(-reach, reach + 1):
                other = self.stepped(configuration, number, by)
                if other is not None and other != configuration:
                    yield other

    def asks_as_much(self, configuration: Configuration, other: Configuration) -> bool:
        """Whether it needs at least the memory of the other: equal but for larger values of what raises that."""
        return all(
            index >= others_index if "memory" in parameter.monotone_metrics else index == others_index
            for parameter, index, others_index in zip(
                self.parameters, self.indices(configuration), self.indices(other), strict=True
            )
        )
