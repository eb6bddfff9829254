"""The requests of a load: which, for how long, for whom, and when each is due.

Knows nothing of servers or clocks. The same seed makes the same requests.
"""

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import cycle, islice, takewhile
from math import inf, isfinite
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from ..core.errors import InvalidArgument
from .simulation import SimulatedRequest

_COLUMNS = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")
_ARRIVALS, _LENGTHS, _TENANTS, _PREFIXES = 1, 3, 4, 5
"""Streams of random numbers."""

_DRAWN = 1024
"""Arrivals that are drawn at a time."""

_MOST_REQUESTS, _MOST_TOKENS = 5_000_000, 100_000_000
"""Of a load, and of a request: more is a slip, and would not fit into memory."""

_EVEN, _BURSTIEST, _WIDEST = 1e-6, 100.0, 10.0
"""The least burstiness that differs from none, the most, and the most sigma of a lognormal distribution."""


class PlannedRequest(msgspec.Struct, frozen=True):
    """One request: `prompt` and `new` in tokens, `due` in seconds after the start (0 in a closed loop)."""

    index: int
    due: float
    prompt: int
    new: int


def poisson(rate: float, seed: int, count: int | None = None, duration: float | None = None) -> list[float]:
    """Arrival times in seconds: `rate` a second on average, independent of one another; `count` of them, or as many as
    come within `duration`. Raises `InvalidArgument`: there would be millions."""
    return _bounded(_arrivals(rate, 1.0, seed), count, duration)


def _arrivals(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Arrival times without end."""
    random, now = np.random.default_rng((seed, _ARRIVALS)), 0.0
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


def _bounded(times: Iterator[float], count: int | None, duration: float | None) -> list[float]:
    end, too_many = inf if duration is None else duration, _MOST_REQUESTS + 1
    found = list(islice(takewhile(lambda at: at < end, times), min(count or too_many, too_many)))
    if len(found) > _MOST_REQUESTS:
        raise InvalidArgument(f"the load has more than {_MOST_REQUESTS:,} requests", field="duration")
    return found


def uniform_jobs(arrivals: Iterable[float], prompt: int, new: int) -> list[PlannedRequest]:
    """Jobs of one length."""
    return [PlannedRequest(index, due, prompt, new) for index, due in enumerate(arrivals)]


def read_trace(
    path: Path, *, speedup: float = 1.0, limit: int | None = None, longest: int | None = None
) -> list[PlannedRequest]:
    """The first `limit` jobs of a CSV with arrived_at (seconds), num_prefill_tokens and num_decode_tokens, in the order
    of their arrival.

    The first is due at once; `speedup` divides the times. Prompts are cut so that no job exceeds `longest` tokens.

    Raises:
        InvalidArgument: the file cannot be read, or has no jobs; the message names the line.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            missing = [column for column in _COLUMNS if column not in (rows.fieldnames or ())]
            if missing:
                raise InvalidArgument(f"{path} has no column {missing[0]}", field="trace")
            found = enumerate(islice(rows, limit))
            jobs = [_job(f"{path}:{rows.line_num}", index, row) for index, row in found]
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror}", field="trace") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidArgument(f"{path} is no CSV: {error}", field="trace") from None
    if not jobs:
        raise InvalidArgument(f"{path} has no requests", field="trace")
    jobs.sort(key=lambda job: job.due)
    return [_adapted(job, jobs[0].due, speedup, longest) for job in jobs]


def _job(place: str, index: int, row: dict[str, str | None]) -> PlannedRequest:
    arrived, prompt, new = (_number(place, column, row[column] or "") for column in _COLUMNS)
    return PlannedRequest(index, arrived, int(prompt), int(new))


def _number(place: str, column: str, text: str) -> float:
    is_time = column == _COLUMNS[0]
    try:
        value = float(text) if is_time else int(text)
    except ValueError:
        value = inf
    if not (isfinite(value) if is_time else 0 <= value <= _MOST_TOKENS):
        what = "a number of seconds" if is_time else f"a number of tokens, at most {_MOST_TOKENS:,}"
        raise InvalidArgument(f"{place}: {column} must be {what}, got {text[:40]!r}", field="trace")
    return value


