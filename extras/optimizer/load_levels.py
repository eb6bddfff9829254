"""The load that configurations are measured under, level by level, and the figures of what came of it.

A level is a number of requests at a time, a rate, or a trace. The same level is the same load for every configuration
that was just loaded, to the token.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import inf
from statistics import fmean
from typing import Any

import msgspec
import numpy as np

from ...bench.load.driver import OK, EndpointName, LoadRecord, LoopMode, RequestOptions
from ...bench.load.figures import Spread, inter_token_times, ttft
from ...bench.load.infer_sender import InferPayload, encode_infer_payload
from ...bench.load.plan import Form, Prompts
from ...bench.load.planned_requests import PlannedRequest, draw_arrivals, due_within, read_trace, uniform_jobs
from ...bench.load.worker import LoadRun, LoadTarget, WorkerOutcome
from ...bench.server_process import ServerAddress
from ...core.errors import InvalidArgument
from ...core.tensor import NUMPY_TYPES, Tensor
from .options import DEFAULT_CONCURRENCY, LevelOptions
from .search_goal import LevelFigures

_ENDLESS = 100_000
"""Requests of a closed loop, which its duration ends."""
_TEXT = b"one two three four five six seven eight"


class LoadLevel(msgspec.Struct, frozen=True, kw_only=True):
    """One of `concurrency` requests at a time, `rate` a second, or a `trace`."""

    concurrency: int = 0
    rate: float = 0.0
    trace: str = ""

    def __str__(self) -> str:
        return f"concurrency {self.concurrency}" if self.concurrency else self.trace or f"{self.rate:g} requests/s"


def plan_levels(options: LevelOptions) -> list[LoadLevel]:
    """The levels from the lightest to the heaviest.

    Raises:
        InvalidArgument: several kinds of load, or numbers that mean nothing.
    """
    if sum(map(bool, (options.concurrency, options.rate, options.trace))) > 1:
        raise InvalidArgument("give one of --concurrency, --rate and --trace")
    for name in ("concurrency", "rate", "speedup", "prompt", "new", "batch", "timeout"):
        value = getattr(options, name)
        for number in value if isinstance(value, tuple) else (value,):
            if not 0 < number < inf:
                raise InvalidArgument(f"{name} must be above 0, got {number:g}", field=name)
    for name in ("seed", "shared_prefix"):
        if (value := getattr(options, name)) < 0:
            raise InvalidArgument(f"{name} must be at least 0, got {value}", field=name)
    if options.speedup != 1 and options.trace is None:
        raise InvalidArgument("--speedup is of --trace, which is not given", field="speedup")
    if options.trace is not None:
        read_trace(options.trace)  # what is wrong is told before anything is started
        return [LoadLevel(trace=options.trace.name)]
    if options.rate:
        return [LoadLevel(rate=rate) for rate in sorted(options.rate)]
    return [LoadLevel(concurrency=count) for count in sorted(options.concurrency or (DEFAULT_CONCURRENCY,))]


class LoadSubject(msgspec.Struct, frozen=True, kw_only=True):
    """What the load is put to. `door`: the endpoint of a model that streams text; without one it is v2's infer.
    `counts_tokens`: the server tells how many tokens an answer has. `api_key`: what to show, if anything."""

    model: str
    door: EndpointName | None = None
    counts_tokens: bool = True
    api_key: str = ""


def plan_load(
    subject: LoadSubject, address: ServerAddress, level: LoadLevel, options: LevelOptions, seconds: float, config: Any
) -> LoadRun:
    """The load of one level. `config`: the model's, as the server tells it in JSON. Raises `InvalidArgument` where its
    inputs cannot be made."""
    payload = None if subject.door is not None else infer_payload(config, options)
    manner = RequestOptions(subject.model, counted=subject.counts_tokens, api_key=subject.api_key)
    # Nothing that measures more tokens than it was asked for: text has about a token a word.
    form: Form = "ids" if subject.door == "completions" else "text"
    jobs = list(_jobs(level, options, seconds, subject.door is not None))
    require_requests(jobs, level, seconds)
    return LoadRun(
        target=LoadTarget(
            host=address.host,
            port=address.http_port,
            door=subject.door or "completions",
            manner=manner,
            payload=payload,
        ),
        jobs=jobs,
        prompts=Prompts(form=form, shared=options.shared_prefix, seed=options.seed),
        pace=LoopMode(concurrency=level.concurrency, duration=seconds, timeout=options.timeout),
        warm_up=2,
    )


def require_requests(jobs: Iterable[PlannedRequest], level: LoadLevel, seconds: float) -> None:
    """Raises `InvalidArgument` where a measurement of a level would have none."""
    if not any(True for _ in jobs):
        message = f"no request of {level} is due within the {seconds:.3g} s of a measurement: give more --seconds"
        raise InvalidArgument(message, field="seconds")


def check_levels(levels: Sequence[LoadLevel], options: LevelOptions, seconds: float) -> None:
    """Raises as `require_requests` does, before anything is started."""
    for level in levels:
        require_requests(_jobs(level, options, seconds, True), level, seconds)


def _jobs(level: LoadLevel, options: LevelOptions, seconds: float, streams: bool) -> Iterator[PlannedRequest]:
    prompt, new = (options.prompt, options.new) if streams else (1, 1)
    if level.concurrency:
        yield from uniform_jobs([0.0] * _ENDLESS, prompt, new)
    elif level.rate:
        yield from uniform_jobs(draw_arrivals(level.rate, options.seed, duration=seconds), prompt, new)
    elif options.trace is not None:
        jobs = due_within(read_trace(options.trace, speedup=options.speedup), seconds)
        yield from jobs if streams else uniform_jobs([job.due for job in jobs], prompt, new)


def infer_payload(config: Any, options: LevelOptions) -> InferPayload:
    """A request with values of no meaning for every input that is not optional, or whose shape is given; where all are
    optional, for the first.

    Raises:
        InvalidArgument: an input has free dimensions, and nothing says how large they are; or there is no such input.
    """
    shapes = dict(map(_parse_shape, options.shape))
    inputs = config["input"]
    if unknown := shapes.keys() - {spec["name"] for spec in inputs}:
        known = ", ".join(spec["name"] for spec in inputs) or "none"
        message = f"shape: model '{config['name']}' has no input '{min(unknown)}', only {known}"
        raise InvalidArgument(message, field="shape")
    inputs = [spec for spec in inputs if not spec.get("optional") or spec["name"] in shapes] or inputs[:1]
    batched = int(config.get("max_batch_size") or 0) > 0
    if options.batch > 1 and not batched:
        raise InvalidArgument(f"batch: model '{config['name']}' takes no batches", field="batch")
    return encode_infer_payload([_tensor(spec, shapes, (options.batch,) * batched) for spec in inputs])


def _parse_shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, colon, dims = text.rpartition(":")
    try:
        shape = tuple(int(part) for part in dims.split(","))
    except ValueError:
        shape = ()
    if not colon or not shape or min(shape) < 1:
        raise InvalidArgument(f"shape: '{text}' is not of the form NAME:8,128", field="shape")
    return name, shape


def _tensor(spec: Any, shapes: dict[str, tuple[int, ...]], batch: tuple[int, ...]) -> Tensor:
    name = spec["name"]
    dims = tuple(int(dim) for dim in spec["dims"])
    sizes = shapes.get(name, dims)
    fits = len(sizes) == len(dims) and all(there in (-1, here) for here, there in zip(sizes, dims, strict=True))
    if not fits or min(sizes, default=1) < 0:
        message = f"input '{name}' has dims [{', '.join(map(str, dims))}]: say its shape with --shape {name}:..."
        raise InvalidArgument(message, field="shape")
    shape = (*batch, *sizes)
    datatype = spec["data_type"].removeprefix("TYPE_").replace("STRING", "BYTES")
    dtype = np.dtype(NUMPY_TYPES[datatype])
    if datatype == "BYTES":
        return Tensor(name, datatype, shape, np.full(shape, _TEXT, object))
    # Zeros are the one number that every index, mask and size may be; floats are drawn, so that none is denormal.
    random = np.random.default_rng(0)
    data = random.random(shape).astype(dtype) if dtype.kind == "f" else np.zeros(shape, dtype)
    return Tensor(name, datatype, shape, data)


def level_figures(
    level: LoadLevel,
    subject: LoadSubject,
    options: LevelOptions,
    outcome: WorkerOutcome,
    seconds: float,
    memory: float | None,
) -> LevelFigures:
    """What came of a level's load."""
    records = outcome.records
    good = [record for record in records if record.status == OK]
    streams = subject.door is not None
    return LevelFigures(
        level=str(level),
        requests=len(records),
        throughput=_throughput(level, good, len(records), seconds, None if streams else options.batch),
        failed=1 - len(good) / len(records) if records else 1.0,
        memory=memory,
        e2e=Spread.of([record.ended - record.due for record in good]),
        ttft=Spread.of([ttft(record) for record in good]) if streams else None,
        itl=Spread.of([gap for record in good for gap in inter_token_times(record)]) if streams else None,
        generator=outcome.cpu / outcome.seconds,
    )


def _throughput(
    level: LoadLevel, good: Sequence[LoadRecord], requests: int, seconds: float, batch: int | None
) -> float:
    """Items or output tokens a second. In a closed loop by Little's law, requests at a time over the mean time of one:
    what is half done when the time is over weighs nothing, however short that is."""
    if not good:
        return 0.0
    items = fmean(record.tokens if batch is None else batch for record in good)
    if level.concurrency:
        return level.concurrency * items / fmean(record.ended - record.sent for record in good) * len(good) / requests
    return items * len(good) / max(seconds, max(record.ended for record in good))
