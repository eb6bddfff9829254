"""What a model counts: the measurements of a scrape, values of instruments and their labels, and the statistics of a
version since it was loaded, with the names of v2's statistics extension.

Instruments are plain numbers of one event loop: recording takes no lock and about a tenth of a microsecond. Names,
types and help of the metrics are in telemetry/metric_families.py.
"""

import math
import time
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate, zip_longest
from typing import Literal, NamedTuple, TypeAlias

import msgspec

_ACCURACY = 0.01
_BUCKET = math.log((1 + _ACCURACY) / (1 - _ACCURACY))
_WINDOW = 60.0
"""Seconds that quantiles look back, give or take one slice."""

_SLICES = 6
_LEAST = 1e-3
"""Lesser values count as this."""


def log_bucket(value: float) -> int:
    """The bucket of a value by its logarithm, in which values differ by a fiftieth at most (Masson, Rim and Lee,
    DDSketch, VLDB 2019)."""
    return math.ceil(math.log(max(value, _LEAST)) / _BUCKET)


def log_bucket_value(bucket: int) -> float:
    """The middle of all values of a bucket, which is right to a hundredth for each."""
    return 2 * math.exp(bucket * _BUCKET) / (math.exp(_BUCKET) + 1)


class Histogram:
    """Observations by upper bound: `counts[i]` of them were at most `bounds[i]`, the last ones above all bounds."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class TimeInState:
    """Seconds that things were in a state, of all of them together and until now; `add` says that so many more are in
    it, or fewer."""

    __slots__ = ("_at", "_clock", "_count", "_seconds")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._count = 0
        self._at = clock()
        self._seconds = 0.0

    def add(self, change: int) -> None:
        now = self._clock()
        self._seconds += self._count * (now - self._at)
        self._at = now
        self._count += change

    def add_seconds(self, seconds: float) -> None:
        """Those that another process has measured."""
        self._seconds += seconds

    @property
    def seconds(self) -> float:
        self.add(0)
        return self._seconds


class SequenceState(StrEnum):
    """What a sequence of a language model has from the engine, or waits for: it runs; it waits for a row; for cache
    blocks; for blocks because it was preempted; for tokens of a step; or until a prefix that it shares is computed, or
    fewer adapters run."""

    RUNNING = "running"
    NO_ROW = "no_row"
    NO_BLOCKS = "no_blocks"
    PREEMPTED = "preempted"
    NO_TOKENS = "no_tokens"
    PARKED = "parked"


class _TimeSlice(NamedTuple):
    """`counts` of values by their logarithm; `number`: of the slice since the clock's beginning."""

    number: int
    counts: Counter[int]


class QuantileSummary:
    """Quantiles of the last minute's values: Prometheus's summary, in memory that does not grow with the traffic.

    Values are counted by `log_bucket`, so a quantile is right to a hundredth of its value. `count` and `sum` are of
    everything since the start; `quantiles` are from 0 to 1.
    """

    __slots__ = ("_clock", "_slices", "count", "quantiles", "sum")

    def __init__(self, quantiles: Sequence[float], clock: Callable[[], float] = time.monotonic) -> None:
        self.quantiles = tuple(quantiles)
        self.count = 0
        self.sum = 0.0
        self._clock = clock
        self._slices: deque[_TimeSlice] = deque()

    def observe(self, value: float) -> None:
        self.count += 1
        self.sum += value
        self._turn()
        self._slices[-1].counts[log_bucket(value)] += 1

    def values(self) -> list[float]:
        """Each quantile; NaN if nothing was observed in the last minute."""
        self._turn()
        counts = sum((each.counts for each in self._slices), Counter[int]())
        if not counts:
            return [math.nan] * len(self.quantiles)
        keys = sorted(counts)
        ranks = list(accumulate(counts[key] for key in keys))
        found = [keys[bisect_right(ranks, quantile * (ranks[-1] - 1))] for quantile in self.quantiles]
        return [log_bucket_value(key) for key in found]

    def _turn(self) -> None:
        """Begin the current slice, and drop those that are too old."""
        now = int(self._clock() * _SLICES / _WINDOW)
        while self._slices and self._slices[0].number <= now - _SLICES:
            self._slices.popleft()
        if not self._slices or self._slices[-1].number != now:
            self._slices.append(_TimeSlice(now, Counter()))


Labels: TypeAlias = Mapping[str, str]
MetricType: TypeAlias = Literal["counter", "gauge", "histogram", "summary"]


class Reading(NamedTuple):
    """One series at a scrape; `labels` are in addition to those of its measurement."""

    family: str
    value: float | Histogram | QuantileSummary
    labels: Labels = {}


