"""A server over a fake model and loads of several tenants, for the proofs under load.

A step of the fake executor takes a known time, so the capacity is known too, and no machine's speed is measured.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from charonia.bench.load.driver import OK, LoadRecord, LoopMode, RequestOptions
from charonia.bench.load.fake_model import NAME, write_repository
from charonia.bench.load.plan import Prompts
from charonia.bench.load.planned_requests import PlannedRequest, draw_arrivals, uniform_jobs
from charonia.bench.load.worker import LoadRun, LoadTarget, run
from charonia.bench.server_process import ServerAddress, own_server


@contextmanager
def fake_server(
    parameters: Mapping[str, object], *flags: str, environment: Mapping[str, str] | None = None
) -> Iterator[ServerAddress]:
    """A server over the fake model with these `parameters`, and an `environment` beside ours; a context manager that
    stops it."""
    with TemporaryDirectory(prefix="charonia-proof-") as directory:
        repository = write_repository(Path(directory) / "models", parameters)
        with own_server("--model-repository", str(repository), *flags, environment=environment) as place:
            yield place


class RequestShape(NamedTuple):
    """The numbers of tokens of every request."""

    prompt: int
    new: int


def poisson_jobs(shape: RequestShape, rate: float, seconds: float, seed: int) -> list[PlannedRequest]:
    """`rate` requests a second on average, which arrive at random."""
    return uniform_jobs(draw_arrivals(rate, seed, duration=seconds), *shape)


def open_load(
    place: ServerAddress, shape: RequestShape, rate: float, seconds: float, seed: int, api_key: str = ""
) -> LoadRun:
    """A load of `rate` requests a second on average, with random arrivals."""
    return _load(place, poisson_jobs(shape, rate, seconds, seed), LoopMode(), seed, api_key)


def closed_load(
    place: ServerAddress, shape: RequestShape, concurrency: int, seconds: float, api_key: str = ""
) -> LoadRun:
    """A load of so many concurrent requests."""
    jobs = uniform_jobs([0.0] * 100_000, *shape)
    return _load(place, jobs, LoopMode(concurrency=concurrency, duration=seconds), 0, api_key)


def _load(place: ServerAddress, jobs: list[PlannedRequest], pace: LoopMode, seed: int, api_key: str) -> LoadRun:
    target = LoadTarget(
        host=place.host,
        port=place.http_port,
        door="completions",
        manner=RequestOptions(NAME, counted=False, api_key=api_key),
    )
    return LoadRun(target=target, jobs=jobs, prompts=Prompts(seed=seed), pace=pace, warm_up=1)


def run_load(load: LoadRun) -> list[LoadRecord]:
    """The result of one load."""
    return [record for outcome in run(load) for record in outcome.records]


def run_concurrently(loads: Sequence[LoadRun]) -> list[list[LoadRecord]]:
    """The results of several loads that run at the same time, in their order."""
    with ThreadPoolExecutor(len(loads)) as threads:
        return list(threads.map(run_load, loads))


def saturating_rate(
    place: ServerAddress, shape: RequestShape, concurrency: int, seconds: float, api_key: str = ""
) -> float:
    """The requests a second that a server completes while requests always wait, without the start and the end of the
    load."""
    records = run_load(closed_load(place, shape, concurrency, seconds, api_key))
    ends = [record.ended for record in records if record.status == OK and seconds / 4 <= record.ended <= seconds]
    return len(ends) / (seconds * 3 / 4)
