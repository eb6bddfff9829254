"""Pipelines of native, Python and language models under load and kills: `python -m tests.proofs.pipelines`.

Sixty-four clients at a time ask an ensemble, one within another, and a pipeline of code for streams, over SSE and gRPC.
Half of them leave at random moments; every few seconds the process of a Python step gets SIGKILL. Every stream that is
heard out must bring the language model's own text or be told of an error. In the end no request may run, no block of
the cache be used, and no process, descriptor, mapped region or thread be left.
"""

import asyncio
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import NamedTuple

from cyclopts import App
from rich.console import Console
from rich.progress import Progress

from charonia.bench.load import fake_model
from charonia.bench.server_process import ServerAddress, own_server

from .. import tiny_model
from ..fuzz.answer_checks import WholeAnswers
from ..fuzz.disconnecting_clients import GrpcChannels, StreamQuestion, plan_client, run_client
from ..pipeline_models import CODED, NESTED, TALK, write_ensembles
from .bodies import format_memory, tracebacks
from .disconnects import at_rest
from .process_stats import ServerStats, settled, until_idle
from .python_models import TOLD, PhaseResult, all_serve, look_now_and_then, stub_pids

PIPELINES = (TALK, NESTED, CODED)
DOORS = ("generate_stream", "grpc")
AT_ONCE = 64
_LENGTHS = (1, 5, 40)
_LONGEST = 60.0
_LOOKS = 60
_PROMPT = "def f(x): return"
_FAKE = {"fake_step_seconds": 0.005, "max_num_seqs": 64, "max_queued_requests": 10_000}
_TINY = {"threads": 1, "kv_cache_bytes": 16 << 20, "max_num_seqs": 64}

app = App(name="python -m tests.proofs.pipelines", help=__doc__)


@contextmanager
def pipeline_server(computes: bool) -> Iterator[ServerAddress]:
    """A server of the pipelines, over a language model that `computes`, with random weights, or one that counts."""
    with TemporaryDirectory(prefix="charonia-proof-") as directory:
        repository = Path(directory) / "models"
        if computes:
            tiny_model.write_llm(repository, _TINY)
        else:
            fake_model.write_repository(repository, _FAKE)
        write_ensembles(repository, language_model(computes))
        with own_server("--model-repository", str(repository), "--restart-pause", "0") as place:
            yield place


def language_model(computes: bool) -> str:
    return tiny_model.NAME if computes else fake_model.NAME


def question(model: str) -> StreamQuestion:
    greedy = {"ignore_eos": True, "top_k": 1}
    return StreamQuestion(model, {"text_input": _PROMPT, "stream": True}, greedy, "max_tokens")


class PipelineLoad(NamedTuple):
    """So many clients at a time, and kills, one in `every` seconds."""

    at_once: int
    kills: int
    every: float


class PipelineClients:
    """Clients of all pipelines, half of whom leave. `right`: the text of each length."""

    def __init__(self, place: ServerAddress, right: Mapping[int, str], seed: int) -> None:
        self._place, self._right, self._seed = place, right, seed
        self._answers, self._channels = WholeAnswers(place, "text_output"), GrpcChannels()
        self._number = 0
        self.result = PhaseResult(Counter(), [], [], ("server",))

    async def ask_until(self, over: Callable[[], bool], at_once: int) -> None:
        async def one_after_another() -> None:
            while not over():
                self._number += 1
                self.result.ends[await self._ask(self._number)] += 1

        try:
            async with asyncio.TaskGroup() as clients:
                for _ in range(at_once):
                    clients.create_task(one_after_another())
        finally:
            await self._answers.close()

    async def _ask(self, number: int) -> str:
        chance = Random(f"{self._seed}:pipeline:{number}")
        model = chance.choice(PIPELINES)
        if chance.random() < 0.5:
            plan = plan_client(self._seed, number, DOORS)
            await run_client(self._place, question(model), plan, self._channels)
            return "left"
        door, length = chance.choice(DOORS), chance.choice(_LENGTHS)
        try:
            async with asyncio.timeout(_LONGEST):
                answer = await self._answers.ask(question(model), door, length)
        except TimeoutError:
            return self._note(f"{number}, {model} over {door}: it hangs")
        except OSError as error:
            return self._note(f"{number}, {model} over {door}: the server hung up: {error}")
        text = plain("".join(answer.values))
        if answer.error.endswith(TOLD) and self._right[length].startswith(text):
            return "told"
        if answer.error or text != self._right[length]:
            return self._note(f"{number}, {model} over {door}: {answer.error or 'no error'} after {text!r}")
        return "answered"

    def _note(self, fault: str) -> str:
        self.result.faults.append(fault)
        return "wrong"


