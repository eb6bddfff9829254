"""What becomes findable in the cache, and what ceases to be: told, in order, to whoever follows it.

Knows nothing of who that is. Without a follower nothing is called.
"""

from typing import NamedTuple, Protocol, TypeAlias

from ..block_hashes import HASH_BYTES, group_key

ExtraKey: TypeAlias = str | tuple[str, int]
"""An adapter's or a salt's name; or what an encoder made, by its digest and the position at which it begins, counted
from the block's first token."""


class BlockContent(NamedTuple):
    """What the hash of a block stands for."""

    digest: bytes
    parent: bytes | None
    """The hash of the block before it, if it is not the first."""
    tokens: tuple[int, ...]
    """As they were sent, also at places whose input is no token's embedding."""
    adapter: str = ""
    extra_keys: tuple[ExtraKey, ...] = ()
    """What else its hash depends on: the adapter, the spans in it and, of a first block, the salt."""


class CacheEvents(Protocol):
    """Follows a cache; called in the step loop's thread."""

    def describe(self, contents: list[BlockContent]) -> None:
        """Tell what hashes stand for that are about to be stored; some may have been told before."""

    def stored(self, key: bytes, on_host: bool) -> None:
        """The block of this key, see `group_key`, can be found from now on; `on_host`: in the host's memory."""

    def removed(self, key: bytes, on_host: bool) -> None:
        """The block of this key can be found there no more."""


class GroupEvents:
    """The same for a pool whose keys are hashes alone, as one `group`: snapshots of states."""

    def __init__(self, events: CacheEvents, group: int) -> None:
        self._events = events
        self._group = group

    def describe(self, contents: list[BlockContent]) -> None:
        self._events.describe(contents)

    def stored(self, key: bytes, on_host: bool) -> None:
        self._events.stored(group_key(key, self._group), on_host)

    def removed(self, key: bytes, on_host: bool) -> None:
        self._events.removed(group_key(key, self._group), on_host)


def split_key(key: bytes) -> tuple[bytes, int]:
    """The hash and the group that `group_key` made a key of."""
    return (key, 0) if len(key) == HASH_BYTES else (key[:HASH_BYTES], key[HASH_BYTES])
