"""Computed prompts that another server is to fetch: held in the cache when their sequence ends, sent by the threads of
`PrefixServer`, given up when they were fetched, or in time."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from ...kvcache.block_table import NO_BLOCK
from ...kvcache.exchange.held_prefixes import HeldPrefix, HeldPrefixes
from ...kvcache.manager import KVCacheManager
from ..transfer.prefix_server import OfferedPrefix, PrefixServer
from ..transfer.wire import TransferError
from ..transfer_config import KVTransferConfig
from ..worker.executor import CachePlaces, Executor
from .inbox import Inbox

R = TypeVar("R")


class HeldTransfers:
    """A `PrefixSource`, whose own methods are for peers' threads; all others for the step loop's."""

    def __init__(
        self,
        config: KVTransferConfig,
        replica: int,
        fingerprint: Mapping[str, str],
        cache: KVCacheManager,
        executor: Executor,
        inbox: Inbox,
        clock: Callable[[], float],
    ) -> None:
        """Raises `InvalidArgument` where the address is not to be had."""
        self._limits = config.limits
        self._cache = cache
        self._executor = executor
        self._inbox = inbox
        self._clock = clock
        most_states = 0 if cache.states is None else max(int(cache.states.size * config.limits.hold_fraction), 1)
        self.prefixes = HeldPrefixes(cache, int(cache.blocks * config.limits.hold_fraction), most_states)
        self._to_hold: dict[int, tuple[str, Sequence[bytes]]] = {}
        self._sending: set[str] = set()
        self.sent_prefixes = self.sent_bytes = 0
        self.broken = 0
        """Prefixes whose peer left in the midst."""
        self.expired = 0
        """Prefixes that nobody fetched in time."""
        self.dropped = 0
        """Prefixes that made room, or were too large to be held."""
        self.server = PrefixServer(config, replica, fingerprint, self)
        self.close = self.server.close

    def hold_at_end(self, key: int, handle: str, hashes: Sequence[bytes]) -> None:
        """Hold what is cached of these hashes when the sequence of this key ends."""
        self._to_hold[key] = handle, hashes

    def on_finished(self, finished: Iterable[tuple[int, str]]) -> None:
        """These sequences, by key and reason, have ended, and what they computed is still cached."""
        for key, reason in finished if self._to_hold else ():
            handle, hashes = self._to_hold.pop(key, ("", ()))
            if handle and reason in ("length", "stop"):
                dropped = self.prefixes.hold(handle, hashes, self._clock() + self._limits.hold_seconds)
                self.dropped += 1 if dropped is None else dropped

    def discard(self, keys: Iterable[int]) -> None:
        """These sequences are gone: nobody will fetch what they computed."""
        for key in keys:
            self._to_hold.pop(key, None)

    def expire(self) -> None:
        self.expired += self.prefixes.expire(self._clock())

    def make_room(self) -> bool:
        """Give the oldest up. False: there is none."""
        released = self.prefixes.release_oldest()
        self.dropped += released
        return released

    # For peers

    def offer(self, handle: str) -> OfferedPrefix | None:
        return self._ask(partial(self._offer, handle))

    def pieces(self, first: int, end: int, piece_bytes: int) -> Sequence[int]:
        span = self._cache.groups.total * sum(layout.block_bytes for layout in self._executor.image_layouts)
        count = max(piece_bytes // max(span, 1), 1)
        return [*range(first + count, end, count), end] if first < end else ()

    def read(self, handle: str, first: int, end: int) -> list[bytes]:
        return self._ask(partial(self._take_spans, handle, first, end))()

    def read_state(self, handle: str) -> list[bytes]:
        return self._ask(partial(self._take_state, handle))()

    def sent(self, handle: str, size: int, whole: bool) -> None:
        self._inbox.post(partial(self._settle, handle, size, whole))

    def _ask(self, question: Callable[[], R]) -> R:
        answer = self._inbox.call(question)
        try:
            return answer.result(self._limits.timeout_seconds + 50)
        except TimeoutError as error:
            if not answer.cancel():  # it is being answered
                return answer.result()
            raise TransferError("timeout", "the step loop does not answer") from error

    # In the step loop's thread, for peers

    def _offer(self, handle: str) -> OfferedPrefix | None:
        prefix = self.prefixes.held.get(handle)
        if prefix is None or handle in self._sending:
            return None
        self._sending.add(handle)
        prefix.until = math.inf
        return OfferedPrefix(prefix.hashes, prefix.state is not None)

    def _held(self, handle: str) -> HeldPrefix:
        prefix = self.prefixes.held.get(handle)
        if prefix is None:
            raise TransferError("gone", "the prefix made room while it was sent")
        return prefix

    def _take_spans(self, handle: str, first: int, end: int) -> Callable[[], list[bytes]]:
        blocks = self._held(handle).table.blocks
        spans = self._cache.groups.total
        wanted = [block for block in blocks[first * spans : end * spans] if block != NO_BLOCK]
        return self._executor.take_places(CachePlaces(wanted))

    def _take_state(self, handle: str) -> Callable[[], list[bytes]]:
        state, states = self._held(handle).state, self._cache.states
        assert state is not None
        assert states is not None
        return self._executor.take_places(CachePlaces((), (states.place_of(state),)))

    def _settle(self, handle: str, size: int, whole: bool) -> None:
        self._sending.discard(handle)
        self.prefixes.release(handle)
        self.sent_bytes += size
        self.sent_prefixes += whole
        self.broken += not whole
