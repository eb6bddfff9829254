"""The engine core is killed again and again under load: `python -m tests.proofs.kills`.

Clients of all streaming endpoints ask at random moments while the core gets SIGKILL again and again. Every stream must
end with its whole result or with an error; the server must have counted the same ends as the clients; it must be ready
again before the next kill; and afterwards no process, zombie, descriptor or socket of dead cores may be left.
"""

import asyncio
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, get_args

from cyclopts import App
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from charonia.bench.load.driver import CHATS, OK, EndpointName, LoadRecord, LoopMode, RequestOptions
from charonia.bench.load.fake_model import NAME
from charonia.bench.load.plan import Prompts
from charonia.bench.load.worker import LoadRun, LoadTarget, run
from charonia.bench.server_process import ServerAddress, is_ready
from charonia.core.errors import Unavailable

from .fake_load import RequestShape, fake_server, poisson_jobs, run_concurrently
from .process_stats import ServerStats, counted_since, read_server_stats, scrape, settled, until_idle

DOORS: tuple[EndpointName, ...] = get_args(EndpointName)
PROMPT, NEW = 16, 40
ENGINE = {"fake_step_seconds": 0.02, "max_num_seqs": 64}
_LONGEST = 60.0
"""Seconds after which a stream that has not ended is one that hangs."""
_POLL_SECONDS = 0.02
_RESTARTS = "charonia_core_restarts_total"

app = App(name="python -m tests.proofs.kills", help=__doc__)


class KillTarget(NamedTuple):
    """The model under load, and the processes of the server of which one is killed at a time."""

    model: str
    pids: Callable[[ServerAddress], list[int]]


class KillsResult(NamedTuple):
    """The result of a run. `away`: seconds from each kill until the server was ready again; `outcomes`: the ends that
    the server counted."""

    records: Sequence[LoadRecord]
    away: Sequence[float]
    outcomes: dict[str, int]
    restarts: int
    before: ServerStats
    after: ServerStats

    @property
    def answered(self) -> int:
        return sum(_answered(record) for record in self.records)

    @property
    def told(self) -> int:
        """The number of clients that were told of an error."""
        return sum(_told(record) for record in self.records)

    @property
    def faults(self) -> list[str]:
        """The failed checks."""
        lost = Counter(_fate(record) for record in self.records if not (_answered(record) or _told(record)))
        found = [f"{count} streams ended otherwise: {status}" for status, count in lost.items()]
        counted = Counter({_WORDS.get(name, name): 0 for name in self.outcomes})
        for name, count in self.outcomes.items():
            counted[_WORDS.get(name, name)] += count
        seen = {"answered": self.answered, "told": self.told}
        if dict(+counted) != {name: count for name, count in seen.items() if count}:
            found.append(f"clients saw {seen}, the server counted {self.outcomes}")
        if self.restarts != len(self.away):
            found.append(f"{len(self.away)} times it was killed, {self.restarts} times restarted")
        return [*found, *self.after.beyond(self.before)]


_WORDS = {"length": "answered", "stop": "answered", "error": "told", "rejected": "told"}
"""The server's outcomes as clients see them."""


def _answered(record: LoadRecord) -> bool:
    return record.status == OK and record.tokens == NEW


def _told(record: LoadRecord) -> bool:
    return record.status.startswith(("event: ", "HTTP 503", "HTTP 429", "gRPC UNAVAILABLE"))


def _fate(record: LoadRecord) -> str:
    return f"after {record.tokens} of {NEW} tokens" if record.status == OK else record.status


def living_cores(place: ServerAddress) -> list[int]:
    return [core.pid for core in read_server_stats(place).cores if not core.zombie]


CORE = KillTarget(NAME, living_cores)


def run_kills(
    place: ServerAddress,
    rate: float,
    kills: Sequence[float],
    patience: float,
    tell: Callable[[str], None] = lambda line: None,
    quarry: KillTarget = CORE,
) -> KillsResult:
    """Ask `rate` times a second, and kill one of the `quarry` at these seconds; after the last kill the load goes on
    for as long as before the first.

    Raises:
        Unavailable: the server was not ready again within `patience` seconds.
    """
    seconds = kills[-1] + kills[0]
    asyncio.run(_tried(place, patience, tell, quarry))
    before, seen = read_server_stats(place), scrape(place)
    with ThreadPoolExecutor(len(DOORS)) as threads:
        loads = [_load(place, door, rate / len(DOORS), seconds, seed, quarry) for seed, door in enumerate(DOORS)]
        putting = [threads.submit(run, load) for load in loads]
        away = list(_kill_at(place, kills, patience, tell, quarry))
        records = [record for put in putting for outcome in put.result() for record in outcome.records]
    now = asyncio.run(until_idle(place))
    after = asyncio.run(settled(place, before))
    restarts = int(now.total(_RESTARTS) - seen.total(_RESTARTS))
    return KillsResult(records, away, counted_since(seen.outcomes(), now.outcomes()), restarts, before, after)


