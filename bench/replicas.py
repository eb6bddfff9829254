"""Where requests go among replicas: `python -m charonia.bench.replicas`. Real engine cores, the fake executor in them.

Questions about documents, each question's prompt a document and a few tokens more, put by so many clients at once:
with affinity (a request goes where its document is cached) and without (where there is least to do). The caches of all
replicas together hold every document, those of one do not. A step takes a fixed time and more for each token, so that
what comes out is the routing's doing, not the machine's.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import NamedTuple

from cyclopts import App
from rich.table import Table

from ..engine.client.client import EngineClient
from ..engine.client.routing import PrefixIndex, prompt_prefixes
from ..engine.config import CacheConfig, EngineConfig, FakeConfig
from ..engine.core.messages import AddRequest
from ..scheduler.config import SchedulerConfig
from .command import report_console, seconds_of

BLOCK_SIZE = 16
STEP_SECONDS, TOKEN_SECONDS = 4e-3, 20e-6

HASH_BAR = 0.1
"""Microseconds that finding a replica may take, a prompt token."""

app = App(name="python -m charonia.bench.replicas", help=__doc__)


@dataclass(frozen=True, slots=True)
class Workload:
    """`requests` questions by `clients` at a time, about `documents` of `document` tokens each."""

    documents: int = 48
    document: int = 1024
    question: int = 64
    answer: int = 16
    clients: int = 16
    requests: int = 600

    def prompts(self) -> list[list[int]]:
        """Documents in random order, some asked about more than others."""
        random, weights = Random(7), [1 / (1 + at / 8) for at in range(self.documents)]
        texts = [[random.randrange(1000) for _ in range(self.document)] for _ in range(self.documents)]
        chosen = random.choices(texts, weights, k=self.requests)
        return [text + [random.randrange(1000) for _ in range(self.question)] for text in chosen]


class ReplicaFigures(NamedTuple):
    """`busiest`: the share of the prompt tokens that the replica with most of them got; the times in seconds."""

    hit_rate: float
    busiest: float
    ttft: float
    ttft_p95: float
    whole: float


def engine(workload: Workload, replicas: int) -> EngineConfig:
    """Caches that hold one and a half times all documents together."""
    blocks = int(1.5 * workload.documents * workload.document / BLOCK_SIZE / replicas)
    return EngineConfig(
        model="",
        executor="fake",
        data_parallel_size=replicas,
        cache=CacheConfig(block_size=BLOCK_SIZE, blocks=blocks),
        scheduler=SchedulerConfig(max_num_seqs=workload.clients),
        fake=FakeConfig(max_model_len=8192, step_seconds=STEP_SECONDS, token_seconds=TOKEN_SECONDS),
    )


async def measure(workload: Workload, replicas: int, affinity: bool) -> ReplicaFigures:
    """Put the whole workload to fresh cores."""
    client = EngineClient(engine(workload, replicas), affinity=affinity)
    try:
        await client.start()
        return await _drive(client, workload)
    finally:
        await client.close()


async def _drive(client: EngineClient, workload: Workload) -> ReplicaFigures:
    waiting, times, began = iter(workload.prompts()), list[float](), time.perf_counter()
    await asyncio.gather(*(_ask_on(client, waiting, workload.answer, times) for _ in range(workload.clients)))
    whole, totals = time.perf_counter() - began, client.state()
    parts = Counter({at: replica.totals.prefix_queries for at, replica in enumerate(client.replicas)})
    return ReplicaFigures(
        totals.prefix_hits / totals.prefix_queries,
        max(parts.values()) / parts.total(),
        median(times),
        sorted(times)[int(0.95 * len(times))],
        whole,
    )


async def _ask_on(client: EngineClient, waiting: Iterator[list[int]], answer: int, times: list[float]) -> None:
    """Ask one question after another; how long each first token took goes into `times`."""
    for prompt in waiting:
        began, finish = time.perf_counter(), None
        with client.open_stream(AddRequest(key=0, prompt=prompt, max_tokens=answer)) as channel:
            finish = (await channel.read()).finish_reason
            times.append(time.perf_counter() - began)
            while finish is None:
                finish = (await channel.read()).finish_reason


def microseconds(length: int) -> float:
    """The best time to find a replica, in microseconds a token of a prompt of that length."""
    prompt, known = list(range(length)), [PrefixIndex(), PrefixIndex()]
    return min(seconds_of(lambda: _find(prompt, known)) for _ in range(50)) / length * 1e6


def _find(prompt: list[int], known: list[PrefixIndex]) -> None:
    beginnings = prompt_prefixes(prompt, ("", "", ""))
    for each in known:
        each.longest_match(beginnings)
    known[0].insert(beginnings, 1 << 20)


@app.default
def main(replicas: int = 2, *, workload: Workload = Workload()) -> None:
    """Compare, and exit with 1 if finding a replica costs too much.

    Parameters
    ----------
    replicas
        Engine cores.
    """
    table = Table("", "prefix hits", "busiest replica", "TTFT ms", "p95 ms", "seconds")
    for affinity in (False, True):
        found = asyncio.run(measure(workload, replicas, affinity))
        shares = f"{found.hit_rate:.1%}", f"{found.busiest:.1%}"
        name = "with affinity" if affinity else "least busy"
        table.add_row(name, *shares, f"{found.ttft * 1e3:.0f}", f"{found.ttft_p95 * 1e3:.0f}", f"{found.whole:.1f}")
    costs = {length: microseconds(length) for length in (16, 256, 4096, 65_536)}
    report_console().print(table)
    report_console().print(
        "us a prompt token to find a replica: " + ", ".join(f"{c:.3f} of {n}" for n, c in costs.items())
    )
    raise SystemExit(int(any(cost > HASH_BAR for length, cost in costs.items() if length >= 256)))


if __name__ == "__main__":
    app()
