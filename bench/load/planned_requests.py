"""The requests of a load before they are sent: how long each is, and when it is due. Arrivals are drawn, or a trace's.

Knows nothing of servers or clocks. The same seed makes the same requests.
"""

import csv
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, takewhile
from math import inf, isfinite
from pathlib import Path

import msgspec
import numpy as np

from ...core.errors import InvalidArgument

MOST_TOKENS = 100_000_000
"""Of a request: more is a slip."""

_MOST_REQUESTS = 5_000_000
"""Of a load: more is a slip, and would not fit into memory."""

_COLUMNS = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")
_SESSION, _PAUSE = "session", "pause"
"""Columns that a trace of conversations has beside those."""
_ARRIVALS = 1
"""Their stream of random numbers."""

_DRAWN = 1024
"""Arrivals that are drawn at a time."""

_EVEN = 1e-6
"""The least burstiness that differs from none."""


class PlannedRequest(msgspec.Struct, frozen=True):
    """One request: `prompt` and `new` in tokens, `due` in seconds after the start (0 in a closed loop)."""

    index: int
    due: float
    prompt: int
    new: int
    session: str = ""
    """Those of a session come one after the other, each with all before in its prompt, unless that is shorter."""
    pause: float = 0.0
    """Seconds that it comes at the earliest after the answer to the session's request before."""

    def fitted(self, longest: int | None) -> "PlannedRequest":
        """The request with at least a token of a prompt and a new one, and at most `longest`: its prompt is cut."""
        new = max(1, self.new if longest is None else min(self.new, longest - 1))
        prompt = max(1, self.prompt if longest is None else min(self.prompt, longest - new))
        return msgspec.structs.replace(self, prompt=prompt, new=new)


def draw_arrivals(
    rate: float, seed: int, count: int | None = None, duration: float | None = None, burstiness: float = 1.0
) -> list[float]:
    """Arrival times in seconds: `rate` a second on average; `count` of them, or as many as come within `duration`.
    `burstiness`: the deviation of the time between two over its mean. With 0 they come evenly, with 1 independently of
    one another (Poisson), with more in bursts. Raises `InvalidArgument`: there would be millions."""
    end = inf if duration is None else duration
    too_many = _MOST_REQUESTS + 1
    times = takewhile(lambda at: at < end, _endless_arrivals(rate, burstiness, seed))
    arrivals = list(islice(times, min(count or too_many, too_many)))
    if len(arrivals) > _MOST_REQUESTS:
        raise InvalidArgument(f"the load has more than {_MOST_REQUESTS:,} requests", field="duration")
    return arrivals


def _endless_arrivals(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    random = np.random.default_rng((seed, _ARRIVALS))
    now = 0.0
    while True:
        if burstiness == 1:
            gaps = random.exponential(1 / rate, _DRAWN)
        elif burstiness > _EVEN:
            gaps = random.gamma(burstiness**-2, burstiness**2 / rate, _DRAWN)
        else:
            gaps = np.full(_DRAWN, 1 / rate)
        times = now + np.cumsum(gaps)
        now = float(times[-1])
        yield from times.tolist()


def uniform_jobs(arrivals: Iterable[float], prompt: int, new: int) -> list[PlannedRequest]:
    """Jobs of one length."""
    return [PlannedRequest(index, due, prompt, new) for index, due in enumerate(arrivals)]


def read_trace(
    path: Path, *, speedup: float = 1.0, limit: int | None = None, longest: int | None = None
) -> list[PlannedRequest]:
    """The first `limit` jobs of a CSV with arrived_at (seconds), num_prefill_tokens and num_decode_tokens, in the order
    of their arrival.

    The first is due at once; `speedup` divides the times, pauses too. Prompts are cut so that no job exceeds `longest`
    tokens.

    Raises:
        InvalidArgument: the file cannot be read, or has no jobs; the message names the line.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            missing = [column for column in _COLUMNS if column not in (rows.fieldnames or ())]
            if missing:
                raise InvalidArgument(f"{path} has no column {missing[0]}", field="trace")
            numbered = enumerate(islice(rows, limit))
            jobs = [_job(f"{path}:{rows.line_num}", index, row) for index, row in numbered]
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror}", field="trace") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidArgument(f"{path} is no CSV: {error}", field="trace") from None
    if not jobs:
        raise InvalidArgument(f"{path} has no requests", field="trace")
    jobs.sort(key=lambda job: job.due)
    first = jobs[0].due
    times = [((job.due - first) / speedup, job.pause / speedup) for job in jobs]
    return [
        msgspec.structs.replace(job.fitted(longest), due=due, pause=pause)
        for job, (due, pause) in zip(jobs, times, strict=True)
    ]


def _job(line: str, index: int, row: dict[str, str | None]) -> PlannedRequest:
    arrived, prompt, new = (_number(line, column, row[column] or "") for column in _COLUMNS)
    pause = _number(line, _PAUSE, row.get(_PAUSE) or "0")
    return PlannedRequest(index, arrived, int(prompt), int(new), row.get(_SESSION) or "", pause)


def write_trace(path: Path, jobs: Iterable[PlannedRequest]) -> None:
    """What `read_trace` reads. Raises `InvalidArgument` where the file cannot be written."""
    try:
        with path.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow([*_COLUMNS, _SESSION, _PAUSE])
            rows.writerows((f"{job.due:.3f}", job.prompt, job.new, job.session, f"{job.pause:.3f}") for job in jobs)
    except OSError as error:
        raise InvalidArgument(f"cannot write {path}: {error.strerror}", field="trace") from None


def _number(line: str, column: str, text: str) -> float:
    is_time = column in (_COLUMNS[0], _PAUSE)
    try:
        value = float(text) if is_time else int(text)
    except ValueError:
        value = inf
    if not (isfinite(value) if is_time else 0 <= value <= MOST_TOKENS) or (column == _PAUSE and value < 0):
        what = "a number of seconds" if is_time else f"a number of tokens, at most {MOST_TOKENS:,}"
        raise InvalidArgument(f"{line}: {column} must be {what}, got {text[:40]!r}", field="trace")
    return value


def due_within(jobs: Sequence[PlannedRequest], duration: float | None) -> list[PlannedRequest]:
    """The requests that are due within `duration` seconds."""
    return [job for job in jobs if duration is None or job.due < duration]
