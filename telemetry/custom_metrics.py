"""Metrics that Python models make themselves: families by name, shared by all models. For the event loop."""

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, TypeAlias

from ..core.errors import AlreadyExists, InvalidArgument
from ..core.metrics import Histogram, MetricFamily, Reading
from .metric_families import CHARONIA_FAMILIES, TRITON_FAMILIES, VLLM_FAMILIES

MetricKind: TypeAlias = Literal["counter", "gauge", "histogram"]

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_RESERVED = {family.name for family in (*CHARONIA_FAMILIES, *TRITON_FAMILIES, *VLLM_FAMILIES)}
_DEFAULT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""The default bounds of histograms, those of Prometheus's own clients."""

Labels: TypeAlias = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class CustomSeries:
    """One series. `users` is the number of metrics in processes that stand for it; without any it is removed."""

    labels: Labels
    value: float | Histogram
    users: int = 0


@dataclass(slots=True)
class CustomFamily:
    name: str
    description: str
    kind: MetricKind
    series: dict[Labels, CustomSeries] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Use:
    owner: Hashable
    family: CustomFamily
    series: CustomSeries


class CustomMetrics:
    """All families. An `owner`, which is a process, has its series until it removes them or ends; owners of the same
    labels share a series. Models may not take the `reserved` names."""

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self._reserved = _RESERVED.union(reserved)
        self._families: dict[str, CustomFamily] = {}
        self._uses: dict[int, _Use] = {}
        self._numbers = count()

    def __iter__(self) -> Iterator[CustomFamily]:
        return (family for family in self._families.values() if family.series)

    def readings(self) -> Iterator[tuple[MetricFamily, list[Reading]]]:
        """The series for a scrape, by family."""
        for family in self:
            all_series = family.series.values()
            readings = [Reading(family.name, series.value, dict(series.labels)) for series in all_series]
            yield MetricFamily(family.name, family.kind, family.description), readings

    def add_family(self, name: str, description: str, kind: MetricKind) -> None:
        """Raises `InvalidArgument` for a name that Prometheus refuses, `AlreadyExists` for one of another kind."""
        if not _NAME.fullmatch(name) or name in self._reserved:
            raise InvalidArgument(f"'{name}' is no name for a metric of a model")
        family = self._families.setdefault(name, CustomFamily(name, description, kind))
        if family.kind != kind:
            raise AlreadyExists(f"metric family '{name}' is a {family.kind} already, not a {kind}")

    def add_metric(self, owner: Hashable, name: str, labels: Mapping[str, str], buckets: Sequence[float] | None) -> int:
        """The number of a series, which is made if new. Raises `InvalidArgument` for wrong labels or buckets."""
        family = self._families[name]
        for label in labels:
            if not _LABEL.fullmatch(label):
                raise InvalidArgument(f"'{label}' is no name of a label")
        if buckets is not None and family.kind != "histogram":
            raise InvalidArgument(f"metric family '{name}' is a {family.kind}, which has no buckets")
        bounds = tuple(_DEFAULT_BUCKETS if buckets is None else buckets)
        if list(bounds) != sorted(set(bounds)):
            raise InvalidArgument(f"metric family '{name}': buckets must ascend, got {list(bounds)}")
        key = tuple(sorted(labels.items()))
        value = Histogram(bounds) if family.kind == "histogram" else 0.0
        series = family.series.setdefault(key, CustomSeries(key, value))
        series.users += 1
        number = next(self._numbers)
        self._uses[number] = _Use(owner, family, series)
        return number

    def update(self, owner: Hashable, number: int, operation: str, value: float) -> None:
        """Increment, set, observe or remove; without effect on a removed series."""
        use = self._uses.get(number)
        if use is None or use.owner is not owner:
            return
        series = use.series
        if isinstance(series.value, Histogram):
            if operation == "observe":
                series.value.observe(value)
        elif operation == "increment":
            series.value += value
        elif operation == "set":
            series.value = value
        if operation == "remove":
            self._remove(number)

    def value(self, number: int) -> float:
        value = self._uses[number].series.value
        assert not isinstance(value, Histogram)
        return value

    def remove_all(self, owner: Hashable) -> None:
        for number in [number for number, use in self._uses.items() if use.owner is owner]:
            self._remove(number)

    def _remove(self, number: int) -> None:
        use = self._uses.pop(number)
        use.series.users -= 1
        if not use.series.users:
            del use.family.series[use.series.labels]
