"""The transfer of computed prompts between servers, as the step loop sees it: what it holds for others, and what comes
from them."""

import math
import uuid
from collections.abc import Callable, Collection, Mapping

from ...core.kv_transfer import TransferAddress
from ...kvcache.manager import KVCacheManager
from ...scheduler.plan import StepUpdates
from ...scheduler.scheduler import Scheduler
from ..config import EngineConfig
from ..worker.executor import Executor
from .arriving_transfers import ArrivingTransfers
from .held_transfers import HeldTransfers
from .inbox import Inbox, NewRequest
from .messages import RequestRejected


class PrefixTransfers:
    """A `PrefixOrigin`. `facts`: what servers compare first, `cache_facts`.

    Raises:
        InvalidArgument: the configured address is not to be had.
    """

    name = "transfers"
    holds_blocks = True

    def __init__(
        self,
        config: EngineConfig,
        facts: Mapping[str, str],
        scheduler: Scheduler,
        cache: KVCacheManager,
        executor: Executor,
        inbox: Inbox,
        clock: Callable[[], float],
    ) -> None:
        transfer = config.kv_transfer
        assert transfer is not None
        self._block_size = cache.block_size
        self.held: HeldTransfers | None = None
        self.arriving: ArrivingTransfers | None = None
        self.address: TransferAddress | None = None
        if transfer.produces:
            self.held = HeldTransfers(transfer, config.replica, facts, cache, executor, inbox, clock)
            engine_id = transfer.engine_id or str(uuid.uuid4())
            name = f"{engine_id}_dp{config.replica}" if config.data_parallel_size > 1 else engine_id
            host = transfer.limits.advertised_host or transfer.kv_ip
            self.address = TransferAddress(name, host, self.held.server.port, config.parallel.tensor)
        if transfer.consumes:
            make_room = None if self.held is None else self.held.make_room
            self.arriving = ArrivingTransfers(
                transfer, facts, cache, scheduler, executor, inbox, clock, make_room or (lambda: False)
            )

    def take(self, new: NewRequest) -> bool:
        """One whose own blocks are wanted is noted."""
        if new.handle and self.held is not None:
            blocks = (len(new.spec.prompt) - 1) // self._block_size
            self.held.hold_at_end(new.spec.key, new.handle, list(new.spec.hashes)[:blocks])
        if new.remote is None or self.arriving is None:
            return False
        self.arriving.add(new, new.remote)
        return True

    def patience(self) -> float:
        return math.inf

    def turn(self) -> list[NewRequest | RequestRejected]:
        if self.held is not None:
            self.held.expire()
        if self.arriving is None:
            return []
        self.arriving.begin_fetches()
        return self.arriving.take_ready()

    def on_updates(self, updates: StepUpdates) -> None:
        if self.arriving is not None:
            self.arriving.on_started(key for key, _ in updates.started)
        if self.held is not None:
            self.held.on_finished(updates.finished)

    def discard(self, keys: Collection[int]) -> None:
        if self.held is not None:
            self.held.discard(keys)
        if self.arriving is not None:
            self.arriving.discard(keys)

    @property
    def held_blocks(self) -> int:
        return 0 if self.held is None else self.held.prefixes.blocks

    @property
    def waiting(self) -> int:
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
            totals |= {"received_tokens": arriving.received_tokens, "wait_seconds": arriving.waits.seconds}
            totals |= {"failed": arriving.failed, "seconds": arriving.seconds}
        return totals

    def make_room(self) -> bool:
        if self.arriving is not None and self.arriving.make_room():
            return True
        return self.held is not None and self.held.make_room()

    def check_integrity(self) -> None:
        pass  # tables that it holds are counted by the cache

    def close(self) -> None:
        if self.held is not None:
            self.held.close()
        if self.arriving is not None:
            self.arriving.close()
