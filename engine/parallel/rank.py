"""One rank: meets the others, loads its share of the model, computes step after step until it is told to leave.

Knows nothing of requests or scheduling, and of the core no more than its line to it.
"""

import logging
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NamedTuple

import msgspec
import torch

from ...core.errors import CharoniaError, ErrorCode
from ...processes.child_process import print_traceback
from ...processes.log_forwarding import LogForwarder, MessageWriter
from ...processes.shared_arena import SharedArena
from ..config import EngineConfig
from ..worker.device import assign_device
from ..worker.loaded_rank import LoadedRank, load_rank
from .broadcast_ring import RingReader
from .layout import RankLayout
from .plan_codec import PlanDecoder
from .rank_messages import (
    PLAN_PREFIX,
    AllocateCache,
    CacheAllocated,
    EncodedResult,
    JoinRanks,
    LeaveRanks,
    RankCommand,
    RankFailed,
    RankJoined,
    RankLoaded,
    RankReport,
    RankStarted,
    WeightsProgress,
)
from .torch_groups import PeerLost, Rendezvous, RendezvousStore, join_ranks, leave_ranks, rank_shard, wait_for_all_ranks


class RankArgs(NamedTuple):
    """Which rank to be, and its line to the core, which may share `memory`.

    `host`: the address of this machine among the others'. It has `neighbours` ranks, this one is number `local`.
    """

    rank: int
    layout: RankLayout
    connection: Connection
    memory: SharedArena | None = None
    host: str = "127.0.0.1"
    local_rank: int = 0
    local_ranks: int = 1


def run_rank(config: EngineConfig, post: RankArgs) -> None:
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
            rank.report(_failure_report(error))
        sys.exit(1)


class _Rank:
    def __init__(self, config: EngineConfig, post: RankArgs) -> None:
        self._config, self._post = config, post
        self._desk = RingReader(post.connection, post.memory)
        self._plans = PlanDecoder()
        self.report = MessageWriter[RankReport](post.connection).send
        self._decode = msgspec.msgpack.Decoder[RankCommand](RankCommand).decode

    def run(self) -> None:
        LogForwarder(self.report).install(logging.WARNING)
        torch.set_num_threads(self._config.threads_each(self._post.local_ranks))
        device = assign_device(self._config, self._post.local_rank, self._post.local_ranks)
        self._join(device)
        engine = self._load(msgspec.structs.replace(self._config, device=device))
        while self._turn(engine):
            pass
        leave_ranks()

    def _join(self, device: str) -> None:
        rank, layout = self._post.rank, self._post.layout
        self._store = (
            RendezvousStore(self._post.host) if rank == 0 else None
        )  # others look into it as long as they live
        self.report(RankStarted(*self._store.rendezvous) if self._store else RankStarted())
        match self._hear():
            case JoinRanks(host, port):
                join_ranks(Rendezvous(host, port), rank, layout, torch.device(device))
            case LeaveRanks():
                raise EOFError
        self.report(RankJoined())

    def _load(self, config: EngineConfig) -> LoadedRank:
        post = self._post
        place = rank_shard(post.rank, post.layout, config.parallel.layers)
        engine = load_rank(config, place, lambda fraction: self.report(WeightsProgress(fraction)))
        wait_for_all_ranks()  # what is free is known when all have taken what they need
        sharing = 1 if engine.context.device.type == "cuda" else post.local_ranks
        self.report(RankLoaded.from_capacity(engine.capacity(sharing)))
        return engine

    def _turn(self, engine: LoadedRank) -> bool:
        """Do what comes next; False when that was to leave."""
        message = self._desk.read()
        if message[:1] == PLAN_PREFIX:
            self._step(engine, memoryview(message)[1:])
            return True
        match self._decode(message):
            case AllocateCache(blocks):
                engine.runner.allocate(blocks)
                self.report(CacheAllocated())
            case LeaveRanks():
                return False
        return True

    def _step(self, engine: LoadedRank, message: memoryview) -> None:
        plan, landed = self._plans.decode(message)
        if landed is not None:
            engine.runner.store_remote_tokens(*landed)
        result = engine.runner.run_step(plan)
        if self._post.rank == self._post.layout.result_rank:
            self.report(EncodedResult.from_result(result))

    def _hear(self) -> RankCommand:
        command: RankCommand = self._decode(self._desk.read())
        return command


def _failure_report(error: Exception) -> RankFailed:
    if isinstance(error, CharoniaError):
        return RankFailed(error.message, error.code, isinstance(error, PeerLost), error.field or "")
    print_traceback(error)
    return RankFailed(f"{type(error).__name__}: {error}", ErrorCode.INTERNAL)
