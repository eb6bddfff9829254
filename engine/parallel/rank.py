"""One rank: joins the others by torch.distributed (gloo between CPUs, NCCL between GPUs), loads its shard of the model,
and computes steps until it is to leave.

Knows nothing of requests or scheduling, and of the core only the connection to it.
"""

import logging
import os
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, ParamSpec, TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...core.adapter import Adapter
from ...core.errors import CharoniaError, SentError
from ...processes.child_process import print_traceback
from ...processes.log_forwarding import LogForwarder, MessageWriter
from ...scheduler.plan import MaskArray, MaskSource
from ..checkpoint.build_context import Shard, SingleRank, TensorGroup, all_rank_slices
from ..checkpoint.partition import PipelineStage
from ..config import EngineConfig
from ..worker.devices import assign_device, resolve_device
from ..worker.image_files import RankImages
from ..worker.loaded_rank import LoadedRank, load_rank
from ..worker.rank_group import PeerLost
from . import rank_messages as messages
from .rank_connections import listen_on
from .rank_layout import RankLayout, RankPlace

P = ParamSpec("P")
T = TypeVar("T")

_TIMEOUT = timedelta(minutes=30)
"""How long ranks wait for each other while one loads or computes."""

_MAX_UNRECEIVED = 4
"""Steps that a stage may be ahead of the next one before it waits."""

_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def open_store(host: str) -> Any:
    """Rank 0's store, in which ranks find each other. It listens on `host` alone, at its `port`, until it is
    collected."""
    listener = listen_on(host)
    return dist.TCPStore(  # type: ignore[attr-defined]
        host,
        listener.getsockname()[1],
        is_master=True,
        timeout=_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store closes it
    )


def rank_device(config: EngineConfig, place: RankPlace) -> torch.device:
    """The device of the rank at `place`, on its machine. Raises as `assign_device` and `resolve_device`."""
    return resolve_device(assign_device(config, place.local_rank, place.local_ranks))


def join_ranks(host: str, port: int, rank: int, layout: RankLayout, device: torch.device) -> None:
    """Connect with the other ranks by the store at `host`; return when all have come. Raises `PeerLost` if one is
    missing. `device`: a GPU with its index."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    if host in ("127.0.0.1", "::1"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
    connect = dist.TCPStore  # type: ignore[attr-defined]
    store = _translate_errors(connect, host, port, is_master=False, timeout=_TIMEOUT, wait_for_workers=False)
    _translate_errors(
        dist.init_process_group,
        "nccl" if cuda else "gloo",
        store=store,
        rank=rank,
        world_size=layout.world,
        timeout=_TIMEOUT,
        device_id=device if cuda else None,
    )


def wait_for_all_ranks() -> None:
    """Return when every rank has called this."""
    _translate_errors(dist.barrier)


def leave_ranks() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def rank_shard(rank: int, layout: RankLayout, split: tuple[int, ...] = ()) -> Shard:
    """The share of the model that `rank` computes. All ranks must call this at the same time, after they have
    joined."""
    groups = [_translate_errors(dist.new_group, list(members)) for members in layout.stages()]
    index = layout.stage_of(rank)
    group: TensorGroup = SingleRank() if layout.tensor == 1 else TensorParallelGroup(groups[index])
    stage = PipelineStage(index, layout.pipeline, split)
    return Shard(group, stage, StageNeighbours(rank, layout.tensor) if layout.pipeline > 1 else None)


def _translate_errors(call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Call torch.distributed; its errors about a lost rank become `PeerLost`."""
    try:
        return call(*arguments, **named)
    except RuntimeError as error:
        raise PeerLost(f"lost the other ranks: {str(error).splitlines()[0]}") from error


