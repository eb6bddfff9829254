"""The replicas of one model: engine cores alike in everything, each with its own cache, behind one name.

Decides which of them takes a request, and how they share the machine. Lives in the frontend's event loop.
"""

import asyncio
from collections.abc import Iterator

import msgspec

from ...core.errors import NotReady
from ...core.metrics import LlmMetrics
from ...processes.host import available_memory, usable_cores
from ..config import EngineConfig
from ..core.messages import AddRequest, CoreReady, CoreTotals, EngineLoad
from .admission import AdmissionControl
from .core_supervisor import CoreTimeouts
from .prefix_index import PromptPrefix, prompt_prefixes
from .replica import Replica, ReplicaProgress, sum_totals
from .routing import ReplicaCandidate, choose_replica


def split_config(config: EngineConfig, threads: int, memory: int) -> list[EngineConfig]:
    """What each replica's core is told, on a host that has so many `threads` to compute with and `memory` bytes free.

    An even share to each: so their caches are alike whoever loads first, and when one is restarted beside the others.
    """
    count = config.data_parallel_size
    if count == 1:
        return [config]
    shared = msgspec.structs.replace(
        config, threads=config.threads or max(1, threads // count), host_memory=memory // count
    )
    return [msgspec.structs.replace(shared, replica=number) for number in range(count)]


class ReplicaSet:
    """`affinity`: a request goes where the beginning of its prompt is cached, if that is not too busy."""

    def __init__(
        self,
        config: EngineConfig,
        admission: AdmissionControl,
        metrics: LlmMetrics,
        on_progress: ReplicaProgress,
        patience: CoreTimeouts,
        affinity: bool = True,
    ) -> None:
        memory = available_memory() if config.host_memory is None else config.host_memory
        configs = split_config(config, usable_cores().threads, memory)
        self._all = [Replica(each, admission, metrics, on_progress, patience) for each in configs]
        self._affinity = affinity and config.cache.prefix_caching and len(self._all) > 1

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    async def start(self) -> CoreReady:
        """Return when all of them serve; they load side by side.

        Raises:
            CharoniaError: one cannot; the others may still be loading.
        """
        infos = await asyncio.gather(*(replica.start() for replica in self._all))
        return infos[0]

    async def close(self) -> None:
        await asyncio.gather(*(replica.close() for replica in self._all))

    @property
    def ready(self) -> bool:
        """One of them is: what a dead one had is lost, what comes goes to the others."""
        return any(replica.ready for replica in self._all)

    @property
    def info(self) -> CoreReady | None:
        """What the engines are; None while no core serves."""
        return next((replica.info for replica in self._all if replica.info is not None), None)

    @property
    def load(self) -> EngineLoad:
        """All of them together; the step time is that of the slowest."""
        loads = [replica.load for replica in self._all]
        return EngineLoad(
            sum(load.running for load in loads),
            sum(load.waiting for load in loads),
            sum(load.free_blocks for load in loads),
            max(load.step_seconds for load in loads),
        )

    @property
    def totals(self) -> CoreTotals:
        return sum_totals(replica.totals for replica in self._all)

    @property
    def kv_tokens(self) -> tuple[int, int]:
        """Tokens that the cache blocks in use hold, and that all of them would."""
        used, capacity = zip(*(replica.kv_tokens for replica in self._all), strict=True)
        return sum(used), sum(capacity)

    def choose(self, add: AddRequest) -> tuple[Replica, int]:
        """Who takes this request, and how many tokens of its prompt that one likely has.

        Raises:
            Unavailable: no core serves.
        """
        serving = self._serving()
        if not self._affinity:
            return min(serving, key=lambda replica: replica.pending_work), 0
        beginnings = prompt_prefixes(add.prompt, (add.adapter, add.tenant, add.salt))
        prospects = [_prospect(replica, beginnings, add) for replica in serving]
        at = choose_replica(prospects, len(add.prompt))
        serving[at].prefix_index.insert(beginnings, serving[at].kv_tokens[1])
        return serving[at], prospects[at].cached_tokens

    def _serving(self) -> list[Replica]:
        """The ready ones; where there is none, those that are only slow to turn."""
        serving = [replica for replica in self._all if replica.info is not None]
        if not serving:
            raise NotReady("the engine is not ready")
        return [replica for replica in serving if replica.ready] or serving


def _prospect(replica: Replica, beginnings: list[PromptPrefix], add: AddRequest) -> ReplicaCandidate:
    cached = replica.prefix_index.longest_match(beginnings)
    sibling = add.sampling.choice > 0 and cached == len(add.prompt)
    return ReplicaCandidate(replica.pending_work, cached, replica.prefix_index.tokens, sibling)
