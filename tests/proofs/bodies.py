"""Ten thousand malformed requests leave a server unharmed: `python -m tests.proofs.bodies`.

Mutants of valid requests go to every endpoint that takes a body, a third of them over gRPC. Each must be answered or
its connection closed within a bound, none with an error of the server's (5xx; over gRPC INTERNAL, UNKNOWN and the
like), none with a traceback in the log; afterwards the server still serves, and its memory has not grown. The engine
core computes with random weights.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from cyclopts import App
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from charonia.bench.server_process import ServerAddress

from ..fuzz.answer_checks import MutantVerdict, RpcSender, ask_http
from ..fuzz.grpc_mutations import rpc_mutant
from ..fuzz.http_mutations import LIMIT, http_mutant, valid_requests
from ..tiny_model import ECHO, NAME, tiny_server
from .process_stats import ServerStats, Trend, read_server_stats, trend, until_idle

AT_ONCE = 24
LOOKS = 60
"""How often memory is looked at."""
_RPC_SHARE = 3
"""Every third mutant goes over gRPC."""

app = App(name="python -m tests.proofs.bodies", help=__doc__)


class FuzzTargets(NamedTuple):
    """The models under test: a language model and, if it is there, one of the backend `identity`."""

    model: str
    identity: str = ""


class BodiesSample(NamedTuple):
    done: int
    seen: ServerStats


class BodiesResult(NamedTuple):
    verdicts: list[MutantVerdict]
    looks: list[BodiesSample]

    @property
    def faults(self) -> list[MutantVerdict]:
        return [verdict for verdict in self.verdicts if verdict.fault]


async def send_mutants(
    place: ServerAddress, targets: FuzzTargets, numbers: range, seed: int, tell: Callable[[], None] = lambda: None
) -> BodiesResult:
    """Send the mutants of these numbers, several at a time, and sample the memory of the server's processes."""
    model = targets.model
    valid, remaining, rpc = valid_requests(model, targets.identity), iter(numbers), RpcSender(place)
    found, every = BodiesResult([], []), max(1, len(numbers) // LOOKS)

    async def one_after_another() -> None:
        for number in remaining:
            if number % _RPC_SHARE:
                verdict = await ask_http(place, http_mutant(valid, seed, number))
            else:
                verdict = await rpc.ask(rpc_mutant(model, seed, number))
            if verdict.fault:
                verdict = verdict._replace(fault=f"number {number}: {verdict.fault}")
            found.verdicts.append(verdict)
            if len(found.verdicts) % every == 0:
                found.looks.append(BodiesSample(len(found.verdicts), read_server_stats(place)))
            tell()

    try:
        async with asyncio.TaskGroup() as senders:
            for _ in range(AT_ONCE):
                senders.create_task(one_after_another())
    finally:
        await rpc.close()
    await until_idle(place)
    return found


def tracebacks(place: ServerAddress) -> list[str]:
    """The last line of every traceback in the server's log."""
    text = "" if place.log is None else place.log.read_text(errors="replace")
    said = text.split("Traceback (most recent call last):")[1:]
    return [next((line for line in each.splitlines() if line[:1].strip()), "") for each in said]


def memory(looks: list[BodiesSample]) -> dict[str, Trend]:
    """The trends of the frontend's and the engine core's memory, in bytes."""
    done = [look.done for look in looks]
    return {
        "frontend": trend(done, [look.seen.frontend.rss for look in looks]),
        "core": trend(done, [look.seen.cores[0].rss for look in looks]),
    }


def show(console: Console, found: BodiesResult, trends: dict[str, Trend]) -> None:
    """Print the table of outcomes by mutation, and the figures."""
    answers = sorted({verdict.answer for verdict in found.verdicts})
    table = Table("mutation", "sent", *answers)
    counts = Counter((verdict.kind, verdict.answer) for verdict in found.verdicts)
    for kind in sorted({verdict.kind for verdict in found.verdicts}):
        row = [counts[kind, answer] for answer in answers]
        table.add_row(kind, str(sum(row)), *(str(count or "") for count in row))
    console.print(table)
    for verdict in found.faults[:20]:
        console.print(f"{verdict.kind}: {verdict.fault}", markup=False, highlight=False)
    for who, each in trends.items():
        print(f"{who}: {format_memory(each)}")


def format_memory(each: Trend) -> str:
    """Memory and its growth as text."""
    mib = 1 << 20
    word = "flat" if each.flat else "GROWS"
    return f"{each.mean / mib:.1f} MiB, grew {each.growth / mib:+.2f} MiB, noise {each.noise / mib:.2f} MiB: {word}"


@app.default
def main(count: int = 10_000, seed: int = 0, first: int = 0) -> None:
    """Send `count` mutants from number `first` on; the exit code is 0 if every check held."""
    console = Console()
    with tiny_server("--http-max-input-size", str(LIMIT)) as place, Progress(console=console) as progress:
        task = progress.add_task("mutants", total=count)
        found = asyncio.run(
            send_mutants(
                place, FuzzTargets(NAME, ECHO), range(first, first + count), seed, lambda: progress.advance(task)
            )
        )
        cores, broken = read_server_stats(place).cores, tracebacks(place)
    same = cores[0].pid == found.looks[0].seen.cores[0].pid
    trends = memory(found.looks)
    show(console, found, trends)
    for line in broken[:20]:
        print(f"in the log: {line}")
    print(
        f"{len(found.verdicts):,} mutants, {len(found.faults)} answered wrongly, {len(broken)} tracebacks, "
        f"core {'alive throughout' if same else 'LOST'}"
    )
    sys.exit(bool(found.faults or broken) or not same or not all(value.flat for value in trends.values()))


if __name__ == "__main__":
    app()