class TensorParallelGroup:
    """The ranks of one stage: a `TensorGroup`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_reduce(self, partial: Tensor) -> Tensor:
        reduced = partial.contiguous()
        _translate_errors(dist.all_reduce, reduced, group=self._group)
        return reduced

    def all_gather(self, part: Tensor, total: int) -> Tensor:
        widths = [part.stop - part.start for part in all_rank_slices(total, self.size)]
        # The libraries gather equal pieces: narrow ones are padded.
        mine = part if part.shape[-1] == max(widths) else torch.nn.functional.pad(part, (0, 1))
        pieces = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in widths]
        _translate_errors(dist.all_gather, pieces, mine.contiguous(), group=self._group)
        return torch.cat([piece[..., :width] for piece, width in zip(pieces, widths, strict=True)], -1)


class StageNeighbours:
    """The ranks with the same index in the stages before and after: a `PipelineLink`."""

    def __init__(self, rank: int, distance: int) -> None:
        self._before = rank - distance
        self._after = rank + distance
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()

    def receive(self, into: Tensor) -> None:
        _translate_errors(dist.recv, into, self._before)

    def send(self, x: Tensor) -> None:
        while self._sent and (len(self._sent) >= _MAX_UNRECEIVED or self._sent[0][0].is_completed()):
            oldest, _ = self._sent.popleft()
            _translate_errors(oldest.wait)
        work = _translate_errors(dist.isend, x, self._after)
        assert work is not None
        self._sent.append((work, x))


def run_rank(config: EngineConfig, place: RankPlace, connection: Connection) -> None:
    """Compute as the rank at `place` until the core, at the other end of `connection`, lets it leave.

    Raises:
        SystemExit: an error was reported to the core, or the core is gone.
    """
    report = MessageWriter[messages.RankReport](connection, messages.encode_message).send
    try:
        _run(config, place, connection, report)
        return
    except (EOFError, ConnectionError):
        sys.exit(1)
    except Exception as error:
        if not isinstance(error, CharoniaError):
            print_traceback(error)
        failed = messages.RankFailed(SentError.of(error), isinstance(error, PeerLost))
    with suppress(OSError):
        report(failed)
    sys.exit(1)


def _run(
    config: EngineConfig, place: RankPlace, connection: Connection, report: Callable[[messages.RankReport], None]
) -> None:
    LogForwarder(report).install(logging.WARNING)
    torch.set_num_threads(config.threads_each(place.local_ranks))
    device = rank_device(config, place)
    config = msgspec.structs.replace(config, device=str(device))
    store = open_store(place.host) if place.rank == 0 else None  # the others use it as long as they live
    report(messages.RankStarted(store.host, store.port) if store else messages.RankStarted())
    command = messages.decode_command(connection.recv_bytes())
    if not isinstance(command, messages.JoinRanks):
        raise EOFError
    join_ranks(command.host, command.port, place.rank, place.layout, device)
    report(messages.RankJoined())
    shard = rank_shard(place.rank, place.layout, config.parallel.layers)
    clock = _CoreClock()
    loaded = load_rank(config, shard, lambda fraction: report(messages.WeightsProgress(fraction)), clock=clock)
    wait_for_all_ranks()  # free memory is known when all have taken what they need
    sharing = 1 if loaded.context.device.type == "cuda" else place.local_ranks
    report(messages.RankLoaded(loaded.capacity(sharing)))
    images = _RankDirectory(loaded, place, report)
    while _execute_command(loaded, images, connection, report, clock):
        pass
    images.close()
    loaded.close()  # NCCL's communicators wait for the graphs that have exchanges of theirs
    leave_ranks()


class _CoreClock:
    """The core's clock at the command that is executed: the same on all ranks."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class _RankDirectory:
    """The rank's images in the directory, once the core has named one."""

    def __init__(self, rank: LoadedRank, place: RankPlace, report: Callable[[messages.RankReport], None]) -> None:
        self._rank = rank
        self.place = place
        self._report = report
        self._images: RankImages | None = None

    def execute(self, command: messages.ImageCommand) -> None:
        if isinstance(command, messages.OpenDirectory):
            self._images = self._rank.open_directory(command.settings, self.place.rank, self.place.layout.world)
            return
        assert self._images is not None, "images without a directory"
        match command:
            case messages.FetchImages(number, images):
                self._images.fetch(images).add_done_callback(partial(self._report_moved, number))
            case messages.StoreImages(number, images):
                self._images.store(images).add_done_callback(partial(self._report_moved, number))
            case messages.DropImages(dropped):
                self._images.drop(dropped)

    def _report_moved(self, number: int, moved: Future[list[bool]]) -> None:
        """Called by the thread that read or wrote."""
        assert self._images is not None
        with suppress(OSError):  # the core is gone
            self._report(messages.ImagesCounted(self._images.totals))
            self._report(messages.ImagesMoved(number, moved.result()))

    def close(self) -> None:
        if self._images is not None:
            self._images.close()


def _execute_command(
    rank: LoadedRank,
    directory: _RankDirectory,
    connection: Connection,
    report: Callable[[messages.RankReport], None],
    clock: _CoreClock,
) -> bool:
    """Wait for the next command and execute it; False for `LeaveRanks`."""
    runner = rank.runner
    place = directory.place
    match messages.decode_command(connection.recv_bytes()):
        case messages.ComputeStep(plan, sampled, now):
            clock.now = now
            if sampled is not None:
                runner.store_remote_tokens(*sampled)
            # The core sends masks while the step is computed. With several stages it must not wait until this one
            # reads them.
            masks: MaskSource = partial(_read_masks, connection)
            if len(plan.masked) and place.layout.pipeline > 1:
                masks = partial(np.asarray, masks())
            result = runner.run_step(plan, masks)
            if place.rank == place.layout.result_rank:
                report(messages.StepComputed(result, dict(runner.eager_steps), runner.failed_captures))
        case messages.CaptureGraph(now, usual):
            clock.now = now
            share = runner.capture_next_usual() if usual else float(not runner.capture_one())
            report(messages.GraphsCaptured(share))
        case messages.ProvideMasks():
            raise ValueError("masks without a step that waits for them")
        case messages.AllocateCache(blocks, host_blocks, snapshots, host_snapshots):
            runner.allocate(blocks, host_blocks, snapshots, host_snapshots)
            report(messages.CacheAllocated(runner.places.layout))
        case (
            messages.OpenDirectory()
            | messages.FetchImages()
            | messages.StoreImages()
            | messages.DropImages() as command
        ):
            directory.execute(command)
        case messages.TakePlaces(places):
            with torch.inference_mode():
                report(messages.PlacesTaken(runner.places.take(places)()))
        case messages.PutPlaces(places, content, copies):
            with torch.inference_mode():
                runner.make_copies(*copies)
                runner.places.put(places, content)
        case messages.LoadRankAdapter(path):
            rank.loaded_adapters.load(path).add_done_callback(partial(_report_adapter, report))
        case messages.UnloadRankAdapter(digest):
            rank.loaded_adapters.unload(digest)
        case messages.LeaveRanks():
            return False
    return True


def _report_adapter(report: Callable[[messages.RankReport], None], loaded: Future[Adapter]) -> None:
    """Called by the thread that loaded."""
    outcome: messages.RankReport
    try:
        outcome = messages.RankAdapterLoaded(loaded.result())
    except CancelledError:
        return  # the rank leaves
    except Exception as error:
        outcome = messages.RankAdapterRefused(SentError.of(error))
    with suppress(OSError):  # the core is gone
        report(outcome)


def _read_masks(connection: Connection) -> MaskArray:
    command = messages.decode_command(connection.recv_bytes())
    if not isinstance(command, messages.ProvideMasks):
        raise EOFError
    return command.masks
