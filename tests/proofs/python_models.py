"""Python models for a long time, killed and abandoned: `python -m tests.proofs.python_models`.

A hundred thousand requests go through the models' processes; then these get SIGKILL a thousand times while requests and
streams are on their way; then ten thousand clients of streams leave at random moments. Every request of one who stays
must be answered rightly or, while processes are killed, told that its process was not healthy. The memory of server and
processes and what they share must stay, and no process, descriptor, mapped region or thread may be left.
"""

import asyncio
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import orjson
from cyclopts import App
from rich.console import Console
from rich.progress import Progress

from charonia.bench.server_process import ServerAddress, children, is_ready, own_server
from charonia.core.errors import Unavailable

from ..fuzz.answer_checks import WholeAnswers, read_error
from ..fuzz.disconnecting_clients import StreamQuestion, plan_client
from ..pipeline_models import DOUBLE, STREAM, write_model
from .bodies import format_memory, tracebacks
from .disconnects import Visit, at_rest, run_clients
from .process_stats import ServerStats, Trend, read_server_stats, settled, trend, until_idle

PROCESSES = 3
"""Of both models together."""
DOORS = ("generate_stream", "grpc")
STREAMED = StreamQuestion(STREAM, {"N": 0}, {}, "N")
AT_ONCE = 32
_LOOKS = 60
_LONGEST = 60.0
"""Seconds after which a request that has no answer is one that hangs."""
_LIFE = 0.3
"""Seconds between two kills, at most."""
TOLD = (" is not healthy.", "have ended unexpectedly and are being restarted")
_STREAMS = 0.2
"""The share of requests that are for a stream."""
_TOLD_PAUSE = 0.02

app = App(name="python -m tests.proofs.python_models", help=__doc__)
Tell = Callable[[], None]


class MemoryLook(NamedTuple):
    """Bytes after so many requests, kills or clients: of the server and of the models' processes, each page counted
    where it is shared by as many as share it, and in the memory for tensors."""

    done: int
    server: int
    models: int
    shared: int


class PhaseResult(NamedTuple):
    """What became of requests, by word; what should not have; and the memory meanwhile, of `whose` it is judged."""

    ends: Counter[str]
    faults: list[str]
    looks: list[MemoryLook]
    whose: tuple[str, ...] = ("server", "models", "shared")

    def trends(self) -> dict[str, Trend]:
        done = [look.done for look in self.looks]
        return {who: trend(done, [getattr(look, who) for look in self.looks]) for who in self.whose}


@contextmanager
def python_server() -> Iterator[ServerAddress]:
    """A server of both models, whose processes are replaced without a pause."""
    with TemporaryDirectory(prefix="charonia-proof-") as directory:
        repository = Path(directory) / "models"
        for name in (DOUBLE, STREAM):
            write_model(repository, name)
        flags = ("--model-control-mode", "explicit", "--load-model", "*", "--restart-pause", "0")
        with own_server("--model-repository", str(repository), *flags) as place:
            yield place


def stub_pids(place: ServerAddress) -> list[int]:
    """The processes of Python models."""
    assert place.pid is not None
    found = []
    for pid in children(place.pid):
        try:
            program = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"charonia_stub" in program:
            found.append(pid)
    return found


def look(place: ServerAddress, done: int) -> MemoryLook:
    assert place.pid is not None
    shared = 0
    for link in Path(f"/proc/{place.pid}/fd").iterdir():
        try:
            shared += link.stat().st_size if "charonia-tensors" in str(link.readlink()) else 0
        except OSError:
            continue
    return MemoryLook(done, _pss(place.pid), sum(map(_pss, stub_pids(place))), shared)


def _pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)


