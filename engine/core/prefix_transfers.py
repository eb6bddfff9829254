"""The transfer of computed prompts between servers, as the step loop sees it: what it holds for others, and what comes
from them."""

import uuid
from collections.abc import Callable, Iterable
from hashlib import sha256

from ...core.errors import shorten
from ...core.kv_transfer import TransferAddress
from ...kvcache.manager import KVCacheManager
from ...scheduler.plan import StepUpdates
from ...scheduler.scheduler import Scheduler
from ..checkpoint.fingerprint import content_fingerprint
from ..config import EngineConfig
from ..worker.executor import Executor
from .arriving_transfers import ArrivingTransfers
from .held_transfers import CallLoop, HeldTransfers
from .inbox import NewRequest
from .messages import RequestRejected


class PrefixTransfers:
    """For the step loop's thread.

    Raises:
        InvalidArgument: the configured address is not to be had.
    """

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        cache: KVCacheManager,
        executor: Executor,
        call_loop: CallLoop,
        clock: Callable[[], float],
    ) -> None:
        transfer = config.kv_transfer
        assert transfer is not None
        fingerprint = transfer_fingerprint(config, executor, scheduler.config.max_model_len)
        self._block_size = cache.block_size
        self.held: HeldTransfers | None = None
        self.arriving: ArrivingTransfers | None = None
        self.address: TransferAddress | None = None
        if transfer.produces:
            parts = cache, executor, call_loop
            self.held = HeldTransfers(transfer, config.replica, fingerprint, *parts, clock)
            engine_id = transfer.engine_id or str(uuid.uuid4())
            name = f"{engine_id}_dp{config.replica}" if config.data_parallel_size > 1 else engine_id
            host = transfer.limits.advertised_host or transfer.kv_ip
            self.address = TransferAddress(name, host, self.held.server.port, config.parallel.tensor)
        if transfer.consumes:
            make_room = None if self.held is None else self.held.make_room
            self.arriving = ArrivingTransfers(
                transfer, fingerprint, cache, scheduler, executor, call_loop, make_room or (lambda: False)
            )

    def take(self, new: NewRequest) -> bool:
        """Whether a new sequence waits for another server's blocks; one whose own are wanted is noted. Raises
        `InvalidArgument` if it can never run."""
        if new.handle and self.held is not None:
            blocks = (len(new.spec.prompt) - 1) // self._block_size
            self.held.hold_at_end(new.spec.key, new.handle, list(new.spec.hashes)[:blocks])
        if new.remote is None or self.arriving is None:
            return False
        self.arriving.add(new, new.remote)
        return True

    def turn(self) -> list[NewRequest | RequestRejected]:
        """What is due before a step; sequences that wait no more, and those that are refused."""
        if self.held is not None:
            self.held.expire()
        if self.arriving is None:
            return []
        self.arriving.begin_fetches()
        return self.arriving.take_ready()

    def on_updates(self, updates: StepUpdates) -> None:
        """A step's result has been applied."""
        if self.arriving is not None:
            self.arriving.on_started(key for key, _ in updates.started)
        if self.held is not None:
            self.held.on_finished(updates.finished)

    def discard(self, keys: Iterable[int]) -> None:
        """These sequences are gone."""
        keys = list(keys)
        if self.held is not None:
            self.held.discard(keys)
        if self.arriving is not None:
            self.arriving.discard(keys)

    @property
    def held_blocks(self) -> int:
        """Blocks that are held for other servers."""
        return 0 if self.held is None else self.held.prefixes.blocks

    @property
    def waiting(self) -> int:
        """Sequences that wait for another server's blocks."""
        return 0 if self.arriving is None else self.arriving.waiting

    def totals(self) -> dict[str, float]:
        """By the rest of the name of each metric."""
        held, arriving = self.held, self.arriving
        totals: dict[str, float] = {}
        if held is not None:
            totals |= {"sent": held.sent_prefixes, "sent_bytes": held.sent_bytes}
            totals |= {"expired": held.expired, "dropped": held.dropped + held.broken}
        if arriving is not None:
            totals |= {"received": arriving.received_prefixes, "received_bytes": arriving.received_bytes}
            totals |= {"failed": arriving.failed, "seconds": arriving.seconds}
        return totals

    def make_room(self) -> bool:
        """Give something up that no sequence has, because none can run. False: there is nothing."""
        if self.arriving is not None and self.arriving.make_room():
            return True
        return self.held is not None and self.held.make_room()

    def close(self) -> None:
        if self.held is not None:
            self.held.close()
        if self.arriving is not None:
            self.arriving.close()


def transfer_fingerprint(config: EngineConfig, executor: Executor, max_model_len: int) -> dict[str, str]:
    """By name, what must be equal in two servers for the bytes of one's cache to mean the same in the other. Raises as
    `content_fingerprint`."""
    parallel = config.parallel
    model = config.model if config.executor == "fake" else content_fingerprint(config.model).hex()
    return {
        "model": model,
        "dtype": config.dtype,
        "quantization": config.quantization,
        "kv_cache_dtype": config.cache.dtype,
        "max_model_len": str(max_model_len),
        "block_size": str(config.cache.block_size),
        "ranks": f"tensor {parallel.tensor}, pipeline {parallel.pipeline} {parallel.layers}, {parallel.whole_experts}",
        "layout": shorten(" | ".join(of_rank.layout for of_rank in executor.image_layouts), 512),
        "layouts": sha256(repr(executor.image_layouts).encode()).hexdigest(),
    }
