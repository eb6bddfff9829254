"""One rank: joins the others, loads its shard of the model, computes step after step until it is told to leave.

Knows nothing of requests or scheduling, and of the core nothing but the connection to it.
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
    """The number of a rank, and its connection to the core, with which it may share `memory`.

    `host`: this machine's address among those of the ranks. The rank is number `local_rank` of the `local_ranks` here.
    """

    rank: int
    layout: RankLayout
    connection: Connection
    memory: SharedArena | None = None
    host: str = "127.0.0.1"
    local_rank: int = 0
    local_ranks: int = 1


def run_rank(config: EngineConfig, args: RankArgs) -> None:
    """Compute as that rank until the core says to leave.

    Raises:
        SystemExit: something failed, which was reported to the core, or the core is gone.
    """
    rank = _Rank(config, args)
    try:
        rank.run()
    except (EOFError, ConnectionError):
        sys.exit(1)
    except CharoniaError as error:
        rank.fail(RankFailed(error.message, error.code, isinstance(error, PeerLost), error.field or ""))
    except Exception as error:
        print_traceback(error)
        rank.fail(RankFailed(f"{type(error).__name__}: {error}", ErrorCode.INTERNAL))


class _Rank:
    def __init__(self, config: EngineConfig, args: RankArgs) -> None:
        self._config, self._args = config, args
        self._messages = RingReader(args.connection, args.memory)
        self._plans = PlanDecoder()
        self._report = MessageWriter[RankReport](args.connection).send
        self._decode = msgspec.msgpack.Decoder[RankCommand](RankCommand).decode

    def run(self) -> None:
        args = self._args
        LogForwarder(self._report).install(logging.WARNING)
        torch.set_num_threads(self._config.threads_each(args.local_ranks))
        device = assign_device(self._config, args.local_rank, args.local_ranks)
        self._join(device)
        loaded = self._load(msgspec.structs.replace(self._config, device=device))
        while self._turn(loaded):
            pass
        leave_ranks()

    def fail(self, report: RankFailed) -> None:
        with suppress(OSError):
            self._report(report)
        sys.exit(1)

    def _join(self, device: str) -> None:
        rank, layout = self._args.rank, self._args.layout
        # Other ranks look into the store as long as they live.
        self._store = RendezvousStore(self._args.host) if rank == 0 else None
        self._report(RankStarted(*self._store.rendezvous) if self._store else RankStarted())
        match self._decode(self._messages.read()):
            case JoinRanks(host, port):
                join_ranks(Rendezvous(host, port), rank, layout, torch.device(device))
            case LeaveRanks():
                raise EOFError
        self._report(RankJoined())

    def _load(self, config: EngineConfig) -> LoadedRank:
        args = self._args
        shard = rank_shard(args.rank, args.layout, config.parallel.layers)
        loaded = load_rank(config, shard, lambda fraction: self._report(WeightsProgress(fraction)))
        wait_for_all_ranks()  # free memory is known when all have taken what they need
        sharing = 1 if loaded.context.device.type == "cuda" else args.local_ranks
        self._report(RankLoaded(loaded.capacity(sharing)))
        return loaded

    def _turn(self, loaded: LoadedRank) -> bool:
        """Run the next step, or carry out the next command; False when that is to leave."""
        message = self._messages.read()
        if message[:1] == PLAN_PREFIX:
            plan, sampled = self._plans.decode(memoryview(message)[1:])
            if sampled is not None:
                loaded.runner.store_remote_tokens(*sampled)
            result = loaded.runner.run_step(plan)
            if self._args.rank == self._args.layout.result_rank:
                self._report(EncodedResult.from_result(result))
            return True
        match self._decode(message):
            case AllocateCache(blocks):
                loaded.runner.allocate(blocks)
                self._report(CacheAllocated())
            case LeaveRanks():
                return False
        return True
