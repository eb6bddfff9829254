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
from .driver import (
    ENDPOINTS,
    OK,
    EndpointName,
    LoadDriver,
    LoadRecord,
    LoopMode,
    RequestOptions,
    RequestSender,
    SseSender,
)
from .http_client import HttpClient
from .infer_sender import InferPayload, InferSender
from .plan import Prompts
from .planned_requests import PlannedRequest

_PROGRESS_SECONDS = 0.25
_HEAD_START_SECONDS = 0.1
"""Between the signal and the start, so that every process has heard it."""
_WARM_UP = 1 << 40
"""Where the numbers of jobs begin that only warm up."""


class LoadTarget(msgspec.Struct, frozen=True, kw_only=True):
    """The server, the endpoint and the options of requests. `address` is the endpoint's own. `payload`: what is sent to
    v2's infer endpoint, in place of prompts to `door`."""

    host: str
    port: int
    door: EndpointName
    manner: RequestOptions
    payload: InferPayload | None = None


class LoadRun(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one run asks for. `warm_up`: requests of each process before the start, in no figure."""

    target: LoadTarget
    jobs: list[PlannedRequest]
    prompts: Prompts
    pace: LoopMode
    warm_up: int = 1

    def shares(self, processes: int) -> "list[LoadRun]":
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


class RequestProgress(msgspec.Struct, frozen=True, tag=True):
    """Requests and tokens so far."""

    sent: int = 0
    done: int = 0
    failed: int = 0
    tokens: int = 0

    def __add__(self, other: "RequestProgress") -> "RequestProgress":
        mine, others = msgspec.structs.astuple(self), msgspec.structs.astuple(other)
        return RequestProgress(*(one + two for one, two in zip(mine, others, strict=True)))


class WorkerReady(msgspec.Struct, frozen=True, tag=True):
    """The process is connected and warm."""


class WorkerOutcome(msgspec.Struct, frozen=True, tag=True):
    """The result of a load process; `cpu` seconds that it spent in `seconds` since its start."""

    records: list[LoadRecord]
    cpu: float
    seconds: float


class WorkerFailed(msgspec.Struct, frozen=True, tag=True):
    message: str


WorkerMessage: TypeAlias = RequestProgress | WorkerReady | WorkerOutcome | WorkerFailed
Watch: TypeAlias = Callable[[RequestProgress], None]

_decoder: msgspec.msgpack.Decoder[WorkerMessage] = msgspec.msgpack.Decoder(WorkerMessage)


def run(
    load: LoadRun,
    processes: int = 1,
    watch: Watch = lambda progress: None,
    on_start: Callable[[], None] = lambda: None,
) -> list[WorkerOutcome]:
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


def run_here(load: LoadRun, watch: Watch = lambda progress: None) -> WorkerOutcome:
    """Run a load in this thread: at once, where starting a process would take longer than the load. What else this
    process does should be little.

    Raises:
        Unavailable: it could not even warm up.
    """
    import uvloop

    try:
        return uvloop.run(_drive(load, perf_counter, watch))
    except OSError as error:
        raise Unavailable(str(error)) from None


def _follow(pipes: Sequence[Connection], watch: Watch) -> list[WorkerOutcome]:
    progress = {pipe.fileno(): RequestProgress() for pipe in pipes}
    outcomes: dict[int, WorkerOutcome] = {}
    while len(outcomes) < len(pipes):
        for pipe in wait([pipe for pipe in pipes if pipe.fileno() not in outcomes]):
            assert isinstance(pipe, Connection)
            message = _receive(pipe)
            if isinstance(message, RequestProgress):
                progress[pipe.fileno()] = message
            elif isinstance(message, WorkerOutcome):
                outcomes[pipe.fileno()] = message
        watch(sum(progress.values(), RequestProgress()))
    return list(outcomes.values())


@contextmanager
def _spawned(shares: Sequence[LoadRun]) -> Iterator[list[Connection]]:
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


def _receive(pipe: Connection) -> RequestProgress | WorkerReady | WorkerOutcome:
    try:
        message = _decoder.decode(pipe.recv_bytes())
    except EOFError:
        raise Unavailable("a load generator process died") from None
    if isinstance(message, WorkerFailed):
        raise Unavailable(message.message)
    return message


# In the process


def _main(share: bytes, pipe: Connection) -> None:
    import uvloop

    load = msgspec.msgpack.decode(share, type=LoadRun)
    try:
        uvloop.run(_work(load, pipe))
    except KeyboardInterrupt:
        return
    except (Unavailable, OSError) as error:
        _send(pipe, WorkerFailed(str(error)))


async def _work(load: LoadRun, pipe: Connection) -> None:
    def start() -> float:
        _send(pipe, WorkerReady())
        # Nothing else runs in this loop yet: waiting here keeps nobody waiting.
        begin: float = pipe.recv()
        return begin

    _send(pipe, await _drive(load, start, lambda progress: _send(pipe, progress)))


async def _drive(load: LoadRun, start: Callable[[], float], watch: Watch) -> WorkerOutcome:
    """`start` is called when the server is warm; the moment that everything counts from."""
    caller = make_sender(load.target)
    try:
        await _warm_up(load, caller)
        driver = LoadDriver(caller, load.prompts, load.pace, start())
        cpu, begun = process_time(), perf_counter()
        await _reporting(driver, load.jobs, watch)
        return WorkerOutcome(driver.records, process_time() - cpu, perf_counter() - begun)
    finally:
        await caller.close()


async def _warm_up(load: LoadRun, caller: RequestSender) -> None:
    for job in load.jobs[: load.warm_up]:
        again = msgspec.structs.replace(job, index=_WARM_UP + job.index)
        heard = await caller.send(load.prompts.write(again), job.new)
        if heard.status != OK:
            raise Unavailable(f"the first request failed: {heard.status}{heard.detail and f': {heard.detail}'}")


async def _reporting(driver: LoadDriver, jobs: Sequence[PlannedRequest], watch: Watch) -> None:
    running = asyncio.create_task(driver.run(jobs))
    while not running.done():
        await asyncio.wait({running}, timeout=_PROGRESS_SECONDS)
        tally = driver.tally
        watch(RequestProgress(tally.sent, tally.done, tally.failed, tally.tokens))
    running.result()


def _send(pipe: Connection, message: WorkerMessage) -> None:
    pipe.send_bytes(msgspec.msgpack.encode(message))


def make_sender(target: LoadTarget) -> RequestSender:
    """The client for a target's endpoint."""
    if target.door == "grpc":
        from .grpc_client import GrpcSender

        return GrpcSender(f"{target.host}:{target.port}", target.manner)
    client = HttpClient(target.host, target.port, target.manner.api_key)
    if target.payload is not None:
        return InferSender(client, target.manner.model, target.payload)
    return SseSender(client, ENDPOINTS[target.door], target.manner)
