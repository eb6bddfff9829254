"""Two thousand clients disconnect and leave nothing behind: `python -m tests.proofs.disconnects`.

Clients ask a language model, a Python model, ensembles and a pipeline, over HTTP, SSE and gRPC, many at a time, and
leave at random moments: before they send anything, midway in head or body, before the first event, in the stream,
behind it; with a clean close or a reset. Afterwards the server, of one frontend, of three, and of three that it got
when it was busy, must hold what it held before: no request, block, descriptor, socket, thread, process or memory more.
It must have counted an end for each request that it read, every model must still answer, and it must shut down at once,
as nothing is left to finish.
"""

import asyncio
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import NamedTuple

from cyclopts import App
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from charonia.bench.load.fake_model import NAME, write_repository
from charonia.bench.server_process import ServerAddress, own_server
from charonia.cli.frontend_count import VARIABLE

from ..fuzz.disconnecting_clients import (
    DOORS,
    ClientPlan,
    GrpcChannels,
    LeaveMoment,
    StreamQuestion,
    llm_question,
    plan_client,
    run_client,
)
from ..pipeline_models import CODED, NESTED, STREAM, TALK, write_ensembles, write_model
from .bodies import tracebacks
from .process_stats import ServerStats, counted_since, read_server_stats, scrape, settled, until_idle

AT_ONCE = 64
_WARM_UP = 1 / 4
"""Before the first census, this share of visits is paid beside the others: pools and arenas fill."""
_LEAVE_SECONDS = 5.0
"""A server with nothing to do leaves within this time."""
_GROWTH = 0.05
"""Memory may be this share larger: what 2,000 requests of 10 KiB would leave is more."""

# Steps take some time, or nobody would leave in the middle of an answer.
ENGINE = {"fake_step_seconds": 0.005, "max_num_seqs": 64, "max_queued_requests": 10_000}

_MANY = 2_000
"""Responses of a Python model: more than may wait unread, so that a sender which is not told waits for ever."""
_TEXT = {"text_input": "def f(x): return", "stream": True}
_QUESTIONS = (
    llm_question(NAME),
    StreamQuestion(STREAM, {"N": 0}, {}, "N", many=_MANY),
    *(StreamQuestion(model, _TEXT, {"ignore_eos": True}, "max_tokens") for model in (TALK, NESTED, CODED)),
)
_LLM_DOORS = (*DOORS, "generate")
_OTHER_DOORS = ("generate_stream", "generate", "grpc")

app = App(name="python -m tests.proofs.disconnects", help=__doc__)


class Visit(NamedTuple):
    """What a client asks, and how it leaves."""

    question: StreamQuestion
    plan: ClientPlan

    @property
    def ended_by_text(self) -> bool:
        """Whether its answer is a language model's, which it stays for."""
        return self.question.model == NAME and self.plan.moment is LeaveMoment.END


def plan_visit(seed: int, number: int) -> Visit:
    """The visit of this number."""
    question = Random(f"{seed}:question:{number}").choice(_QUESTIONS)
    return Visit(question, plan_client(seed, number, _LLM_DOORS if question.model == NAME else _OTHER_DOORS))


@contextmanager
def visited_server(frontends: str) -> Iterator[ServerAddress]:
    """A server of all the models that are visited. `frontends`: a number; auto: it has three when this begins."""
    with TemporaryDirectory(prefix="charonia-proof-") as directory:
        repository = write_repository(Path(directory) / "models", ENGINE)
        write_ensembles(repository, NAME)
        write_model(repository, STREAM)
        flags, growth = ("--model-repository", str(repository), "--frontends", frontends), "cores=12 busy=0 seconds=0.5"
        with own_server(*flags, environment={VARIABLE: growth}) as place:
            while frontends == "auto" and "take new connections" not in (place.log or Path()).read_text():
                time.sleep(0.1)
            yield place


class DisconnectsResult(NamedTuple):
    """The server's resources before and after the disconnects, the outcomes that it counted, and visits that hung."""

    visits: Sequence[Visit]
    before: ServerStats
    after: ServerStats
    outcomes: dict[str, int]
    hung: Sequence[str]

    @property
    def faults(self) -> list[str]:
        """What the disconnects left behind."""
        whole = sum(
            visit.plan.moment not in (LeaveMoment.CONNECTED, LeaveMoment.HEAD, LeaveMoment.BODY)
            for visit in self.visits
        )
        stayed = sum(visit.ended_by_text for visit in self.visits)
        found = [*self.hung, *self.after.beyond(self.before)]
        if self.outcomes.get("length", 0) < stayed:
            found.append(f"{stayed} stayed to the end, {self.outcomes.get('length', 0)} were answered to the end")
        if "error" in self.outcomes:
            found.append(f"{self.outcomes['error']} ended with an error of the server's")
        # A request over HTTP that was reset may have been lost on the way.
        if not whole / 2 <= sum(self.outcomes.values()):
            found.append(f"{whole} requests were sent whole, {sum(self.outcomes.values())} have an end")
        return found


