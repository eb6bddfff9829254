"""The resources of a server as an operator sees them: its processes in /proc, its work on the metrics port;
and whether a quantity that is sampled again and again grows.
"""

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from charonia.bench.server_process import ServerAddress, children, fetch_metrics
from charonia.core.errors import Unavailable

_POLL_SECONDS = 0.05
_CORE = "charonia-core"
_LATE_THREADS = 4
_PAGE = os.sysconf("SC_PAGE_SIZE")


class ProcessStats(NamedTuple):
    """One process; `rss` in bytes; `mappings`: regions that it shares with others. A zombie has only its name."""

    pid: int
    name: str
    zombie: bool
    rss: int
    descriptors: int
    sockets: int
    threads: int
    mappings: int


class ServerStats(NamedTuple):
    """A server's processes: the frontend, or the hub of several, its engine cores, and other children: frontends,
    processes of Python models, resource trackers."""

    frontend: ProcessStats
    cores: tuple[ProcessStats, ...]
    others: tuple[ProcessStats, ...] = ()

    def beyond(self, before: "ServerStats") -> Iterator[str]:
        """The resources that were not held before: descriptors, sockets, mapped regions, processes, zombies, and more
        threads than pools may start late."""
        yield from _more("frontend", before.frontend, self.frontend)
        for what in ("cores", "others"):
            then, now = getattr(before, what), getattr(self, what)
            if len(now) > len(then):
                yield f"{len(now)} {what}, {len(then)} before"
            yield from (f"zombie {each.name} ({each.pid})" for each in now if each.zombie)
        for old, new in zip(before.cores, self.cores, strict=False):
            yield from _more("core", old, new)
        known = {each.pid: each for each in before.others}
        for each in self.others:
            if each.pid in known:
                yield from _more(f"{each.name} ({each.pid})", known[each.pid], each)


def _more(who: str, before: ProcessStats, now: ProcessStats) -> Iterator[str]:
    for what, late in (("descriptors", 0), ("sockets", 0), ("mappings", 0), ("threads", _LATE_THREADS)):
        then, count = getattr(before, what), getattr(now, what)
        if count > then + late:
            yield f"{who}: {count} {what}, {then} before"


def read_server_stats(place: ServerAddress) -> ServerStats:
    """Raises `Unavailable` if the server is none of ours, or gone."""
    if place.pid is None:
        raise Unavailable("the server is not ours to look into")
    try:
        found = list(_living(children(place.pid)))
        cores = tuple(each for each in found if each.name == _CORE)
        return ServerStats(_process(place.pid), cores, tuple(each for each in found if each.name != _CORE))
    except OSError as error:
        raise Unavailable(f"the server is gone: {error}") from None


def _living(pids: list[int]) -> Iterator[ProcessStats]:
    for pid in sorted(pids):
        try:
            yield _process(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue


def _process(pid: int) -> ProcessStats:
    folder = Path(f"/proc/{pid}")
    # The second field is a name in parentheses, which may hold anything.
    head, _, rest = (folder / "stat").read_text().rpartition(")")
    name, fields = head.partition("(")[2], rest.split()
    if fields[0] == "Z":
        return ProcessStats(pid, name, True, 0, 0, 0, 0, 0)
    links = [_target(link) for link in (folder / "fd").iterdir()]
    sockets = sum(link.startswith("socket:") for link in links)
    mappings = sum("/memfd:" in line for line in (folder / "maps").read_text().splitlines())
    return ProcessStats(pid, name, False, int(fields[21]) * _PAGE, len(links), sockets, int(fields[17]), mappings)


def process_name(pid: int) -> str:
    """As the system shows it; empty where there is no such process."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except FileNotFoundError:
        return ""


class MetricsScrape:
    """One scrape of the metrics port."""

    def __init__(self, text: str) -> None:
        self._samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def total(self, name: str, **labels: str) -> float:
        """The sum of all series of this name that have these labels; 0 without any."""
        wanted = labels.items()
        return sum(sample.value for sample in self._samples if sample.name == name and wanted <= sample.labels.items())

    def outcomes(self) -> dict[str, int]:
        """Ended requests by outcome."""
        counts: dict[str, int] = {}
        for sample in self._samples:
            if sample.name == "charonia_requests_total":
                outcome = sample.labels["outcome"]
                counts[outcome] = counts.get(outcome, 0) + int(sample.value)
        return counts

    @property
    def busy(self) -> dict[str, float]:
        """The gauges of work that are not zero, by name."""
        names = (
            "charonia_requests_running",
            "charonia_requests_waiting",
            "charonia_kv_cache_usage_ratio",
            "nv_inference_pending_request_count",
        )
        return {name: value for name in names if (value := self.total(name))}


def counted_since(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """The differences of two counts, without zeros."""
    return {name: count - before.get(name, 0) for name, count in now.items() if count != before.get(name, 0)}


def scrape(place: ServerAddress) -> MetricsScrape:
    """Raises `Unavailable` if no metrics port answers."""
    try:
        return MetricsScrape(fetch_metrics(place))
    except OSError as error:
        raise Unavailable(f"the metrics port does not answer: {error}") from None


async def until_idle(place: ServerAddress, seconds: float = 30.0) -> MetricsScrape:
    """Wait until nothing runs, waits or holds a block.

    Raises:
        Unavailable: the server is not idle after so many seconds; the message names what is left.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while (seen := await asyncio.to_thread(scrape, place)).busy:
        if loop.time() > deadline:
            raise Unavailable(f"not idle after {seconds:g} s: {seen.busy}")
        await asyncio.sleep(_POLL_SECONDS)
    return seen


async def settled(place: ServerAddress, before: ServerStats, seconds: float = 30.0) -> ServerStats:
    """Wait until no more is held than before, or for so many seconds; connections take a moment to close."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while any((now := read_server_stats(place)).beyond(before)) and loop.time() < deadline:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(_POLL_SECONDS)
    return now


_WARM_UP = 1 / 3
"""This share of the looks is left out: pools fill, arenas grow to what the load needs."""
_SIGMAS = 3.0
_LEAST = 0.01
"""Noise is at least this share of the mean: allocators keep pages, and never the same ones twice."""


class Trend(NamedTuple):
    """The straight line of least squares through the samples after the warm-up.

    `growth` along it from the first of them to the last, in the quantity's unit; `slope` per unit of x. `noise` is the
    growth that means nothing: three standard deviations of the samples around the line, or 1 % of the mean.
    """

    mean: float
    slope: float
    growth: float
    noise: float

    @property
    def flat(self) -> bool:
        """Whether it does not grow; it may shrink."""
        return self.growth <= self.noise


def trend(at: Sequence[float], values: Sequence[float]) -> Trend:
    """The trend of `values` over the ascending `at`. At least three samples must remain after the warm-up."""
    skipped = round(len(at) * _WARM_UP)
    x, y = np.array(at[skipped:], float), np.array(values[skipped:], float)
    slope, start = np.polyfit(x, y, 1)
    spread, mean = float(np.std(y - (start + slope * x))), float(np.mean(y))
    return Trend(mean, float(slope), float(slope * (x[-1] - x[0])), max(_SIGMAS * spread, _LEAST * mean))