async def _tried(place: ServerAddress, patience: float, tell: Callable[[str], None], quarry: KillTarget) -> None:
    """A warm-up before the first census: every endpoint is asked, and a core killed."""
    run_concurrently([_load(place, door, 8, 1, -1 - seed, quarry) for seed, door in enumerate(DOORS)])
    tell("killing one before it counts")
    kill(place, max(patience, 30.0), quarry)
    await until_idle(place)


def _load(
    place: ServerAddress, door: EndpointName, rate: float, seconds: float, seed: int, quarry: KillTarget
) -> LoadRun:
    return LoadRun(
        target=LoadTarget(host=place.host, port=place.port_of(door), door=door, manner=RequestOptions(quarry.model)),
        jobs=poisson_jobs(RequestShape(PROMPT, NEW), rate, seconds, abs(seed)),
        prompts=Prompts(form="text" if door in CHATS else "ids", seed=abs(seed)),
        pace=LoopMode(timeout=_LONGEST),
        warm_up=0,
    )


def _kill_at(
    place: ServerAddress, kills: Sequence[float], patience: float, tell: Callable[[str], None], quarry: KillTarget
) -> Iterator[float]:
    begun = _begun(place, patience)
    for number, due in enumerate(kills, 1):
        time.sleep(max(0.0, begun + due - time.monotonic()))
        away = kill(place, patience, quarry)
        tell(f"killed {number}, ready again after {away:.2f} s")
        yield away


def _begun(place: ServerAddress, patience: float) -> float:
    """The time when the first request runs: generators take a while to start, and a kill without requests proves
    nothing."""
    deadline = time.monotonic() + patience
    while not scrape(place).total("charonia_requests_running") and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return time.monotonic()


def kill(place: ServerAddress, patience: float, quarry: KillTarget = CORE) -> float:
    """Kill one process of the quarry; returns the seconds until its successor serves.

    Raises:
        Unavailable: there was none to kill, or no successor within `patience` seconds.
    """
    cores, quarry_pids = living_cores(place), quarry.pids(place)
    if not quarry_pids:
        raise Unavailable("there is nothing to kill")
    os.kill(random.choice(quarry_pids), signal.SIGKILL)
    killed = time.monotonic()
    while [core.pid for core in read_server_stats(place).cores] in ([], cores) or not is_ready(place):
        if time.monotonic() - killed > patience:
            raise Unavailable(f"not ready {patience:g} s after the kill")
        time.sleep(_POLL_SECONDS)
    return time.monotonic() - killed


def show(console: Console, aftermath: KillsResult) -> None:
    """Print the ends of the streams as the clients saw them, and what was lost."""
    table = Table("ended", "streams")
    for status, count in Counter(record.status for record in aftermath.records).most_common():
        table.add_row(status, str(count))
    console.print(table)
    for fault in aftermath.faults[:20]:
        print(fault)
    away = sorted(aftermath.away)
    print(
        f"{len(away)} kills, ready again after {away[len(away) // 2]:.2f} s (longest {away[-1]:.2f}); "
        f"{len(aftermath.records):,} streams: {aftermath.answered:,} answered, {aftermath.told:,} told so; "
        f"the server counted {aftermath.outcomes}"
    )


@app.default
def main(seconds: float = 120.0, every: float = 10.0, rate: float = 40.0) -> None:
    """Kill for so many `seconds`; the exit code is 0 if nothing was lost."""
    console = Console()
    with fake_server(ENGINE) as place, Progress(console=console) as progress:
        task = progress.add_task("under load", total=None)
        kills = [(number + 0.5) * every for number in range(max(1, round(seconds / every)))]
        aftermath = run_kills(place, rate, kills, every, lambda line: progress.update(task, description=line))
    show(console, aftermath)
    sys.exit(bool(aftermath.faults))


if __name__ == "__main__":
    app()
