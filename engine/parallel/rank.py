"""One rank: joins the others, loads its shard of the model, computes step after step until it is told to leave.

Knows nothing of requests or scheduling, and of the core nothing but the connection to it.
"""

import logging
import sys
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection

import msgspec
import numpy as np
import torch

from ...core.adapter import Adapter
from ...core.errors import CharoniaError, ErrorCode
from ...processes.child_process import print_traceback
from ...processes.log_forwarding import LogForwarder, MessageWriter
from ...scheduler.plan import MaskArray, MaskSource
from ..config import EngineConfig
from ..worker.device import assign_device
from ..worker.loaded_rank import LoadedRank, load_rank
from .layout import RankPlace
from .rank_messages import (
    AllocateCache,
    CacheAllocated,
    ComputeStep,
    JoinRanks,
    LeaveRanks,
    LoadRankAdapter,
    ProvideMasks,
    RankAdapterLoaded,
    RankAdapterRefused,
    RankFailed,
    RankJoined,
    RankLoaded,
    RankReport,
    RankStarted,
    StepComputed,
    UnloadRankAdapter,
    WeightsProgress,
    decode_command,
    encode_message,
)
from .torch_groups import PeerLost, join_ranks, leave_ranks, open_store, rank_shard, wait_for_all_ranks


def run_rank(config: EngineConfig, place: RankPlace, connection: Connection) -> None:
    """Compute as the rank at `place` until the core, at the other end of `connection`, says to leave.

    Raises:
        SystemExit: something failed, which was reported to the core, or the core is gone.
    """
    report = MessageWriter[RankReport](connection, encode_message).send
    try:
        _run(config, place, connection, report)
        return
    except (EOFError, ConnectionError):
        sys.exit(1)
    except CharoniaError as error:
        failed = RankFailed(error.message, error.code, isinstance(error, PeerLost), error.field or "")
    except Exception as error:
        print_traceback(error)
        failed = RankFailed(f"{type(error).__name__}: {error}", ErrorCode.INTERNAL)
    with suppress(OSError):
        report(failed)
    sys.exit(1)


def _run(config: EngineConfig, place: RankPlace, connection: Connection, report: Callable[[RankReport], None]) -> None:
    LogForwarder(report).install(logging.WARNING)
    torch.set_num_threads(config.threads_each(place.local_ranks))
    config = msgspec.structs.replace(config, device=assign_device(config, place.local_rank, place.local_ranks))
    store = open_store(place.host) if place.rank == 0 else None  # the others use it as long as they live
    report(RankStarted(store.host, store.port) if store else RankStarted())
    command = decode_command(connection.recv_bytes())
    if not isinstance(command, JoinRanks):
        raise EOFError
    join_ranks(command.host, command.port, place.rank, place.layout, torch.device(config.device))
    report(RankJoined())
    shard = rank_shard(place.rank, place.layout, config.parallel.layers)
    loaded = load_rank(config, shard, lambda fraction: report(WeightsProgress(fraction)))
    wait_for_all_ranks()  # free memory is known when all have taken what they need
    sharing = 1 if loaded.context.device.type == "cuda" else place.local_ranks
    report(RankLoaded(loaded.capacity(sharing)))
    while _execute_command(loaded, place, connection, report):
        pass
    loaded.close()
    leave_ranks()


def _execute_command(
    rank: LoadedRank, place: RankPlace, connection: Connection, report: Callable[[RankReport], None]
) -> bool:
    """Wait for the next command and execute it; False when that is to leave."""
    runner = rank.runner
    match decode_command(connection.recv_bytes()):
        case ComputeStep(plan, sampled):
            if sampled is not None:
                runner.store_remote_tokens(*sampled)
            # The core sends masks while the step is computed; where it has several stages to feed, it must not wait
            # until this one reads them.
            masks: MaskSource = partial(_read_masks, connection)
            if len(plan.masked) and place.layout.pipeline > 1:
                masks = partial(np.asarray, masks())
            result = runner.run_step(plan, masks)
            if place.rank == place.layout.result_rank:
                report(StepComputed(result))
        case ProvideMasks():
            raise ValueError("masks without a step that waits for them")
        case AllocateCache(blocks):
            runner.allocate(blocks)
            report(CacheAllocated())
        case LoadRankAdapter(path):
            rank.loaded_adapters.load(path).add_done_callback(partial(_report_adapter, report))
        case UnloadRankAdapter(digest):
            rank.loaded_adapters.unload(digest)
        case LeaveRanks():
            return False
    return True


def _report_adapter(report: Callable[[RankReport], None], loaded: Future[Adapter]) -> None:
    """Called by the thread that loaded."""
    outcome: RankReport
    try:
        outcome = RankAdapterLoaded(loaded.result())
    except CancelledError:
        return  # the rank leaves
    except CharoniaError as error:
        outcome = RankAdapterRefused(error.message, error.code, error.field or "")
    except Exception as error:
        outcome = RankAdapterRefused(f"{type(error).__name__}: {error}", ErrorCode.INTERNAL)
    with suppress(OSError):  # the core is gone
        report(outcome)


def _read_masks(connection: Connection) -> MaskArray:
    command = decode_command(connection.recv_bytes())
    if not isinstance(command, ProvideMasks):
        raise EOFError
    return command.masks
