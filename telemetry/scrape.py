"""Two looks at a server's metrics, and what grew between them: as Prometheus's `increase`, for one model at a time.

Knows the names of what identifies models and time, and no other.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from ..core.errors import InvalidArgument

_UPTIME, _STARTED = "charonia_uptime_seconds", "charonia_start_time_seconds"
_READY = "charonia_model_ready"

SeriesLabels: TypeAlias = frozenset[tuple[str, str]]
Scrape: TypeAlias = Mapping[str, Mapping[str, Mapping[SeriesLabels, float]]]
"""The samples of one look: by name on the wire, by model, and by their labels. The server's own are those of model
""."""


def read_scrape(metrics: Iterable[Metric]) -> Scrape:
    found: dict[str, dict[str, dict[SeriesLabels, float]]] = {}
    for metric in metrics:
        for sample in metric.samples:
            # The parser puts `_total` on every counter, Triton on none.
            name = sample.name.removesuffix("_total") if sample.name.startswith("nv_") else sample.name
            models = found.setdefault(name, defaultdict(dict))
            models[sample.labels.get("model", "")][frozenset(sample.labels.items())] = sample.value
    return found


def parse_scrape(text: str, source: str) -> Scrape:
    """Raises `InvalidArgument` for a text that is not in Prometheus's format, or not a server's; `source` names it."""
    try:
        found = read_scrape(text_string_to_metric_families(text))
    except (ValueError, KeyError, IndexError) as error:
        raise InvalidArgument(f"{source}: this is no text of metrics: {error}") from None
    if _UPTIME not in found:
        raise InvalidArgument(f"{source}: {_UPTIME} is missing: these are no metrics of a charonia server")
    return found


def require_in_order(before: Scrape, after: Scrape) -> None:
    """Raises `InvalidArgument` unless `after` is a later look at the same server, or at one that was started in its
    place meanwhile. One that does not tell when it started is believed."""
    (first, earlier), (second, later) = ((_own(look, _STARTED), _own(look, _UPTIME)) for look in (before, after))
    if first == second != 0 and later <= earlier:
        raise InvalidArgument("the second scrape is not later than the first: the order is before, then after")
    if 0 < second < first + earlier and second != first:
        message = "the second scrape is of another server, which ran when the first was taken, or is the earlier one"
        raise InvalidArgument(message)


def _own(look: Scrape, family: str) -> float:
    """The value of the server's own gauge; 0 where there is none."""
    return sum(look.get(family, {}).get("", {}).values())


class ModelId(NamedTuple):
    name: str
    version: str


class Interval:
    """The time between two scrapes of one server; `since_start`: there was one scrape alone, or the server was started
    between them, and it is the time since the start."""

    def __init__(self, before: Scrape | None, after: Scrape) -> None:
        earlier, uptime = (0.0 if look is None else _own(look, _UPTIME) for look in (before, after))
        self.since_start = before is None or earlier >= uptime
        self._before: Scrape = {} if before is None or self.since_start else before
        self._after = after
        self.seconds = max(uptime if self.since_start else uptime - earlier, 1e-9)

    def models(self) -> list[ModelId]:
        """The models that there are now, in order."""
        found = (dict(labels) for series in self._after.get(_READY, {}).values() for labels in series)
        return sorted(ModelId(labels.get("model", ""), labels.get("version", "")) for labels in found)

    def has(self, family: str) -> bool:
        """Whether the last scrape has it."""
        return family in self._after

    def grown(self, family: str, model: str = "", **labels: str) -> float:
        """What a counter grew by, summed over a model's series with these labels. A smaller one than before began
        anew."""
        return sum(grown for _, grown in self._growth(family, model, labels))

    def grown_by(self, family: str, label: str, model: str = "", **labels: str) -> dict[str, float]:
        """The same for each value of one label."""
        found: dict[str, float] = defaultdict(float)
        for key, grown in self._growth(family, model, labels):
            found[dict(key).get(label, "")] += grown
        return found

    def _growth(self, family: str, model: str, labels: Mapping[str, str]) -> Iterator[tuple[SeriesLabels, float]]:
        earlier = self._before.get(family, {}).get(model, {})
        for key, value in _matching(self._after, family, model, labels):
            was = earlier.get(key, 0.0)
            yield key, value - was if value >= was else value

    def gauge(self, family: str, model: str = "", **labels: str) -> float:
        """The mean of the scrapes that have it, summed over a model's series with these labels."""
        looks = [[value for _, value in _matching(look, family, model, labels)] for look in (self._before, self._after)]
        there = [sum(values) for values in looks if values]
        return sum(there) / len(there) if there else 0.0

    def last_by(self, family: str, label: str, model: str = "", **labels: str) -> dict[str, float]:
        """The last scrape's values, by one label."""
        return {dict(key).get(label, ""): value for key, value in _matching(self._after, family, model, labels)}


def _matching(look: Scrape, family: str, model: str, labels: Mapping[str, str]) -> Iterator[tuple[SeriesLabels, float]]:
    wanted = frozenset(labels.items())
    return ((key, value) for key, value in look.get(family, {}).get(model, {}).items() if wanted <= key)


class ModelInterval:
    """An interval as one version of a model saw it; the methods are `Interval`'s."""

    def __init__(self, interval: Interval, model: ModelId) -> None:
        self.whole, self.model = interval, model
        self._labels = {"model": model.name, "version": model.version}

    def grown(self, family: str, **labels: str) -> float:
        return self.whole.grown(family, **self._labels, **labels)

    def grown_by(self, family: str, label: str, **labels: str) -> dict[str, float]:
        return self.whole.grown_by(family, label, **self._labels, **labels)

    def gauge(self, family: str, **labels: str) -> float:
        return self.whole.gauge(family, **self._labels, **labels)

    def last_by(self, family: str, label: str) -> dict[str, float]:
        return self.whole.last_by(family, label, **self._labels)