def _adapted(job: PlannedRequest, first: float, speedup: float, longest: int | None) -> PlannedRequest:
    new = max(1, job.new if longest is None else min(job.new, longest - 1))
    prompt = max(1, job.prompt if longest is None else min(job.prompt, longest - new))
    return PlannedRequest(job.index, (job.due - first) / speedup, prompt, new)


def due_within(jobs: Sequence[PlannedRequest], duration: float | None) -> list[PlannedRequest]:
    """The requests that are due within `duration` seconds."""
    return [job for job in jobs if duration is None or job.due < duration]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLoad:
    """The load: a trace, or requests that are described."""

    trace: Path | None = None
    """A CSV with arrived_at, num_prefill_tokens, num_decode_tokens. With --rate, only its lengths count."""
    speedup: float = 1.0
    """How much faster than recorded a trace is played."""
    rate: float | None = None
    """Requests per second on average, arriving at random."""
    burstiness: float = 1.0
    """Deviation of the time between arrivals over its mean: 0 is even, 1 Poisson, more comes in bursts."""
    prompt: str = "512"
    """Tokens of prompts: a number, a range as in 100-900, or median~sigma (lognormal), as in 1020~0.9."""
    new: str = "128"
    """New tokens, likewise."""
    longest: int | None = None
    """Cut prompts so that no request exceeds this many tokens; unset: as long as the model takes."""
    shared_prefix: int = 0
    """Tokens at the beginning of prompts that requests share."""
    prefixes: int = 1
    """How many different such beginnings there are."""
    tenant: tuple[str, ...] = ()
    """A tenant as NAME=SHARE[,WEIGHT[,PRIORITY]], SHARE being its part of the requests; may be given several times."""
    requests: int | None = None
    """How many requests."""
    duration: float | None = None
    """Seconds after which no request begins."""
    seed: int = 0
    """Of arrivals, lengths, prefixes and tenants."""


class TenantShare(NamedTuple):
    """`share`: its part of the requests, beside the others'. `weight`, `priority`: what the scheduler is told."""

    name: str
    share: float
    weight: float = 1.0
    priority: int = 0


def make_requests(load: FleetLoad, max_model_len: int) -> list[SimulatedRequest]:
    """The requests of a load for a model of this length.

    Raises:
        InvalidArgument: it says too little, or what cannot be; or the trace cannot be read.
    """
    _check_numbers(load)
    _check_belonging(load)
    tenants = _parse_tenants(load.tenant)
    shares = np.array([tenant.share for tenant in tenants])
    drawn, prefix = (np.random.default_rng((load.seed, stream)) for stream in (_TENANTS, _PREFIXES))
    found = []
    for job in _planned(load, max_model_len):
        tenant = tenants[drawn.choice(len(tenants), p=shares / shares.sum())] if len(tenants) > 1 else tenants[0]
        found.append(
            SimulatedRequest(
                at=job.due,
                prompt=job.prompt,
                new=job.new,
                tenant=tenant.name,
                weight=tenant.weight,
                priority=tenant.priority,
                shared=min(load.shared_prefix, job.prompt),
                prefix=int(prefix.integers(load.prefixes)) if load.shared_prefix else 0,
            )
        )
    if not found:
        raise InvalidArgument("the load has no requests", field="trace" if load.trace else "duration")
    return found


def _planned(load: FleetLoad, max_model_len: int) -> list[PlannedRequest]:
    longest = max_model_len if load.longest is None else load.longest
    if load.rate is None:
        if load.trace is None:
            raise InvalidArgument("give --trace or --rate: nothing says when requests come", field="rate")
        jobs = read_trace(load.trace, speedup=load.speedup, limit=load.requests, longest=longest)
        return due_within(jobs, load.duration)
    if load.requests is None and load.duration is None:
        raise InvalidArgument("give --requests or --duration, or both: else it never ends", field="duration")
    times = _bounded(_arrivals(load.rate, load.burstiness, load.seed), load.requests, load.duration)
    return [_adapted(job, 0.0, 1.0, longest) for job in _drawn_lengths(load, times)]


