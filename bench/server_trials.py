"""The bars of a server under load, one trial each: throughput of the engine, streams that no prefill stalls, short
prompts that no long one delays, prefixes that are computed once, constraints that cost nobody else.

Each trial asks a running server and returns a ratio: the same work with and without what is examined, in turns.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from itertools import count, cycle, islice
from statistics import median
from typing import Annotated, NamedTuple

import numpy as np
from cyclopts import Parameter
from cyclopts.validators import Number

from ..core.errors import Unavailable
from .command import Count, Log
from .load.driver import OK, LoadRecord, LoopMode, RequestOptions
from .load.figures import inter_token_times, ttft
from .load.plan import Prompts
from .load.planned_requests import PlannedRequest, uniform_jobs
from .load.worker import LoadRun, LoadTarget, WorkerOutcome, run
from .peer_process import PeerProcess
from .server_process import ServerAddress
from .trial import TrialVerdict, ratio_of, take_turns


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSizes:
    """The sizes of the trials."""

    streams: Annotated[tuple[int, ...], Parameter(consume_multiple=True, validator=Number(gt=0))] = (1, 8, 32)
    """Streams at a time whose throughput is compared with the engine's."""
    prompt: Count = 128
    """Tokens of an ordinary prompt."""
    new: Count = 64
    """New tokens of an ordinary request."""
    long: Count = 2048
    """Tokens of a long prompt."""
    running: Count = 8
    """Streams that run while a long prompt is computed."""
    running_new: Count = 768
    """Their new tokens: enough to outlast the long prompt."""
    beside: Count = 4
    """Streams that run ten times as long as a long prompt takes."""
    longs: Count = 4
    """Long prompts that short ones queue behind."""
    shorts: Count = 16
    """Short prompts, of 32 to 255 tokens."""
    shared: Count = 1024
    """Tokens at the beginning that prompts share."""
    sharing: Count = 32
    """Requests that share them."""
    repeats: Count = 3
    """Turns of each side."""


@dataclass(frozen=True, slots=True)
class TrialTarget:
    """A server, the model to ask there, the ids that prompts are made of, and seeds: with one of its own a load shares
    no prompt with what was asked before."""

    place: ServerAddress
    model: str
    vocab: int
    seeds: Iterator[int] = field(default_factory=count)

    def put(
        self,
        jobs: Sequence[PlannedRequest],
        *,
        seed: int | None = None,
        concurrency: int = 0,
        shared: int = 0,
        warm_up: int = 0,
    ) -> WorkerOutcome:
        """A load in a process of its own, after `warm_up` requests like it; all requests ended well. Its prompts are
        new, or those of `seed`.

        Raises:
            Unavailable: one did not.
        """
        target = LoadTarget(
            host=self.place.host, port=self.place.http_port, door="completions", manner=RequestOptions(self.model)
        )
        prompts = Prompts(vocab=self.vocab, shared=shared, seed=next(self.seeds) if seed is None else seed)
        (outcome,) = run(
            LoadRun(
                target=target, jobs=list(jobs), prompts=prompts, pace=LoopMode(concurrency=concurrency), warm_up=warm_up
            )
        )
        failed = [record.status for record in outcome.records if record.status != OK]
        if failed:
            raise Unavailable(f"{len(failed)} of {len(jobs)} requests failed: {failed[0]}")
        return outcome


def speed(outcome: WorkerOutcome) -> float:
    """Output tokens a second, to the last end."""
    return sum(record.tokens for record in outcome.records) / max(record.ended for record in outcome.records)


def throughput(target: TrialTarget, engine: PeerProcess, sizes: TrialSizes, cores: int, log: Log) -> list[TrialVerdict]:
    """A closed loop beside the engine without a server, on the same prompts, submitted at once in both.

    The server is held to the share of the machine that the generator leaves. The machine's speed is not constant: each
    turn is compared with the one beside it.
    """
    verdicts = []
    engine.generate([[1] * sizes.prompt], 2)
    for streams in sizes.streams:
        jobs = uniform_jobs([0.0] * streams, sizes.prompt, sizes.new)
        seeds = list(islice(target.seeds, sizes.repeats))

        def served(number: int, jobs: Sequence[PlannedRequest] = jobs, seeds: Sequence[int] = seeds) -> float:
            outcome = target.put(jobs, seed=seeds[number], concurrency=len(jobs), warm_up=1)
            return without_generator(speed(outcome), outcome.cpu / outcome.seconds, cores)

        def alone(number: int, jobs: Sequence[PlannedRequest] = jobs, seeds: Sequence[int] = seeds) -> float:
            return engine.generate([_ids(target, job, seeds[number]) for job in jobs], sizes.new).speed

        contenders = {f"{streams} streams over HTTP, net": served, "the engine without doors": alone}
        over_http, without_doors = take_turns(
            contenders, sizes.repeats, log, lambda speed: f"{speed:.1f} tokens/s"
        ).values()
        what = f"{streams} streams over HTTP, net, of the engine without doors"
        verdicts.append(TrialVerdict(what, ratio_of(over_http, without_doors, float), 0.95, True))
    return verdicts