class Askers:
    """Clients that stay, `AT_ONCE` at a time, until `next_number` has no more. `told` says that errors of processes
    that ended are to be expected."""

    def __init__(self, place: ServerAddress, seed: int, told: bool) -> None:
        self._place, self._seed, self._may_be_told = place, seed, told
        self._answers = WholeAnswers(place, "Y")
        self.asked = 0
        self.result = PhaseResult(Counter(), [], [])

    async def ask_until(self, over: Callable[[], bool], tell: Tell = lambda: None) -> None:
        async def one_after_another() -> None:
            while not over():
                self.asked += 1
                word = await self._ask(self.asked)
                self.result.ends[word] += 1
                tell()
                if word == "told":
                    await asyncio.sleep(_TOLD_PAUSE)

        async with asyncio.TaskGroup() as clients:
            for _ in range(AT_ONCE):
                clients.create_task(one_after_another())

    async def close(self) -> None:
        await self._answers.close()

    async def _ask(self, number: int) -> str:
        chance = random.Random(f"{self._seed}:{number}")
        door = chance.choice(DOORS) if chance.random() < _STREAMS else "infer"
        try:
            async with asyncio.timeout(_LONGEST):
                error = await (self._ask_double(chance) if door == "infer" else self._ask_stream(chance, door))
        except TimeoutError:
            error = "it hangs"
        except OSError as problem:
            error = f"the server hung up: {problem}"
        if not error:
            return "answered"
        if self._may_be_told and error.endswith(TOLD):
            return "told"
        self.result.faults.append(f"request {number}, {door}: {error}")
        return "wrong"

    async def _ask_double(self, chance: random.Random) -> str:
        """The error, empty for a right answer."""
        x = [chance.randrange(1 << 30) for _ in range(4096 if chance.random() < 0.02 else chance.randint(1, 32))]
        text = f"{chance.random()}"
        inputs = [
            {"name": "X", "datatype": "INT32", "shape": [1, len(x)], "data": x},
            {"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": [text]},
        ]
        answer = await self._answers.http.post(f"/v2/models/{DOUBLE}/infer", orjson.dumps({"inputs": inputs}))
        if answer.status != 200:
            return read_error(answer)
        made = {output["name"]: output["data"] for output in orjson.loads(answer.body)["outputs"]}
        right = {"Y": [_int32(2 * each) for each in x], "TURNED": [text[::-1]]}
        return "" if made == right else f"it made {str(made)[:200]}"

    async def _ask_stream(self, chance: random.Random, door: str) -> str:
        number = chance.randint(0, 12)
        answer = await self._answers.ask(STREAMED, door, number)
        right = tuple(range(number))
        if answer.values != right[: len(answer.values)]:
            return f"it streamed {answer.values}"
        return answer.error or ("" if answer.values == right else f"it ended after {answer.values}")


def _int32(number: int) -> int:
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


async def ask_many(place: ServerAddress, count: int, seed: int, tell: Tell = lambda: None) -> PhaseResult:
    """Send so many requests, and look at the memory now and then."""
    async with _asking(place, seed, told=False) as askers:

        def answered() -> None:
            tell()
            look_now_and_then(place, askers.result, sum(askers.result.ends.values()), count)

        await askers.ask_until(lambda: askers.asked >= count, answered)
    return askers.result


async def kill_many(place: ServerAddress, kills: int, seed: int, tell: Tell = lambda: None) -> PhaseResult:
    """Kill the models' processes so often, at random moments, while requests are on their way; then all must serve."""
    chance = random.Random(seed)
    async with _asking(place, seed, told=True) as askers:
        async with asyncio.TaskGroup() as running:
            asking = running.create_task(askers.ask_until(lambda: killing.done()))
            killing = running.create_task(_kill(place, chance, kills, askers.result, tell))
            await asyncio.wait({asking, killing}, return_when=asyncio.FIRST_EXCEPTION)
        await all_serve(place)
    async with _asking(place, seed + 1, told=False) as after:
        await after.ask_until(lambda: after.asked >= AT_ONCE)
    askers.result.faults.extend(after.result.faults)
    return askers.result._replace(whose=("server",))  # for processes come and go


async def _kill(place: ServerAddress, chance: random.Random, kills: int, result: PhaseResult, tell: Tell) -> None:
    for number in range(1, kills + 1):
        await asyncio.sleep(chance.uniform(0, _LIFE))
        while not (pids := stub_pids(place)):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(_LIFE / 10)
        os.kill(chance.choice(pids), signal.SIGKILL)
        look_now_and_then(place, result, number, kills)
        tell()


