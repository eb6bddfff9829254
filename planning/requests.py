"""The requests of a load: which, for how long, for whom, and when each is due.

Knows nothing of servers or clocks. The same seed makes the same requests.
"""

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from ..core.errors import InvalidArgument
from .simulation import SimulatedRequest

_COLUMNS = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")
_ARRIVALS, _LENGTHS, _TENANTS, _PREFIXES = 1, 3, 4, 5
"""Streams of random numbers."""


class PlannedRequest(msgspec.Struct, frozen=True):
    """One request: `prompt` and `new` in tokens, `due` in seconds after the start (0 in a closed loop)."""

    index: int
    due: float
    prompt: int
    new: int


def poisson(rate: float, count: int, seed: int) -> list[float]:
    """Arrival times in seconds: `rate` a second on average, independent of one another."""
    return _arrivals(rate, 1.0, count, seed)


def _arrivals(rate: float, burstiness: float, count: int, seed: int) -> list[float]:
    random, shape = np.random.default_rng((seed, _ARRIVALS)), burstiness**-2 if burstiness else 0.0
    if burstiness == 1:
        gaps = random.exponential(1 / rate, count)
    else:
        gaps = random.gamma(shape, 1 / rate / shape, count) if shape else np.full(count, 1 / rate)
    times: list[float] = np.cumsum(gaps).tolist()
    return times


def uniform_jobs(arrivals: Iterable[float], prompt: int, new: int) -> list[PlannedRequest]:
    """Jobs of one length."""
    return [PlannedRequest(index, due, prompt, new) for index, due in enumerate(arrivals)]


def read_trace(
    path: Path, *, speedup: float = 1.0, limit: int | None = None, longest: int | None = None
) -> list[PlannedRequest]:
    """The first `limit` jobs of a CSV with arrived_at (seconds), num_prefill_tokens and num_decode_tokens.

    The first is due at once; `speedup` divides the times. Prompts are cut so that no job exceeds `longest` tokens.

    Raises:
        InvalidArgument: the file cannot be read; the message names the line.
    """
    try:
        with path.open(newline="") as file:
            rows = csv.DictReader(file)
            missing = [column for column in _COLUMNS if column not in (rows.fieldnames or ())]
            if missing:
                raise InvalidArgument(f"{path} has no column {missing[0]}")
            jobs = [_job(path, index, row) for index, row in zip(range(limit or 2**31), rows, strict=False)]
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror}") from None
    return [_adapted(job, jobs[0].due, speedup, longest) for job in jobs]


def _job(path: Path, index: int, row: dict[str, str]) -> PlannedRequest:
    try:
        arrived, prompt, new = (row[column] for column in _COLUMNS)
        return PlannedRequest(index, float(arrived), int(prompt), int(new))
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{path}:{index + 2}: {error}") from None


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
    tenants = [_parse_tenant(text) for text in load.tenant] or [TenantShare("", 1.0)]
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
    for name in ("speedup", "rate", "longest", "prefixes", "requests", "duration"):
        if (value := getattr(load, name)) is not None and value <= 0:
            raise InvalidArgument(f"{name} must be above 0, got {value:g}", field=name)
    for name in ("burstiness", "shared_prefix"):
        if (value := getattr(load, name)) < 0:
            raise InvalidArgument(f"{name} must be at least 0, got {value:g}", field=name)
    if load.rate is None:
        if load.trace is None:
            raise InvalidArgument("give --trace or --rate: nothing says when requests come", field="rate")
        jobs = read_trace(load.trace, speedup=load.speedup, limit=load.requests, longest=longest)
        return due_within(jobs, load.duration)
    if load.requests is None and load.duration is None:
        raise InvalidArgument("give --requests or --duration, or both: else it never ends", field="duration")
    count = load.requests or round(2 * load.rate * (load.duration or 0)) + 100
    times = _arrivals(load.rate, load.burstiness, count, load.seed)
    jobs = [_adapted(job, 0.0, 1.0, longest) for job in _drawn_lengths(load, times)]
    return due_within(jobs, load.duration)


def _drawn_lengths(load: FleetLoad, times: Sequence[float]) -> list[PlannedRequest]:
    if load.trace is not None:
        jobs = islice(cycle(read_trace(load.trace)), len(times))
        found = zip(times, jobs, strict=False)
        return [PlannedRequest(index, at, job.prompt, job.new) for index, (at, job) in enumerate(found)]
    random = np.random.default_rng((load.seed, _LENGTHS))
    prompts, news = (_draw(load, name, random, len(times)) for name in ("prompt", "new"))
    return [PlannedRequest(index, *job) for index, job in enumerate(zip(times, prompts, news, strict=True))]


def _draw(load: FleetLoad, name: str, random: np.random.Generator, count: int) -> list[int]:
    text: str = getattr(load, name)
    match = re.fullmatch(r"(\d+)(?:-(\d+)|~(\d*\.?\d+))?", text)
    low = int(match[1]) if match else 0
    if match is None or low < 1 or (match[2] and int(match[2]) < low):
        message = f"{name} must be a number of tokens, a range as in 100-900, or median~sigma, got {text!r}"
        raise InvalidArgument(message, field=name)
    if match[3]:
        values = np.maximum(random.lognormal(np.log(low), float(match[3]), count).astype(np.int64), 1)
    else:
        values = random.integers(low, int(match[2] or low), count, endpoint=True)
    lengths: list[int] = values.tolist()
    return lengths


def _parse_tenant(text: str) -> TenantShare:
    name, _, numbers = text.partition("=")
    try:
        share, weight, priority, *more = [*map(float, numbers.split(",")), *(1.0, 0.0)[numbers.count(",") :]]
        found = TenantShare(name, share, weight, int(priority))
    except ValueError:
        share, found, more = 0.0, TenantShare(name, 0.0), []
    if share <= 0 or found.weight <= 0 or found.priority < 0 or more or not name:
        raise InvalidArgument(f"tenant must be NAME=SHARE[,WEIGHT[,PRIORITY]], got {text!r}", field="tenant")
    return found