def _warm(target: TrialTarget) -> None:
    target.put(uniform_jobs([0.0], 16, 2))


def without_generator(tokens: float, generator: float, cores: int) -> float:
    """The rate with the cores that the generator took."""
    return tokens / (1 - generator / cores)


def _ids(target: TrialTarget, job: PlannedRequest, seed: int) -> list[int]:
    prompt = Prompts(vocab=target.vocab, seed=seed).write(job)
    assert isinstance(prompt, list)
    return prompt


def prefill(target: TrialTarget, sizes: TrialSizes, log: Log) -> list[TrialVerdict]:
    """The p99 gap between tokens of running streams while a long prompt is computed, over the same streams' median
    without it."""
    ratios = []
    running = uniform_jobs([0.0] * sizes.running, sizes.prompt, sizes.running_new)
    _warm(target)
    for _ in range(sizes.repeats):
        alone = target.put(running).records
        usual = median(steady_gaps(alone))
        begun = max(record.times[0] for record in alone)
        ended = min(record.ended for record in alone)
        long = PlannedRequest(sizes.running, begun + (ended - begun) / 4, sizes.long, 1)
        slow = float(np.percentile(gaps_during(target.put([*running, long]).records, long.index), 99))
        log(f"gaps of {sizes.running} streams: median {usual * 1e3:.1f} ms, p99 beside a prefill {slow * 1e3:.1f} ms")
        ratios.append(slow / usual)
    return [
        TrialVerdict(f"p99 ITL beside a {sizes.long}-token prefill, of the median without", median(ratios), 2.0, False)
    ]


def steady_gaps(records: Sequence[LoadRecord]) -> list[float]:
    """Seconds between tokens from when every stream has begun until the first ends.

    Raises:
        Unavailable: one had ended before the last began.
    """
    begun = max(record.times[0] for record in records)
    ended = min(record.ended for record in records)
    if ended <= begun:
        raise Unavailable("a stream ended before the last one began: let each generate more")
    return _gaps_within(records, begun, ended)


def gaps_during(records: Sequence[LoadRecord], long: int) -> list[float]:
    """Seconds between tokens of the others while the request with index `long` waited for its first.

    Raises:
        Unavailable: they had ended before.
    """
    (slow,) = (record for record in records if record.index == long)
    others = [record for record in records if record.index != long]
    if min(record.ended for record in others) < slow.times[0]:
        raise Unavailable("the streams ended before the long prompt was computed: give them more --running-new")
    return _gaps_within(others, slow.sent, slow.times[0])


def _gaps_within(records: Sequence[LoadRecord], begin: float, end: float) -> list[float]:
    """The gaps that overlap the span."""
    return [
        gap
        for record in records
        for at, gap in zip(record.times, inter_token_times(record), strict=False)
        if at < end and at + gap > begin
    ]


def beside(target: TrialTarget, sizes: TrialSizes, log: Log) -> list[TrialVerdict]:
    """The TTFT of a long prompt beside streams that run ten times as long, over its own alone; and the p99 gap between
    tokens of those streams over their median without it."""
    first, gaps = [], []
    _warm(target)
    for _ in range(sizes.repeats):
        alone = ttft(target.put([PlannedRequest(0, 0.0, sizes.long, 1)]).records[0])
        usual = median(steady_gaps(target.put(uniform_jobs([0.0] * sizes.beside, sizes.prompt, sizes.new)).records))
        running = uniform_jobs([0.0] * sizes.beside, sizes.prompt, sizes.new + int(10 * alone / usual))
        long = PlannedRequest(sizes.beside, sizes.new * usual, sizes.long, 1)
        records = target.put([*running, long]).records
        (late,) = (record for record in records if record.index == long.index)
        slow = float(np.percentile(steady_gaps([record for record in records if record is not late]), 99))
        log(f"TTFT of {sizes.long} tokens: {alone * 1e3:.0f} ms alone, {ttft(late) * 1e3:.0f} ms beside streams")
        log(f"gaps of {sizes.beside} streams: median {usual * 1e3:.1f} ms alone, p99 {slow * 1e3:.1f} ms with it")
        first.append(ttft(late) / alone)
        gaps.append(slow / usual)
    what = f"a {sizes.long}-token prompt beside {sizes.beside} long streams"
    return [
        TrialVerdict(f"TTFT of {what}, of its own alone", median(first), 1.9, False),
        TrialVerdict(f"{what}: their p99 ITL, of their median without it", median(gaps), 2.5, False),
    ]


