"""Ten minutes of mixed traffic, and no memory kept: `python -m tests.proofs.soak --plot soak.png`.

Valid requests to every endpoint, streamed and not, with several choices, stop strings and log-probabilities; clients
that disconnect; malformed bodies. The model computes with random weights. Every valid request must be answered, no
malformed one with an error of the server's, and the memory of frontend and core, sampled each second, must not grow
after the first third of the time.
"""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

import orjson
from cyclopts import App
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from charonia.bench.load.figures import require_matplotlib
from charonia.bench.server_process import ServerAddress

from ..fuzz.answer_checks import QUEUE_FULL, MutantVerdict, RpcSender, ask_http
from ..fuzz.disconnecting_clients import GrpcChannels, llm_question, plan_client, run_client
from ..fuzz.grpc_mutations import RpcMutant, rpc_mutant, valid_message
from ..fuzz.http_mutations import LIMIT, HttpMutant, ValidRequest, http_mutant, request, valid_requests
from ..tiny_model import NAME, tiny_server
from .bodies import format_memory, tracebacks
from .process_stats import Trend, read_server_stats, trend, until_idle

AT_ONCE = 16
_PAUSE = 0.02
"""Seconds each client rests at most between two requests: the server is busy, not flooded."""
_KINDS = {"good": 50, "good, gRPC": 20, "left": 15, "wrong": 10, "wrong, gRPC": 5}
"""What is asked, and how often of 100 times."""
_RIGHT = ("2xx", "OK", QUEUE_FULL, "RESOURCE_EXHAUSTED")
"""Answers to good requests. A wrong one may ask for 100,000 answers, and the queue is full for a moment."""
_MIB = 1 << 20

app = App(name="python -m tests.proofs.soak", help=__doc__)


class MemorySample(NamedTuple):
    """The memory in bytes so many seconds after the start, and the requests `asked` until then."""

    at: float
    asked: int
    frontend: int
    core: int


class SoakResult(NamedTuple):
    verdicts: Counter[tuple[str, str]]
    faults: list[str]
    looks: list[MemorySample]

    def trends(self) -> dict[str, Trend]:
        """The memory of the frontend and of the core over the seconds."""
        at = [look.at for look in self.looks]
        return {
            "frontend": trend(at, [look.frontend for look in self.looks]),
            "core": trend(at, [look.core for look in self.looks]),
        }


class TrafficMix:
    """Sends the request of each number, and records its result."""

    def __init__(self, place: ServerAddress, model: str, seed: int) -> None:
        self._place, self._model, self._seed = place, model, seed
        self._question = llm_question(model)
        self._valid = (*valid_requests(model), *_longer(model))
        self._rpc, self._channels = RpcSender(place), GrpcChannels()
        self.asked = 0
        self.soaked = SoakResult(Counter(), [], [])

    async def ask(self) -> None:
        """Send the next request."""
        self.asked += 1
        random = Random(f"{self._seed}:mix:{self.asked}")
        (kind,) = random.choices(list(_KINDS), list(_KINDS.values()))
        verdict = await self._ask(kind, random, self.asked)
        self.soaked.verdicts[kind, verdict.answer] += 1
        if fault := verdict.fault or _disappointed(kind, verdict):
            self.soaked.faults.append(f"number {self.asked}, {kind}: {fault}")
        await asyncio.sleep(random.uniform(0, _PAUSE))

    async def _ask(self, kind: str, random: Random, number: int) -> MutantVerdict:
        if kind == "good":
            path, body = random.choice(self._valid)
            return await ask_http(self._place, HttpMutant(path, path, request(path, orjson.dumps(body))))
        if kind == "wrong":
            return await ask_http(self._place, http_mutant(self._valid, self._seed, number))
        if kind == "left":
            await run_client(self._place, self._question, plan_client(self._seed, number), self._channels)
            return MutantVerdict(kind, "left")
        if kind == "wrong, gRPC":
            return await self._rpc.ask(rpc_mutant(self._model, self._seed, number))
        streaming = random.random() < 0.5
        message = valid_message(random, self._model, streaming)
        return await self._rpc.ask(RpcMutant(kind, streaming, message.SerializeToString()))

    def look(self, at: float) -> None:
        seen = read_server_stats(self._place)
        self.soaked.looks.append(
            MemorySample(at, self.asked, seen.frontend.rss, seen.cores[0].rss if seen.cores else 0)
        )

    async def close(self) -> None:
        await self._rpc.close()


