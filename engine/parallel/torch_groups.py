"""Ranks that reach each other by torch.distributed: gloo between CPUs, NCCL between GPUs.

Knows nothing of models and plans.
"""

import os
import sys
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...core.errors import Unavailable
from ..checkpoint.build_context import Shard, SingleRank, TensorGroup, all_rank_slices
from ..checkpoint.partition import PipelineStage
from .layout import RankLayout
from .rank_connections import listen_on

P = ParamSpec("P")
T = TypeVar("T")

_TIMEOUT = timedelta(minutes=30)
"""How long ranks wait for each other while one loads or computes; the core waits less for a rank to join."""

_MAX_UNRECEIVED = 4
"""Steps that a stage may be ahead of the one after it before it waits."""

_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class PeerLost(Unavailable):
    """Another rank does not answer any more."""


def open_store(host: str) -> Any:
    """Rank 0's store, in which ranks find each other. It listens on `host` alone, at its `port`, while it is referred
    to."""
    listener = listen_on(host)
    return dist.TCPStore(  # type: ignore[attr-defined]
        host,
        listener.getsockname()[1],
        is_master=True,
        timeout=_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store closes it
    )


def join_ranks(host: str, port: int, rank: int, layout: RankLayout, device: torch.device) -> None:
    """Connect with the other ranks, by the store there; returns when all have come.

    Raises:
        PeerLost: a rank is missing.
    """
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
    """The share of the model that `rank` computes, once it has joined; every rank asks for its own at the same time."""
    groups = [_translate_errors(dist.new_group, list(members)) for members in layout.stages()]
    index = layout.stage_of(rank)
    group: TensorGroup = SingleRank() if layout.tensor == 1 else TensorParallelGroup(groups[index])
    stage = PipelineStage(index, layout.pipeline, split)
    return Shard(group, stage, StageNeighbours(rank, layout.tensor) if layout.pipeline > 1 else None)


def _translate_errors(call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Call torch.distributed; its errors about a rank that is gone become `PeerLost`."""
    try:
        return call(*arguments, **named)
    except RuntimeError as error:
        raise PeerLost(f"lost the other ranks: {str(error).splitlines()[0]}") from error


class TensorParallelGroup:
    """The ranks of one stage: a `TensorGroup`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def all_reduce(self, partial: Tensor) -> Tensor:
        whole = partial.contiguous()
        _translate_errors(dist.all_reduce, whole, group=self._group)
        return whole

    def all_gather(self, part: Tensor, total: int) -> Tensor:
        widths = [part.stop - part.start for part in all_rank_slices(total, self.size)]
        # Equal pieces are what the libraries gather: the narrow ones are padded.
        mine = part if part.shape[-1] == max(widths) else torch.nn.functional.pad(part, (0, 1))
        pieces = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in widths]
        _translate_errors(dist.all_gather, pieces, mine.contiguous(), group=self._group)
        return torch.cat([piece[..., :width] for piece, width in zip(pieces, widths, strict=True)], -1)


class StageNeighbours:
    """The ranks with the same place in the stages before and after: a `PipelineLink`."""

    def __init__(self, rank: int, distance: int) -> None:
        self._before, self._after = rank - distance, rank + distance
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
