"""The generator's processes: each drives its share of the jobs in a loop of its own, and reports to the one watching.

The watching process only waits and draws: what it costs is no part of any figure.
"""

import asyncio
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from time import perf_counter, process_time
from typing import TypeAlias

import msgspec

from ...core.errors import Unavailable
from .driver import Driver, Pace, Record
from .endpoints import DOORS, OK, Caller, DoorName, Manner, SseCaller
from .http_client import Client
from .plan import Job, Prompts

_PROGRESS_SECONDS = 0.25
_HEAD_START_SECONDS = 0.1
"""Between the signal and the start, so that every process has heard it."""
_WARM_UP = 1 << 40
"""Where the numbers of jobs begin that only warm up."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where requests go, through which door, and how they are put. `address` is the door's own."""

    host: str
    port: int
    door: DoorName
    manner: Manner


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one run asks for. `warm_up`: requests of each process before the start, in no figure."""

    target: Target
    jobs: list[Job]
    prompts: Prompts
    pace: Pace
    warm_up: int = 1

    def shares(self, processes: int) -> "list[Load]":
        """One load for each process, jobs dealt out in turn. A closed loop has at least one slot in each."""
        slots = self.pace.concurrency
        processes = min(processes, slots or processes, max(1, len(self.jobs)))
        return [
            msgspec.structs.replace(
                self,
                jobs=self.jobs[turn::processes],
                pace=msgspec.structs.replace(self.pace, concurrency=len(range(turn, slots, processes))),
            )
            for turn in range(processes)
        ]


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Requests and tokens so far."""

    sent: int = 0
    done: int = 0
    failed: int = 0
    tokens: int = 0

    def __add__(self, other: "Progress") -> "Progress":
        mine, others = msgspec.structs.astuple(self), msgspec.structs.astuple(other)
        return Progress(*(one + two for one, two in zip(mine, others, strict=True)))


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The process is connected and warm."""


class Outcome(msgspec.Struct, frozen=True, tag=True):
    """What a process brought; `cpu` seconds it spent in `seconds` since the start."""

    records: list[Record]
    cpu: float
    seconds: float


class Failed(msgspec.Struct, frozen=True, tag=True):
    message: str


Message: TypeAlias = Progress | Ready | Outcome | Failed
Watch: TypeAlias = Callable[[Progress], None]

_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def run(
    load: Load,
    processes: int = 1,
    watch: Watch = lambda progress: None,
    on_start: Callable[[], None] = lambda: None,
) -> list[Outcome]:
    """Run a load in processes of its own; `watch` hears of progress a few times a second. `on_start` is called when
    all of them are warm.

    Raises:
        Unavailable: a process died, or could not even warm up.
    """
    with _spawned(load.shares(processes)) as pipes:
        for pipe in pipes:
            _receive(pipe)
        on_start()
        start = perf_counter() + _HEAD_START_SECONDS
        for pipe in pipes:
            pipe.send(start)
        return _follow(pipes, watch)


def _follow(pipes: Sequence[Connection], watch: Watch) -> list[Outcome]:
    progress = {pipe.fileno(): Progress() for pipe in pipes}
    outcomes: dict[int, Outcome] = {}
    while len(outcomes) < len(pipes):
        for pipe in wait([each for each in pipes if each.fileno() not in outcomes]):
            assert isinstance(pipe, Connection)
            message = _receive(pipe)
            if isinstance(message, Progress):
                progress[pipe.fileno()] = message
            elif isinstance(message, Outcome):
                outcomes[pipe.fileno()] = message
        watch(sum(progress.values(), Progress()))
    return list(outcomes.values())


@contextmanager
def _spawned(shares: Sequence[Load]) -> Iterator[list[Connection]]:
    spawn = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    try:
        for share in shares:
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_main, args=(msgspec.msgpack.encode(share), theirs), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        yield pipes
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.terminate()
            process.join()


def _receive(pipe: Connection) -> Progress | Ready | Outcome:
    try:
        message = _decoder.decode(pipe.recv_bytes())
    except EOFError:
        raise Unavailable("a load generator process died") from None
    if isinstance(message, Failed):
        raise Unavailable(message.message)
    return message


# In the process


def _main(share: bytes, pipe: Connection) -> None:
    import uvloop

    load = msgspec.msgpack.decode(share, type=Load)
    try:
        uvloop.run(_work(load, pipe))
    except KeyboardInterrupt:
        return
    except (Unavailable, OSError) as error:
        _send(pipe, Failed(str(error)))


async def _work(load: Load, pipe: Connection) -> None:
    caller = make_caller(load.target)
    try:
        await _warm_up(load, caller)
        _send(pipe, Ready())
        # Nothing else runs in this loop yet: waiting here keeps nobody waiting.
        driver = Driver(caller, load.prompts, load.pace, pipe.recv())
        cpu, begun = process_time(), perf_counter()
        await _reporting(driver, load.jobs, pipe)
        _send(pipe, Outcome(driver.records, process_time() - cpu, perf_counter() - begun))
    finally:
        await caller.close()


async def _warm_up(load: Load, caller: Caller) -> None:
    for job in load.jobs[: load.warm_up]:
        again = msgspec.structs.replace(job, index=_WARM_UP + job.index)
        heard = await caller.ask(load.prompts.write(again), job.new)
        if heard.status != OK:
            raise Unavailable(f"the first request failed: {heard.status}")


async def _reporting(driver: Driver, jobs: Sequence[Job], pipe: Connection) -> None:
    running = asyncio.create_task(driver.run(jobs))
    while not running.done():
        await asyncio.wait({running}, timeout=_PROGRESS_SECONDS)
        tally = driver.tally
        _send(pipe, Progress(tally.sent, tally.done, tally.failed, tally.tokens))
    running.result()


def _send(pipe: Connection, message: Message) -> None:
    pipe.send_bytes(msgspec.msgpack.encode(message))


def make_caller(target: Target) -> Caller:
    """The client for a target's door."""
    if target.door == "grpc":
        from .grpc_client import GrpcCaller

        return GrpcCaller(f"{target.host}:{target.port}", target.manner)
    client = Client(target.host, target.port, target.manner.api_key)
    return SseCaller(client, DOORS[target.door], target.manner)