def _longer(model: str) -> tuple[ValidRequest, ...]:
    """Streams that take a while, beside the short ones."""
    v2 = f"/v2/models/{model}/generate_stream"
    chat = [{"role": "user", "content": "Tell me a story that is long enough to be worth a stream."}]
    return (
        ValidRequest(v2, {"text_input": "def f(x):", "max_tokens": 100, "temperature": 1.0}),
        ValidRequest(
            "/v1/chat/completions", {"model": model, "messages": chat, "max_tokens": 100, "stream": True, "n": 3}
        ),
    )


def _disappointed(kind: str, verdict: MutantVerdict) -> str:
    good = kind.startswith("good")
    return f"answered {verdict.kind} with {verdict.answer}" if good and verdict.answer not in _RIGHT else ""


async def send_heaviest(place: ServerAddress, model: str) -> None:
    """Send the heaviest bodies before the first sample: they are rare, and the memory that allocators keep of one in
    the middle would look like growth."""
    many = {"model": model, "prompt": ["x"] * 4, "n": 128, "max_tokens": 32, "logprobs": 20}
    ids = {"model": model, "prompt": [1] * (LIMIT // 2 - 100)}
    text = {"model": model, "prompt": "many words, " * (LIMIT // 13)}
    path = "/v1/completions"
    for body in (many, ids, text, {**many, "stream": True}, text):
        await ask_http(place, HttpMutant(path, path, request(path, orjson.dumps(body))))


async def soak(
    place: ServerAddress, model: str, seconds: float, seed: int, tell: Callable[[float], None] = lambda at: None
) -> SoakResult:
    """Send requests for so many seconds, several at a time; sample memory each second, or 60 times if that is more
    often."""
    mix, begun = TrafficMix(place, model, seed), time.monotonic()

    async def one_after_another() -> None:
        while time.monotonic() - begun < seconds:
            await mix.ask()

    async def looking() -> None:
        while (at := time.monotonic() - begun) < seconds:
            mix.look(at)
            tell(at)
            await asyncio.sleep(min(1.0, seconds / 60))

    try:
        async with asyncio.TaskGroup() as clients:
            clients.create_task(looking())
            for _ in range(AT_ONCE):
                clients.create_task(one_after_another())
        await until_idle(place)
    finally:
        await mix.close()
    return mix.soaked


def show(console: Console, soaked: SoakResult) -> None:
    """Print the requests and their outcomes."""
    answers = sorted({answer for _, answer in soaked.verdicts})
    table = Table("asked", *answers)
    for kind in _KINDS:
        table.add_row(kind, *(str(soaked.verdicts[kind, answer] or "") for answer in answers))
    console.print(table)


def plot_memory(path: Path, looks: Sequence[MemorySample], trends: dict[str, Trend]) -> None:
    """Memory over time, one panel for each process, with the line that was judged."""
    pyplot = require_matplotlib()
    figure, panels = pyplot.subplots(1, 2, figsize=(12, 4), layout="constrained")
    for axes, (who, each) in zip(panels, trends.items(), strict=True):
        at = [look.at for look in looks]
        axes.plot(at, [getattr(look, who) / _MIB for look in looks], lw=1)
        judged = at[round(len(at) / 3) :]
        line = [(each.mean + each.slope * (x - sum(judged) / len(judged))) / _MIB for x in judged]
        axes.plot(judged, line, "--", label=f"{each.slope * 60 / 1024:+.1f} KiB a minute")
        axes.set(title=who, xlabel="seconds under load", ylabel="resident memory, MiB", ylim=(0, None))
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


@app.default
def main(seconds: float = 600.0, seed: int = 0, plot: Path | None = None) -> None:
    """Ask for so many `seconds`; the exit code tells whether all was well.

    Parameters
    ----------
    plot
        Draw memory over time into this PNG.
    """
    console = Console()
    if plot:
        require_matplotlib()
    with tiny_server("--http-max-input-size", str(LIMIT)) as place, Progress(console=console) as progress:
        task = progress.add_task("under load", total=seconds)
        asyncio.run(send_heaviest(place, NAME))
        soaked = asyncio.run(soak(place, NAME, seconds, seed, lambda at: progress.update(task, completed=at)))
        broken = tracebacks(place)
    trends = soaked.trends()
    show(console, soaked)
    for fault in [*soaked.faults, *(f"in the log: {line}" for line in broken)][:20]:
        print(fault)
    if plot:
        plot_memory(plot, soaked.looks, trends)
    for who, each in trends.items():
        print(f"{who}: {format_memory(each)}, {each.slope * 60 / 1024:+.1f} KiB a minute")
    asked = sum(soaked.verdicts.values())
    print(f"{asked:,} requests in {seconds:g} s, {len(soaked.faults)} went wrong, {len(broken)} tracebacks")
    sys.exit(bool(soaked.faults or broken) or not all(value.flat for value in trends.values()))


if __name__ == "__main__":
    app()
