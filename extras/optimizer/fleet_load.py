"""The requests of a load as a simulation has them: their lengths, tenants and shared beginnings.

Knows nothing of servers or clocks. The same seed makes the same requests.
"""

import re
from collections.abc import Sequence
from dataclasses import fields
from itertools import cycle
from math import inf
from typing import NamedTuple

import numpy as np

from ...bench.load.planned_requests import MOST_TOKENS, PlannedRequest, draw_arrivals, due_within, read_trace
from ...core.errors import InvalidArgument
from .options import FleetLoad
from .simulated_request import SimulatedRequest

_LENGTHS, _TENANTS, _PREFIXES = 3, 4, 5
"""Streams of random numbers."""

_BURSTIEST, _WIDEST = 100.0, 10.0
"""The most burstiness, and the most sigma of a lognormal distribution."""


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
    requests = []
    sessions: dict[str, tuple[int, int, int]] = {}  # its number, its conversation's, and its last prompt
    conversations = 0
    for job in _planned(load, max_model_len):
        number, conversation, before = sessions.get(job.session, (len(sessions) + 1, 0, job.prompt + 1))
        if job.prompt < before:  # another conversation
            conversations += 1
            conversation = conversations
        if job.session:
            sessions[job.session] = number, conversation, job.prompt
        tenant = tenants[drawn.choice(len(tenants), p=shares / shares.sum())] if len(tenants) > 1 else tenants[0]
        requests.append(
            SimulatedRequest(
                at=job.due,
                prompt=job.prompt,
                new=job.new,
                tenant=tenant.name,
                weight=tenant.weight,
                priority=tenant.priority,
                shared=min(load.shared_prefix, job.prompt),
                prefix=int(prefix.integers(load.prefixes)) if load.shared_prefix else 0,
                session=number if job.session else 0,
                conversation=conversation,
                pause=job.pause,
                retained=load.retain,
            )
        )
    _mark_last(requests)
    if not requests:
        raise InvalidArgument("the load has no requests", field="trace" if load.trace else "duration")
    return requests


def _mark_last(requests: list[SimulatedRequest]) -> None:
    """Let the last request of each conversation know that it is."""
    last = {request.conversation: index for index, request in enumerate(requests) if request.session}
    for index in last.values():
        requests[index] = requests[index]._replace(last=True)


def _planned(load: FleetLoad, max_model_len: int) -> list[PlannedRequest]:
    longest = max_model_len if load.longest is None else load.longest
    if load.rate is None:
        if load.trace is None:
            raise InvalidArgument("give --trace or --rate: nothing says when requests come", field="rate")
        jobs = read_trace(load.trace, speedup=load.speedup, limit=load.requests, longest=longest)
        return due_within(jobs, load.duration)
    if load.requests is None and load.duration is None:
        raise InvalidArgument("give --requests or --duration, or both: else it never ends", field="duration")
    times = draw_arrivals(load.rate, load.seed, load.requests, load.duration, load.burstiness)
    return [job.fitted(longest) for job in _drawn_lengths(load, times)]


def _check_numbers(load: FleetLoad) -> None:
    for name in ("speedup", "rate", "longest", "prefixes", "requests", "duration"):
        if (value := getattr(load, name)) is not None and not 0 < value < inf:
            raise InvalidArgument(f"{name} must be above 0, got {value:g}", field=name)
    for name in ("shared_prefix", "seed", "retain"):
        if (value := getattr(load, name)) < 0:
            raise InvalidArgument(f"{name} must be at least 0, got {value}", field=name)
    if not 0 <= load.burstiness <= _BURSTIEST:
        message = f"burstiness must be at least 0 and at most {_BURSTIEST:g}, got {load.burstiness:g}"
        raise InvalidArgument(message, field="burstiness")
    if (load.longest or 2) < 2:
        raise InvalidArgument("longest must be at least 2: a token of a prompt, and a new one", field="longest")
    if load.prefixes > MOST_TOKENS:
        raise InvalidArgument(f"prefixes must be at most {MOST_TOKENS:,}, got {load.prefixes:,}", field="prefixes")


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
    low, high, sigma = (float(number or 0) for number in match.groups()) if match else (0.0, 0.0, 0.0)
    high = high or low
    if not (1 <= low <= high <= MOST_TOKENS and sigma <= _WIDEST):
        message = f"{name} must be a number of tokens, a range as in 100-900, or median~sigma, got {text!r}"
        raise InvalidArgument(message, field=name)
    if sigma:
        values = np.clip(random.lognormal(np.log(low), sigma, count), 1, MOST_TOKENS).astype(np.int64)
    else:
        values = random.integers(int(low), int(high), count, endpoint=True)
    lengths: list[int] = values.tolist()
    return lengths


def _parse_tenants(texts: Sequence[str]) -> list[TenantShare]:
    tenants = [_parse_tenant(text) for text in texts]
    names = [tenant.name for tenant in tenants]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InvalidArgument(f"the tenant {twice[0]!r} is there twice", field="tenant")
    return tenants or [TenantShare("", 1.0)]


def _parse_tenant(text: str) -> TenantShare:
    form = r"([^=]+)=(\d*\.?\d+)(?:,(\d*\.?\d+)(?:,(\d{1,3}))?)?"
    match = re.fullmatch(form, text)
    share, weight = (float(match[2]), float(match[3] or 1)) if match else (0.0, 0.0)
    if match is None or not (0 < share < inf and 0 < weight < inf):
        raise InvalidArgument(f"tenant must be NAME=SHARE[,WEIGHT[,PRIORITY]], got {text!r}", field="tenant")
    return TenantShare(match[1], share, weight, int(match[4] or 0))
