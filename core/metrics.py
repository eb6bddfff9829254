"""What models count: readings for a scrape, and statistics with the names of v2's statistics extension. Instruments are
plain numbers of one event loop. Their metrics are named in telemetry/metric_families.py."""

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
    """The bucket of a value by its logarithm. Values of one bucket differ by 2 % at most (Masson, Rim and Lee,
    DDSketch, VLDB 2019)."""
    return math.ceil(math.log(max(value, _LEAST)) / _BUCKET)


def log_bucket_value(bucket: int) -> float:
    """The middle of a bucket, within 1 % of all its values."""
    return 2 * math.exp(bucket * _BUCKET) / (math.exp(_BUCKET) + 1)


class Histogram:
    """Counts of observations by upper bound: `counts[i]` were at most `bounds[i]`; the last count is above all
    bounds."""

    __slots__ = ("_bucket", "_last", "bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self._last, self._bucket = math.nan, 0

    def observe(self, value: float, times: int = 1) -> None:
        if value != self._last:  # all streams of a step bring the same
            self._last, self._bucket = value, bisect_left(self.bounds, value)
        self.counts[self._bucket] += times
        self.sum += value * times


class TimeInState:
    """Seconds that things have spent in a state, added up over all of them. `add` changes the number of things in
    it."""

    __slots__ = ("_at", "_clock", "_seconds", "count")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.count = 0
        """Things that are in it now."""
        self._at = clock()
        self._seconds = 0.0

    def add(self, change: int) -> None:
        now = self._clock()
        self._seconds += self.count * (now - self._at)
        self._at = now
        self.count += change

    def add_seconds(self, seconds: float) -> None:
        """Add seconds that another process measured."""
        self._seconds += seconds

    @property
    def seconds(self) -> float:
        self.add(0)
        return self._seconds


class SequenceState(StrEnum):
    """Whether a sequence of a language model runs, or what it waits for: a row, cache blocks, blocks after a
    preemption, tokens of a step, or a prefix that is being computed or an adapter's place (`PARKED`)."""

    RUNNING = "running"
    NO_ROW = "no_row"
    NO_BLOCKS = "no_blocks"
    PREEMPTED = "preempted"
    NO_TOKENS = "no_tokens"
    PARKED = "parked"


class _TimeSlice(NamedTuple):
    """Counts of values by log bucket in one slice of time, which is numbered from the clock's beginning."""

    number: int
    counts: Counter[int]


class QuantileSummary:
    """Quantiles (0 to 1) of the last minute's values: Prometheus's summary, in bounded memory.

    Values are counted by `log_bucket`, so a quantile is within 1 %. `count` and `sum` are of all values since the
    start.
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
        counts = sum((time_slice.counts for time_slice in self._slices), Counter[int]())
        if not counts:
            return [math.nan] * len(self.quantiles)
        keys = sorted(counts)
        ranks = list(accumulate(counts[key] for key in keys))
        buckets = [keys[bisect_right(ranks, quantile * (ranks[-1] - 1))] for quantile in self.quantiles]
        return [log_bucket_value(key) for key in buckets]

    def _turn(self) -> None:
        """Begin the current slice, and drop outdated ones."""
        now = int(self._clock() * _SLICES / _WINDOW)
        while self._slices and self._slices[0].number <= now - _SLICES:
            self._slices.popleft()
        if not self._slices or self._slices[-1].number != now:
            self._slices.append(_TimeSlice(now, Counter()))


Labels: TypeAlias = Mapping[str, str]
MetricType: TypeAlias = Literal["counter", "gauge", "histogram", "summary"]


class Reading(NamedTuple):
    """One series at a scrape; its labels are added to its measurement's."""

    family: str
    value: float | Histogram | QuantileSummary
    labels: Labels = {}


class MetricFamily(NamedTuple):
    """A metric by its name on the wire; counters may lack `_total`."""

    name: str
    kind: MetricType
    help: str


class Measurement(NamedTuple):
    """Readings of one model or of the server, which share `labels`."""

    labels: Labels
    readings: Sequence[Reading]


@dataclass(frozen=True, slots=True)
class StatisticDuration:
    """A count of events and the nanoseconds that they took in all."""

    count: int = 0
    ns: int = 0


NO_DURATION = StatisticDuration()


class InferenceStatistics(NamedTuple):
    """Statistics of requests. A successful one counts in `success`, `queue` and, unless a cache answered it,
    `compute_*`."""

    success: StatisticDuration = NO_DURATION
    fail: StatisticDuration = NO_DURATION
    queue: StatisticDuration = NO_DURATION
    compute_input: StatisticDuration = NO_DURATION
    compute_infer: StatisticDuration = NO_DURATION
    compute_output: StatisticDuration = NO_DURATION
    cache_hit: StatisticDuration = NO_DURATION
    cache_miss: StatisticDuration = NO_DURATION


class BatchStatistics(NamedTuple):
    """Statistics of the executions that had `batch_size` items."""

    batch_size: int
    compute_input: StatisticDuration = NO_DURATION
    compute_infer: StatisticDuration = NO_DURATION
    compute_output: StatisticDuration = NO_DURATION


class ResponseStatistics(NamedTuple):
    """Statistics of the responses at one index of a decoupled model's streams."""

    compute_infer: StatisticDuration = NO_DURATION
    compute_output: StatisticDuration = NO_DURATION
    success: StatisticDuration = NO_DURATION
    fail: StatisticDuration = NO_DURATION
    empty_response: StatisticDuration = NO_DURATION
    cancel: StatisticDuration = NO_DURATION


class MemoryUsage(NamedTuple):
    """Bytes that a model holds on device `id` of a type: GPU, CPU or CPU_PINNED."""

    type: str
    id: int
    byte_size: int


@dataclass(frozen=True, slots=True)
class VersionStatistics:
    """Statistics of a version since it was loaded."""

    last_inference: int = 0
    """Milliseconds since the epoch; 0 before the first."""
    inference_count: int = 0
    """The items of all batches."""
    execution_count: int = 0
    """The number of batches."""
    inference: InferenceStatistics = field(default_factory=InferenceStatistics)
    batches: tuple[BatchStatistics, ...] = ()
    responses: Mapping[str, ResponseStatistics] = field(default_factory=dict)
    """By their index in the stream, as a string."""
    memory: tuple[MemoryUsage, ...] = ()
    explain: Mapping[str, int] = field(default_factory=dict)
    """How often requests that might have shared an execution did not, by reason."""


class ModelStatistics(NamedTuple):
    """Statistics of a model's version; or, under a route's name, of the route's requests that one version (`arm`, as in
    `llama:2`) served."""

    name: str
    version: str
    statistics: VersionStatistics
    arm: str = ""


class DrafterTotals(msgspec.Struct, array_like=True):
    """What one drafter did for a language model."""

    drafts: int = 0
    """Verified drafts that began with its tokens."""
    draft_tokens: int = 0
    """Its tokens that were verified."""
    accepted_tokens: int = 0
    """Its tokens that were accepted."""
    seconds: float = 0.0
    """The time that it took."""
    accepted_by_place: list[int] = []
    """Its accepted tokens by their place in the draft."""

    def copied(self) -> "DrafterTotals":
        """A copy, which no longer changes."""
        tokens = self.drafts, self.draft_tokens, self.accepted_tokens
        return DrafterTotals(*tokens, self.seconds, self.accepted_by_place[:])

    def count(self, first: int, end: int, accepted: int) -> None:
        """Count the places `first` to `end` of a draft as its own; the first `accepted` tokens of the draft were
        right."""
        self.drafts += first == 0
        self.draft_tokens += end - first
        self.accepted_by_place += [0] * (end - len(self.accepted_by_place))
        for place in range(first, min(accepted, end)):
            self.accepted_tokens += 1
            self.accepted_by_place[place] += 1


class FetchDecision(StrEnum):
    """What became of a request whose prefix a directory had: its blocks were fetched, computing them was expected to be
    faster, they came too late, or no other fetch had come for long."""

    FETCHED = "fetched"
    COMPUTED = "computed"
    LATE = "late"
    STALLED = "stalled"


class ImageTotals(msgspec.Struct, array_like=True):
    """What ranks have done with the files of a directory of cached blocks and states; seconds are those of their
    threads."""

    read: int = 0
    missing: int = 0
    damaged: int = 0
    """Files that were none of ours, or had a wrong checksum."""
    read_failures: int = 0
    """Files that the system refused."""
    read_bytes: int = 0
    read_seconds: float = 0.0
    written: int = 0
    written_bytes: int = 0
    write_seconds: float = 0.0
    write_failures: int = 0
    unwritten: int = 0
    """Images that were not written, because too many waited."""
    evicted: int = 0
    """Files that were removed to make room."""

    def add(self, other: "ImageTotals") -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def by_name(self) -> dict[str, float]:
        return msgspec.structs.asdict(self)


class EngineTotals(msgspec.Struct, array_like=True):
    """What engine cores have counted since they started, the warm-up left out unless a field says otherwise. The
    scheduler counts in one; the step loop adds what other parts of a core counted, and sends it with each step."""

    preemptions: int = 0
    """Running sequences that were put back in line for want of blocks."""
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """Prompt tokens found there."""
    restored: int = 0
    """Restored tokens: those that were in the host's memory."""
    grammars_compiled: int = 0
    grammar_seconds: float = 0.0
    """Spent compiling."""
    grammar_hits: int = 0
    """Grammars that were compiled already."""
    masks: int = 0
    mask_seconds: float = 0.0
    """Seconds that the step loop spent on masks."""
    forced_tokens: int = 0
    """Tokens that constraints forced."""
    drafters_off: int = 0
    """Times that a drafter was turned off."""
    drafters: dict[str, DrafterTotals] = {}
    """The totals of the drafters that did anything, by name."""
    eager_steps: dict[str, int] = {}
    """A GPU's steps without a CUDA graph by `EagerReason`, and passes of a draft model; the warm-up's included."""
    recomputed_tokens: int = 0
    """Tokens computed again after preemptions."""
    sequence_seconds: dict[str, float] = {}
    """Seconds of steps that all sequences together spent in each `SequenceState`."""
    failed_captures: int = 0
    """CUDA graphs that could not be captured, the warm-up's included."""
    state_evictions: int = 0
    """Snapshots of recurrent states that made room for others."""
    state_hits: int = 0
    """Sequences that began with one."""
    state_misses: int = 0
    """Prompt tokens whose blocks were found, but no state to go on from."""
    states_brought_back: int = 0
    """Snapshots that came back from the host's memory."""
    retention_refused: int = 0
    """Blocks that sessions asked to retain, and for which the budget had no room."""
    retention_displaced: int = 0
    """Scopes of sessions that ended to make room for others."""
    event_batches: int = 0
    """Batches of cache events that were published, the warm-up's included."""
    event_batches_dropped: int = 0
    """Batches that were not published, because too many waited."""
    landed: int = 0
    """Prompt tokens found in the prefix cache whose blocks came from a directory."""
    directory: dict[str, float] = {}
    """What was done with a directory of cached blocks: the counts of `ImageTotals` and of `FetchDecision`, by name,
    and the `waited_seconds` of requests."""
    transfers: dict[str, float] = {}
    """Prompts sent to other servers and received, by the rest of their metrics' names; see `PrefixTransfers.totals`."""

    def count_seconds(self, states: Mapping[SequenceState, int], seconds: float) -> None:
        """A step took so long, while so many sequences were in each state."""
        for state, count in states.items():
            self.sequence_seconds[state.value] = self.sequence_seconds.get(state.value, 0.0) + count * seconds


def sum_by_drafter(counted: Iterable[Mapping[str, DrafterTotals]]) -> dict[str, DrafterTotals]:
    sums: dict[str, DrafterTotals] = {}
    for name, totals in (pair for by_name in counted for pair in by_name.items()):
        so_far = sums.get(name, DrafterTotals())
        places = [*map(sum, zip_longest(totals.accepted_by_place, so_far.accepted_by_place, fillvalue=0))]
        tokens = totals.draft_tokens + so_far.draft_tokens, totals.accepted_tokens + so_far.accepted_tokens
        sums[name] = DrafterTotals(totals.drafts + so_far.drafts, *tokens, totals.seconds + so_far.seconds, places)
    return sums