def _check_numbers(load: FleetLoad) -> None:
    for name in ("speedup", "rate", "longest", "prefixes", "requests", "duration"):
        if (value := getattr(load, name)) is not None and not 0 < value < inf:
            raise InvalidArgument(f"{name} must be above 0, got {value:g}", field=name)
    for name in ("shared_prefix", "seed"):
        if (value := getattr(load, name)) < 0:
            raise InvalidArgument(f"{name} must be at least 0, got {value}", field=name)
    if not 0 <= load.burstiness <= _BURSTIEST:
        message = f"burstiness must be at least 0 and at most {_BURSTIEST:g}, got {load.burstiness:g}"
        raise InvalidArgument(message, field="burstiness")
    if (load.longest or 2) < 2:
        raise InvalidArgument("longest must be at least 2: a token of a prompt, and a new one", field="longest")
    if load.prefixes > _MOST_TOKENS:
        raise InvalidArgument(f"prefixes must be at most {_MOST_TOKENS:,}, got {load.prefixes:,}", field="prefixes")


def _check_belonging(load: FleetLoad) -> None:
    """Nothing is given that this kind of load would not look at."""
    idle = {
        "a trace has its own": ("prompt", "new") if load.trace else (),
        "a trace alone, without --rate, has times to play": ("speedup",) if load.trace is None or load.rate else (),
        "it is of --rate": () if load.rate else ("burstiness",),
        "it is of --shared-prefix": () if load.shared_prefix else ("prefixes",),
    }
    defaults = {field.name: field.default for field in fields(FleetLoad)}
    for why, names in idle.items():
        for name in names:
            if getattr(load, name) != defaults[name]:
                raise InvalidArgument(f"--{name} means nothing here: {why}", field=name)


def _drawn_lengths(load: FleetLoad, times: Sequence[float]) -> list[PlannedRequest]:
    if load.trace is not None:
        jobs = zip(times, cycle(read_trace(load.trace)), strict=False)
        return [PlannedRequest(index, at, job.prompt, job.new) for index, (at, job) in enumerate(jobs)]
    random = np.random.default_rng((load.seed, _LENGTHS))
    prompts, news = (_draw(load, name, random, len(times)) for name in ("prompt", "new"))
    return [PlannedRequest(index, *job) for index, job in enumerate(zip(times, prompts, news, strict=True))]


def _draw(load: FleetLoad, name: str, random: np.random.Generator, count: int) -> list[int]:
    text: str = getattr(load, name)
    match = re.fullmatch(r"(\d+)(?:-(\d+)|~(\d*\.?\d+))?", text)
    low, high, sigma = (float(each or 0) for each in match.groups()) if match else (0.0, 0.0, 0.0)
    high = high or low
    if not (1 <= low <= high <= _MOST_TOKENS and sigma <= _WIDEST):
        message = f"{name} must be a number of tokens, a range as in 100-900, or median~sigma, got {text!r}"
        raise InvalidArgument(message, field=name)
    if sigma:
        values = np.clip(random.lognormal(np.log(low), sigma, count), 1, _MOST_TOKENS).astype(np.int64)
    else:
        values = random.integers(int(low), int(high), count, endpoint=True)
    lengths: list[int] = values.tolist()
    return lengths


def _parse_tenants(texts: Sequence[str]) -> list[TenantShare]:
    found = [_parse_tenant(text) for text in texts]
    names = [tenant.name for tenant in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InvalidArgument(f"the tenant {twice[0]!r} is there twice", field="tenant")
    return found or [TenantShare("", 1.0)]


def _parse_tenant(text: str) -> TenantShare:
    form = r"([^=]+)=(\d*\.?\d+)(?:,(\d*\.?\d+)(?:,(\d{1,3}))?)?"
    match = re.fullmatch(form, text)
    share, weight = (float(match[2]), float(match[3] or 1)) if match else (0.0, 0.0)
    if match is None or not (0 < share < inf and 0 < weight < inf):
        raise InvalidArgument(f"tenant must be NAME=SHARE[,WEIGHT[,PRIORITY]], got {text!r}", field="tenant")
    return TenantShare(match[1], share, weight, int(match[4] or 0))