_HOSTILE = ("(a{1,500}){500}", "(" * 300 + "x" + ")*" * 300)
"""Regular expressions that cost as much as the server lets them."""


class _StreamFigures(NamedTuple):
    """The p99 gap between tokens of streams, and their tokens a second."""

    gap: float
    speed: float


def hostile(target: TrialTarget, sizes: TrialSizes, log: Log) -> list[TrialVerdict]:
    """The p99 gap between tokens of running streams, and their throughput, while a client asks with one hostile
    constraint after another, over those without."""
    running = uniform_jobs([0.0] * sizes.beside, sizes.prompt, sizes.running_new)

    def alone(number: int) -> _StreamFigures:
        outcome = target.put(running)
        return _StreamFigures(float(np.percentile(steady_gaps(outcome.records), 99)), speed(outcome))

    def troubled(number: int) -> _StreamFigures:
        with _hostile_client(target) as answers:
            figures = alone(number)
        log(f"{len(answers)} answers: {Counter(answers)}")
        return figures

    _warm(target)
    without, beside_hostile = take_turns(
        {"alone": alone, "beside hostile constraints": troubled},
        sizes.repeats,
        log,
        lambda figures: f"p99 gap {figures.gap * 1e3:.1f} ms, {figures.speed:.1f} tokens/s",
    ).values()
    what = f"{sizes.beside} streams beside hostile constraints"
    gaps = ratio_of(beside_hostile, without, lambda figures: figures.gap)
    speeds = ratio_of(beside_hostile, without, lambda figures: figures.speed)
    return [
        TrialVerdict(f"p99 ITL of {what}, of that without", gaps, 1.5, False),
        TrialVerdict(f"throughput of {what}, of that without", speeds, 0.9, True),
    ]


@contextmanager
def _hostile_client(target: TrialTarget) -> Iterator[list[int]]:
    """One that asks without a pause; yields the statuses of its answers."""
    statuses: list[int] = []
    left = threading.Event()

    def ask() -> None:
        connection = HTTPConnection(target.place.host, target.place.http_port, timeout=120)
        for regex in cycle(_HOSTILE):
            if left.is_set():
                break
            number = time.monotonic_ns()  # of its own: the server remembers what it refused
            body = {"model": target.model, "prompt": [1], "max_tokens": 1, "guided_regex": f"{number}{regex}"}
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            statuses.append(answer.status)
        connection.close()

    client = threading.Thread(target=ask)
    client.start()
    try:
        yield statuses
    finally:
        left.set()
        client.join()


def mixed(target: TrialTarget, sizes: TrialSizes, log: Log) -> list[TrialVerdict]:
    """The median TTFT of short prompts that arrive right behind long ones, over what they have alone."""
    lengths = np.linspace(32, 255, sizes.shorts).astype(int).tolist()
    shorts = [PlannedRequest(index, 0.0, length, sizes.new) for index, length in enumerate(lengths)]
    longs = [PlannedRequest(len(shorts) + index, 0.0, sizes.long, sizes.new) for index in range(sizes.longs)]

    def first_tokens(jobs: Sequence[PlannedRequest]) -> float:
        return median(ttft(record) for record in target.put(jobs).records if record.index < len(shorts))

    _warm(target)
    alone, behind = take_turns(
        {"alone": lambda _: first_tokens(shorts), "behind long ones": lambda _: first_tokens([*longs, *shorts])},
        sizes.repeats,
        log,
        lambda seconds: f"TTFT of {len(shorts)} short prompts {seconds * 1e3:.0f} ms",
    ).values()
    what = f"p50 TTFT of short prompts behind {sizes.longs} of {sizes.long} tokens, of theirs alone"
    return [TrialVerdict(what, ratio_of(behind, alone, float), 3.0, False)]


_OWN = 16
"""Tokens of a sharing prompt that are its own."""


def prefix(target: TrialTarget, sizes: TrialSizes, log: Log) -> list[TrialVerdict]:
    """Throughput of prompts with a beginning that is cached already, over that of prompts with nothing in common."""
    jobs = uniform_jobs([0.0] * sizes.sharing, sizes.shared + _OWN, sizes.new)

    def shared_speed(shared: int) -> float:
        # The request that warms up has the same beginning.
        return speed(target.put(jobs, concurrency=sizes.sharing, shared=shared, warm_up=1))

    cached, computed = take_turns(
        {"cached": lambda _: shared_speed(sizes.shared), "computed": lambda _: shared_speed(0)},
        sizes.repeats,
        log,
        lambda speed: f"{speed:.1f} tokens/s",
    ).values()
    what = f"throughput with {sizes.shared} prompt tokens cached, of that without"
    return [TrialVerdict(what, ratio_of(cached, computed, float), 4.0, True)]
