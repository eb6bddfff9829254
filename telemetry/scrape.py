"""Two scrapes of a server, and what grew between them, as Prometheus's `increase`, for one model at a time."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple, TypeAlias

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from ..core.errors import InvalidArgument

_UPTIME, _STARTED = "charonia_uptime_seconds", "charonia_start_time_seconds"
_READY = "charonia_model_ready"

SeriesLabels: TypeAlias = frozenset[tuple[str, str]]
Scrape: TypeAlias = Mapping[str, Mapping[str, Mapping[SeriesLabels, float]]]
"""The samples of one scrape by name on the wire, model and labels. Model "" has the server's own."""


def read_scrape(metrics: Iterable[Metric]) -> Scrape:
    scrape: dict[str, dict[str, dict[SeriesLabels, float]]] = {}
    for metric in metrics:
        for sample in metric.samples:
            # The parser puts `_total` on every counter, Triton on none.
            name = sample.name.removesuffix("_total") if sample.name.startswith("nv_") else sample.name
            models = scrape.setdefault(name, defaultdict(dict))
            models[sample.labels.get("model", "")][frozenset(sample.labels.items())] = sample.value
    return scrape


def parse_scrape(text: str, source: str) -> Scrape:
    """Raises `InvalidArgument` for a text that is not in Prometheus's format, or not a server's; `source` names it."""
    try:
        scrape = read_scrape(text_string_to_metric_families(text))
    except (ValueError, KeyError, IndexError) as error:
        raise InvalidArgument(f"{source}: this is no text of metrics: {error}") from None
    if _UPTIME not in scrape:
        raise InvalidArgument(f"{source}: {_UPTIME} is missing: these are no metrics of a charonia server")
    return scrape


def require_in_order(before: Scrape, after: Scrape) -> None:
    """Raises `InvalidArgument` unless `after` is a later scrape of the same server, or of one that replaced it. A
    server that does not tell its start is believed."""
    (first, earlier), (second, later) = ((_own(look, _STARTED), _own(look, _UPTIME)) for look in (before, after))
    if first == second != 0 and later <= earlier:
        raise InvalidArgument("the second scrape is not later than the first: the order is before, then after")
    if 0 < second < first + earlier and second != first:
        message = "the second scrape is of another server, which ran when the first was taken, or is the earlier one"
        raise InvalidArgument(message)


def _own(look: Scrape, family: str) -> float:
    """The value of the server's own gauge; 0 if absent."""
    return sum(look.get(family, {}).get("", {}).values())


class ModelId(NamedTuple):
    name: str
    version: str


class Interval:
    """The time between two scrapes of one server. `since_start`: the time since the server's start, because there is
    one scrape, or the server was restarted between them."""

    def __init__(self, before: Scrape | None, after: Scrape) -> None:
        earlier, uptime = (0.0 if look is None else _own(look, _UPTIME) for look in (before, after))
        self.since_start = before is None or earlier >= uptime
        self._before: Scrape = {} if before is None or self.since_start else before
        self._after = after
        self.seconds = max(uptime if self.since_start else uptime - earlier, 1e-9)

    def models(self) -> list[ModelId]:
        labels_of_models = (dict(labels) for series in self._after.get(_READY, {}).values() for labels in series)
        return sorted(ModelId(labels.get("model", ""), labels.get("version", "")) for labels in labels_of_models)

    def has(self, family: str) -> bool:
        return family in self._after

    def grown(self, family: str, model: str = "", **labels: str) -> float:
        """What a counter grew by, summed over a model's series with these labels. One that shrank was reset."""
        return sum(grown for _, grown in self._growth(family, model, labels))

    def grown_by(self, family: str, label: str, model: str = "", **labels: str) -> dict[str, float]:
        """As `grown`, for each value of one label."""
        growth: dict[str, float] = defaultdict(float)
        for key, grown in self._growth(family, model, labels):
            growth[dict(key).get(label, "")] += grown
        return growth

    def _growth(self, family: str, model: str, labels: Mapping[str, str]) -> Iterator[tuple[SeriesLabels, float]]:
        earlier = self._before.get(family, {}).get(model, {})
        for key, value in _matching(self._after, family, model, labels):
            was = earlier.get(key, 0.0)
            yield key, value - was if value >= was else value

    def gauge(self, family: str, model: str = "", **labels: str) -> float:
        """The mean over the scrapes that have it, summed over a model's series with these labels."""
        looks = [[value for _, value in _matching(look, family, model, labels)] for look in (self._before, self._after)]
        sums = [sum(values) for values in looks if values]
        return sum(sums) / len(sums) if sums else 0.0

    def last_by(self, family: str, label: str, model: str = "", **labels: str) -> dict[str, float]:
        return {dict(key).get(label, ""): value for key, value in _matching(self._after, family, model, labels)}


def _matching(look: Scrape, family: str, model: str, labels: Mapping[str, str]) -> Iterator[tuple[SeriesLabels, float]]:
    label_set = frozenset(labels.items())
    return ((key, value) for key, value in look.get(family, {}).get(model, {}).items() if label_set <= key)


class ModelInterval:
    """An interval of one version of a model. Its functions are `Interval`'s, for this version's series alone."""

    def __init__(self, interval: Interval, model: ModelId) -> None:
        self.whole = interval
        self.model = model
        self.grown = partial(interval.grown, model=model.name, version=model.version)
        self.grown_by = partial(interval.grown_by, model=model.name, version=model.version)
        self.gauge = partial(interval.gauge, model=model.name, version=model.version)
        self.last_by = partial(interval.last_by, model=model.name, version=model.version)
