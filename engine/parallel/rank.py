"""One rank: meets the others, loads its share of the model, computes step after step until it is told to leave.

Knows nothing of requests or scheduling, and of the core no more than its line to it.
"""

import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NamedTuple

import msgspec
import torch

from ...core.errors import CharoniaError, Code
from ...processes.child_process import show
from ..config import EngineConfig
from ..worker.device import own_device
from ..worker.loaded_rank import Engine, assemble
from .broadcast_ring import Desk, Memory
from .layout import Layout
from .plan_codec import Reader
from .rank_messages import (
    PLAN,
    Allocate,
    Allocated,
    Broken,
    Command,
    Here,
    Joined,
    Leave,
    Loaded,
    Meet,
    Progress,
    Report,
    Result,
)
from .torch_groups import Bereft, Meeting, Store, join, leave, seat, wait_for_all


class Post(NamedTuple):
    """Which rank to be, and its line to the core, which may share `memory`.

    `host`: the address of this machine among the others'. It has `neighbours` ranks, this one is number `local`.
    """

    rank: int
    layout: Layout
    line: Connection
    memory: Memory | None = None
    host: str = "127.0.0.1"
    local: int = 0
    neighbours: int = 1


def serve(config: EngineConfig, post: Post) -> None:
    """Be that rank until the core says to leave.

    Raises:
        SystemExit: something broke; the core was told what, or is gone.
    """
    rank = _Rank(config, post)
    try:
        rank.run()
    except (EOFError, ConnectionError):
        sys.exit(1)
    except Exception as error:
        with suppress(OSError):
            rank.report(_last_words(error))
        sys.exit(1)


class _Rank:
    def __init__(self, config: EngineConfig, post: Post) -> None:
        self._config, self._post = config, post
        self._desk = Desk(post.line, post.memory)
        self._plans = Reader()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder[Command](Command).decode

    def report(self, report: Report) -> None:
        self._post.line.send_bytes(self._encode(report))

    def run(self) -> None:
        torch.set_num_threads(self._config.threads_each(self._post.neighbours))
        device = own_device(self._config, self._post.local, self._post.neighbours)
        self._join(device)
        engine = self._load(msgspec.structs.replace(self._config, device=device))
        while self._turn(engine):
            pass
        leave()

    def _join(self, device: str) -> None:
        rank, layout = self._post.rank, self._post.layout
        self._store = Store(self._post.host) if rank == 0 else None  # others look into it as long as they live
        self.report(Here(*self._store.meeting) if self._store else Here())
        match self._hear():
            case Meet(host, port):
                join(Meeting(host, port), rank, layout, torch.device(device))
            case Leave():
                raise EOFError
        self.report(Joined())

    def _load(self, config: EngineConfig) -> Engine:
        post = self._post
        place = seat(post.rank, post.layout, config.parallel.layers)
        engine = assemble(config, place, lambda fraction: self.report(Progress(fraction)))
        wait_for_all()  # what is free is known when all have taken what they need
        sharing = 1 if engine.place.device.type == "cuda" else post.neighbours
        self.report(Loaded.of(engine.capacity(sharing)))
        return engine

    def _turn(self, engine: Engine) -> bool:
        """Do what comes next; False when that was to leave."""
        message = self._desk.read()
        if message[:1] == PLAN:
            self._step(engine, memoryview(message)[1:])
            return True
        match self._decode(message):
            case Allocate(blocks):
                engine.runner.allocate(blocks)
                self.report(Allocated())
            case Leave():
                return False
        return True

    def _step(self, engine: Engine, message: memoryview) -> None:
        plan, landed = self._plans.read(message)
        if landed is not None:
            engine.runner.learn(*landed)
        result = engine.runner.step(plan)
        if self._post.rank == self._post.layout.reporter:
            self.report(Result.of(result))

    def _hear(self) -> Command:
        command: Command = self._decode(self._desk.read())
        return command


def _last_words(error: Exception) -> Broken:
    if isinstance(error, CharoniaError):
        return Broken(error.message, error.code, isinstance(error, Bereft), error.field or "")
    show(error)
    return Broken(f"{type(error).__name__}: {error}", Code.INTERNAL)
