"""Figures of a load out of its records: exact, and of nothing but the records."""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from .driver import LoadRecord
from .endpoints import OK


class Spread(msgspec.Struct, frozen=True):
    """The distribution of values, in their unit; percentiles interpolate between the two nearest values."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        """None where there are none."""
        if not values:
            return None
        p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
        return cls(len(values), float(np.mean(values)), p50, p90, p99, max(values))


class Slo(msgspec.Struct, frozen=True):
    """The objective of a request: milliseconds to the first token, and between tokens on average (TPOT). None for no
    bound."""

    ttft_ms: float | None = None
    itl_ms: float | None = None

    def kept_by(self, record: LoadRecord) -> bool:
        """Whether the request ended well, and in time."""
        if record.status != OK:
            return False
        first = self.ttft_ms is None or ttft(record) * 1e3 <= self.ttft_ms
        pace = tpot(record)
        return first and (self.itl_ms is None or pace is None or pace * 1e3 <= self.itl_ms)


class LoadFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A load in figures; times in seconds. Latencies are of requests that ended well, and count from when they were
    due. `itl` are the gaps between successive frames with tokens, `tpot` a request's mean time per token after the
    first. `seconds` runs from the start to the last end."""

    requests: int
    good: int
    statuses: dict[str, int]
    seconds: float
    output_tokens: int
    prompt_tokens: int
    frames: int
    size: int
    ttft: Spread | None
    itl: Spread | None
    tpot: Spread | None
    end_to_end: Spread | None
    lateness: Spread | None

    @property
    def succeeded(self) -> int:
        return self.statuses.get(OK, 0)

    @property
    def errors(self) -> dict[str, int]:
        """Requests that failed, by what went wrong."""
        return {status: count for status, count in self.statuses.items() if status != OK}

    def per_second(self, count: float) -> float:
        return count / self.seconds if self.seconds else 0.0


_NO_SLO = Slo()


def compute_figures(records: Sequence[LoadRecord], slo: Slo = _NO_SLO) -> LoadFigures:
    """Every figure of these records."""
    well = [record for record in records if record.status == OK]
    return LoadFigures(
        requests=len(records),
        good=sum(slo.kept_by(record) for record in records),
        statuses=dict(Counter(record.status for record in records).most_common()),
        seconds=max((record.ended for record in records), default=0.0),
        output_tokens=sum(record.tokens for record in records),
        prompt_tokens=sum(record.prompt_tokens for record in well),
        frames=sum(record.frames for record in records),
        size=sum(record.size for record in records),
        ttft=Spread.of([ttft(record) for record in well]),
        itl=Spread.of([gap for record in well for gap in inter_token_times(record)]),
        tpot=Spread.of(_known(tpot(record) for record in well)),
        end_to_end=Spread.of([record.ended - record.due for record in well]),
        lateness=Spread.of([record.sent - record.due for record in records]),
    )


def ttft(record: LoadRecord) -> float:
    """Seconds from when it was due to its first token."""
    return record.times[0] - record.due


def inter_token_times(record: LoadRecord) -> list[float]:
    """Seconds between successive frames with tokens."""
    return [later - earlier for earlier, later in zip(record.times, record.times[1:], strict=False)]


def tpot(record: LoadRecord) -> float | None:
    """Seconds per token after the first frame; None with a single token."""
    if record.tokens < 2:
        return None
    return (record.times[-1] - record.times[0]) / (record.tokens - 1)


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