def plain(text: str) -> str:
    """A text without the marks of the Python step."""
    return text.replace("<", "").replace(">", "")


async def right_texts(place: ServerAddress, model: str) -> dict[int, str]:
    """The language model's own text of each length."""
    answers, texts = WholeAnswers(place, "text_output"), {}
    for length in _LENGTHS:
        answer = await answers.ask(question(model), "generate_stream", length)
        texts[length] = plain("".join(answer.values))
    await answers.close()
    return texts


async def load_and_kill(
    place: ServerAddress, model: str, load: PipelineLoad, seed: int, tell: Callable[[], None] = lambda: None
) -> PhaseResult:
    """Ask all pipelines, and kill the Python step's process."""
    clients = PipelineClients(place, await right_texts(place, model), seed)
    async with asyncio.TaskGroup() as running:
        running.create_task(clients.ask_until(lambda: killing.done(), load.at_once))
        killing = running.create_task(_kill(place, load, clients.result, tell))
    return clients.result


async def _kill(place: ServerAddress, load: PipelineLoad, result: PhaseResult, tell: Callable[[], None]) -> None:
    (_, kills, every), begun, looks = load, time.monotonic(), 0
    for number in range(1, kills + 1):
        while (at := time.monotonic() - begun) < number * every:
            await asyncio.sleep(min(0.1, every / 4))
            if at * _LOOKS > looks * kills * every:
                looks += 1
                look_now_and_then(place, result, looks, _LOOKS)
        for pid in stub_pids(place):
            os.kill(pid, signal.SIGKILL)
        tell()


async def resources(place: ServerAddress, before: ServerStats | None = None) -> ServerStats:
    """What the server holds when it is idle; waits for what it held `before`."""
    await all_serve(place, processes=1)
    await until_idle(place)
    # Asked once, so that the step's memory is mapped both ways.
    answers = WholeAnswers(place, "text_output")
    await answers.ask(question(TALK), "generate_stream", 1)
    await answers.close()
    return await at_rest(place) if before is None else await settled(place, before)


async def prove(
    place: ServerAddress, model: str, load: PipelineLoad, seed: int, tell: Callable[[], None] = lambda: None
) -> PhaseResult:
    """Load and kill, after a warm-up; the faults are those of the whole."""
    await load_and_kill(place, model, load._replace(kills=1, every=min(load.every, 1.0)), seed - 1)
    before = await resources(place)
    result = await load_and_kill(place, model, load, seed, tell)
    after = await resources(place, before)
    result.faults.extend([*after.beyond(before), *(f"in the log: {line}" for line in tracebacks(place))])
    return result


@app.default
def main(seconds: float = 120.0, every: float = 5.0, seed: int = 0, fake: bool = False) -> None:
    """Load and kill for so many seconds; the exit code is 0 if every check held.

    Parameters
    ----------
    fake
        Let the language model count instead of compute.
    """
    kills = max(1, round(seconds / every))
    with pipeline_server(not fake) as place, Progress(console=Console()) as progress:
        task = progress.add_task("kills", total=kills)
        result = asyncio.run(
            prove(
                place,
                language_model(not fake),
                PipelineLoad(AT_ONCE, kills, every),
                seed,
                lambda: progress.advance(task),
            )
        )
    for fault in result.faults[:20]:
        print(fault)
    trends = result.trends()
    for who, each in trends.items():
        print(f"{who}: {format_memory(each)}")
    print(f"{kills} kills; streams: {', '.join(f'{count:,} {end}' for end, count in result.ends.most_common())}")
    sys.exit(bool(result.faults) or not all(value.flat for value in trends.values()))


if __name__ == "__main__":
    app()