async def run_disconnects(
    place: ServerAddress, numbers: range, seed: int, tell: Callable[[], None] = lambda: None
) -> DisconnectsResult:
    """Run the clients of these numbers, wait until the server is idle, and ask every model once more.

    Raises:
        Unavailable: it does not become idle.
    """
    warm_up = [plan_visit(seed, -1 - n) for n in range(round(len(numbers) * _WARM_UP))]
    hung = await run_clients(place, [*warm_up, *_LAST_VISITS], tell)
    counted = (await until_idle(place)).outcomes()
    before, visits = await at_rest(place), [plan_visit(seed, number) for number in numbers]
    hung += await run_clients(place, visits, tell)
    outcomes = counted_since(counted, (await until_idle(place)).outcomes())
    hung += await run_clients(place, _LAST_VISITS)
    return DisconnectsResult(visits, before, await settled(place, before), outcomes, hung)


_LAST_VISITS = [
    Visit(question, ClientPlan("generate_stream", LeaveMoment.END, abrupt=False, events=0, wait=0, share=1))
    for question in _QUESTIONS
]
"""To every model, to the end of its answer."""


async def at_rest(place: ServerAddress) -> ServerStats:
    """The server's resources once its connections are closed: when two readings agree."""
    last = read_server_stats(place)
    while True:
        await asyncio.sleep(0.3)
        now = read_server_stats(place)
        if now.frontend.sockets == last.frontend.sockets:
            return now
        last = now


async def run_clients(
    place: ServerAddress, visits: Sequence[Visit], tell: Callable[[], None] = lambda: None
) -> list[str]:
    """Run these clients, `AT_ONCE` at a time. Returns those that wait for an answer in vain."""
    remaining, channels, hung = iter(visits), GrpcChannels(), list[str]()

    async def one_after_another() -> None:
        for visit in remaining:
            try:
                await run_client(place, *visit, channels)
            except TimeoutError:
                hung.append(f"{visit.question.model} over {visit.plan.door} does not answer")
            tell()

    async with asyncio.TaskGroup() as visitors:
        for _ in range(min(AT_ONCE, len(visits))):
            visitors.create_task(one_after_another())
    return hung


def shutdown_seconds(place: ServerAddress) -> float:
    """The time that a server takes to end after SIGTERM, in seconds; infinite if it does not."""
    assert place.pid is not None
    asked = time.monotonic()
    os.kill(place.pid, signal.SIGTERM)
    while not _ended(place.pid):
        if time.monotonic() - asked > _LEAVE_SECONDS:
            return float("inf")
        time.sleep(0.02)
    return time.monotonic() - asked


def _ended(pid: int) -> bool:
    # Its parent, who is us, has not reaped it yet.
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "Z"


def show(console: Console, remains: DisconnectsResult) -> None:
    """Print the moments of the disconnects, and the resources before and after."""
    counts = Counter((visit.plan.moment, visit.plan.door) for visit in remains.visits)
    doors = sorted({door for _, door in counts})
    left = Table("left", *doors)
    for moment in LeaveMoment:
        left.add_row(moment.value, *(str(counts[moment, door]) for door in doors))
    console.print(left)
    held = Table("held", "frontend before", "after", "core before", "after")
    before, after = remains.before, remains.after
    for what in ("descriptors", "sockets", "threads"):
        pairs = ((before.frontend, after.frontend), (before.cores[0], after.cores[0]))
        held.add_row(what, *(str(getattr(each, what)) for pair in pairs for each in pair))
    mib = 1 << 20
    sizes = (before.frontend.rss, after.frontend.rss, before.cores[0].rss, after.cores[0].rss)
    held.add_row("memory, MiB", *(f"{size / mib:.1f}" for size in sizes))
    console.print(held)


def grown_processes(remains: DisconnectsResult) -> list[str]:
    """The processes whose memory has grown by more than noise."""
    before, after = ([stats.frontend, *stats.cores, *stats.others] for stats in (remains.before, remains.after))
    known = {process.pid: process.rss for process in before}
    pairs = {process.name: (known[process.pid], process.rss) for process in after if known.get(process.pid)}
    return [f"{who} grew by {now / then - 1:.0%}" for who, (then, now) in pairs.items() if now > then * (1 + _GROWTH)]


@app.default
def main(count: int = 2_000, seed: int = 0, frontends: tuple[str, ...] = ("1", "3", "auto")) -> None:
    """Run `count` clients after the warm-up at a server of each setting of frontends; the exit code is 0 if nothing was
    left behind."""
    failures = [_fails(Console(), setting, count, seed) for setting in frontends]
    sys.exit(any(failures))


def _fails(console: Console, frontends: str, count: int, seed: int) -> bool:
    """Run the clients at a server of so many frontends, and print what came of it; whether anything was left behind."""
    with visited_server(frontends) as place:
        with Progress(console=console) as progress:
            task = progress.add_task(f"visits, frontends: {frontends}", total=count + round(count * _WARM_UP))
            remains = asyncio.run(run_disconnects(place, range(count), seed, lambda: progress.advance(task)))
        busy, broken = scrape(place).busy, tracebacks(place)
        seconds = shutdown_seconds(place)
    show(console, remains)
    faults = [*remains.faults, *grown_processes(remains), *(f"in the log: {line}" for line in broken)]
    faults += [f"left in {seconds:g} s"] if seconds > _LEAVE_SECONDS else []
    for fault in faults[:20]:
        print(fault)
    print(f"{count:,} visits, ends {remains.outcomes}, left {busy or 'nothing'}, and the server in {seconds:.2f} s")
    return bool(faults)


if __name__ == "__main__":
    app()