class MetricFamily(NamedTuple):
    """A metric by its name on the wire, counters with or without `_total`."""

    name: str
    kind: MetricType
    help: str


class Measurement(NamedTuple):
    """Readings of one model, or of the server; `labels` are common to all of them."""

    labels: Labels
    readings: Sequence[Reading]


@dataclass(frozen=True, slots=True)
class StatisticDuration:
    """A count of events and the nanoseconds that they took together."""

    count: int = 0
    ns: int = 0


NO_DURATION = StatisticDuration()


class InferenceStatistics(NamedTuple):
    """Statistics of requests: a successful one counts in `success`, `queue` and, unless a cache had it, `compute_*`."""

    success: StatisticDuration = NO_DURATION
    fail: StatisticDuration = NO_DURATION
    queue: StatisticDuration = NO_DURATION
    compute_input: StatisticDuration = NO_DURATION
    compute_infer: StatisticDuration = NO_DURATION
    compute_output: StatisticDuration = NO_DURATION
    cache_hit: StatisticDuration = NO_DURATION
    cache_miss: StatisticDuration = NO_DURATION


class BatchStatistics(NamedTuple):
    """Statistics of the executions with `batch_size` requests' items together."""

    batch_size: int
    compute_input: StatisticDuration = NO_DURATION
    compute_infer: StatisticDuration = NO_DURATION
    compute_output: StatisticDuration = NO_DURATION


class ResponseStatistics(NamedTuple):
    """Statistics of the responses at one place of a decoupled model's streams: the first ones, the second ones..."""

    compute_infer: StatisticDuration = NO_DURATION
    compute_output: StatisticDuration = NO_DURATION
    success: StatisticDuration = NO_DURATION
    fail: StatisticDuration = NO_DURATION
    empty_response: StatisticDuration = NO_DURATION
    cancel: StatisticDuration = NO_DURATION


class MemoryUsage(NamedTuple):
    """Bytes that a model holds. `type`: GPU, CPU or CPU_PINNED; `id`: of the device."""

    type: str
    id: int
    byte_size: int


@dataclass(frozen=True, slots=True)
class VersionStatistics:
    """Statistics of a version. `last_inference`: milliseconds since the epoch, 0 if there was none. `inference_count`
    counts the items of batches, `execution_count` the batches. `responses` by their place, as a string. `explain`: how
    often requests that might have shared an execution did not, by the reason."""

    last_inference: int = 0
    inference_count: int = 0
    execution_count: int = 0
    inference: InferenceStatistics = field(default_factory=InferenceStatistics)
    batches: tuple[BatchStatistics, ...] = ()
    responses: Mapping[str, ResponseStatistics] = field(default_factory=dict)
    memory: tuple[MemoryUsage, ...] = ()
    explain: Mapping[str, int] = field(default_factory=dict)


class ModelStatistics(NamedTuple):
    """The statistics of one version of a model; or those of a route's requests that it served, by the route's name.
    `arm`: then model and version, as in `llama:2`."""

    name: str
    version: str
    statistics: VersionStatistics
    arm: str = ""


class DrafterTotals(msgspec.Struct, array_like=True):
    """What one drafter did for a language model: drafts of a sequence that began with its tokens and were verified,
    tokens of it that were verified, and those that were accepted, in all and by their place in the draft; the seconds
    that it took."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    seconds: float = 0.0
    accepted_by_place: list[int] = []

    def copied(self) -> "DrafterTotals":
        """The same numbers, which no longer change."""
        tokens = self.drafts, self.draft_tokens, self.accepted_tokens
        return DrafterTotals(*tokens, self.seconds, self.accepted_by_place[:])

    def count(self, first: int, end: int, accepted: int) -> None:
        """The places `first` to `end` of a draft were its own; the first `accepted` of the draft were right."""
        self.drafts += first == 0
        self.draft_tokens += end - first
        self.accepted_by_place += [0] * (end - len(self.accepted_by_place))
        for place in range(first, min(accepted, end)):
            self.accepted_tokens += 1
            self.accepted_by_place[place] += 1


def sum_by_drafter(counted: Iterable[Mapping[str, DrafterTotals]]) -> dict[str, DrafterTotals]:
    """The sums, by the drafters' names; values of their own."""
    found: dict[str, DrafterTotals] = {}
    for name, one in (pair for each in counted for pair in each.items()):
        other = found.get(name, DrafterTotals())
        places = [*map(sum, zip_longest(one.accepted_by_place, other.accepted_by_place, fillvalue=0))]
        tokens = one.draft_tokens + other.draft_tokens, one.accepted_tokens + other.accepted_tokens
        found[name] = DrafterTotals(one.drafts + other.drafts, *tokens, one.seconds + other.seconds, places)
    return found