def look_now_and_then(place: ServerAddress, result: PhaseResult, done: int, whole: int) -> None:
    if done % max(1, whole // _LOOKS) == 0:
        result.looks.append(look(place, done))


async def all_serve(place: ServerAddress, processes: int = PROCESSES, seconds: float = 60.0) -> None:
    """Wait until the Python models have so many processes and all models are ready.

    Raises:
        Unavailable: it has not after so many seconds.
    """
    deadline = asyncio.get_running_loop().time() + seconds
    while len(stub_pids(place)) != processes or not await asyncio.to_thread(is_ready, place):
        if asyncio.get_running_loop().time() > deadline:
            raise Unavailable(f"{len(stub_pids(place))} of {processes} processes serve after {seconds:g} s")
        await asyncio.sleep(_LIFE / 10)


@asynccontextmanager
async def _asking(place: ServerAddress, seed: int, told: bool) -> AsyncIterator[Askers]:
    askers = Askers(place, seed, told)
    try:
        yield askers
    finally:
        await askers.close()


async def abandon_many(place: ServerAddress, count: int, seed: int, tell: Tell = lambda: None) -> PhaseResult:
    """Let so many clients ask for streams and leave."""
    result, left = PhaseResult(Counter(), [], []), 0
    visits = [Visit(STREAMED, plan_client(seed, number, DOORS)) for number in range(count)]

    def one_left() -> None:
        nonlocal left
        left += 1
        look_now_and_then(place, result, left, count)
        tell()

    result.faults.extend(await run_clients(place, visits, one_left))
    result.ends.update(visit.plan.moment.value for visit in visits)
    await until_idle(place)
    return result


async def resources(place: ServerAddress, before: ServerStats | None = None) -> ServerStats:
    """What the server holds once it is idle and its connections are closed; waits for what it held `before`."""
    await all_serve(place)
    await until_idle(place)
    if before is not None:
        for _ in range(_LOOKS):
            if not any((await settled(place, before, _LIFE)).beyond(before)):
                break
            # What the last response held may stay until there is another one, or a collection of garbage.
            await ask_many(place, 4 * AT_ONCE, 0)
        return await settled(place, before)
    now = await at_rest(place)
    # What a process writes is mapped when it is read for the first time.
    late = 2 * PROCESSES - now.frontend.mappings
    frontend = now.frontend
    return now._replace(
        frontend=frontend._replace(mappings=frontend.mappings + late, descriptors=frontend.descriptors + late)
    )


async def unload(place: ServerAddress) -> list[str]:
    """What is left of the models when they are unloaded."""
    async with _asking(place, 0, told=False) as askers:
        for name in (DOUBLE, STREAM):
            await askers._answers.http.post(f"/v2/repository/models/{name}/unload", b"{}")
    deadline = asyncio.get_running_loop().time() + _LONGEST
    while left := _left(place):
        if asyncio.get_running_loop().time() > deadline:
            break
        await asyncio.sleep(_LIFE / 10)
    return left


def _left(place: ServerAddress) -> list[str]:
    stats = read_server_stats(place)
    held = {
        "processes": len(stats.others),
        "mapped regions": stats.frontend.mappings,
        "bytes shared": look(place, 0).shared,
    }
    return [f"when the models were unloaded: {count} {what}" for what, count in held.items() if count]


class ProofResult(NamedTuple):
    """Each phase's result by its name, and faults of the whole."""

    phases: dict[str, PhaseResult]
    left: Sequence[str]

    @property
    def faults(self) -> list[str]:
        found = [f"{name}: {fault}" for name, phase in self.phases.items() for fault in phase.faults]
        return [*found, *self.left]


async def prove(
    place: ServerAddress,
    counts: tuple[int, int, int],
    seed: int,
    phase: Callable[[str, int], Tell] = lambda *_: _ignore,
) -> ProofResult:
    """So many requests, kills and abandoned streams, after a warm-up of each. `phase` is told what begins."""
    warm_up = {"requests": AT_ONCE, "kills": PROCESSES, "streams": AT_ONCE}
    tasks: dict[str, Any] = {"requests": ask_many, "kills": kill_many, "streams": abandon_many}
    for name, task in tasks.items():
        await task(place, warm_up[name], seed - 1)
    before = await resources(place)
    phases = {}
    for (name, task), count in zip(tasks.items(), counts, strict=True):
        phases[name] = await task(place, count, seed, phase(name, count))
    after = await resources(place, before)
    left = [*after.beyond(before), *(f"in the log: {line}" for line in tracebacks(place))]
    return ProofResult(phases, [*left, *await unload(place)])


def _ignore() -> None:
    return None


def show(proof: ProofResult) -> None:
    """Print what became of requests and memory."""
    for name, phase in proof.phases.items():
        ends = ", ".join(f"{count:,} {end}" for end, count in phase.ends.most_common())
        print(f"{name}: {ends}")
        for who, each in phase.trends().items():
            print(f"  {who}: {format_memory(each)}")
    for fault in proof.faults[:20]:
        print(fault)


@app.default
def main(requests: int = 100_000, kills: int = 1_000, streams: int = 10_000, seed: int = 0) -> None:
    """Run so many of each; the exit code is 0 if every check held."""
    with python_server() as place, Progress(console=Console()) as progress:

        def phase(name: str, count: int) -> Tell:
            task = progress.add_task(name, total=count if name != "requests" else requests)
            return lambda: progress.advance(task)

        proof = asyncio.run(prove(place, (requests, kills, streams), seed, phase))
    show(proof)
    growing = [who for phase in proof.phases.values() for who, each in phase.trends().items() if not each.flat]
    sys.exit(bool(proof.faults or growing))


if __name__ == "__main__":
    app()
