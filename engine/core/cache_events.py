"""Cache events as vLLM sends them: what the step loop notes of its cache, and what is made of that for the wire.

The wire (vLLM's `kv_events.py`): a batch is a msgpack array of its time, its events and the replica's number; an event
is a map with its `type`, or for older readers an array that begins with it.
"""

from collections.abc import Callable, Sequence
from itertools import dropwhile
from typing import NamedTuple, Protocol, TypeAlias

import msgspec

from ...kvcache.block_hashes import HASH_BYTES
from ...kvcache.events.cache_events import BlockContent, ExtraKey, split_key
from ...kvcache.layer_groups import LayerGroups


class CacheChange(NamedTuple):
    """A block of one group of layers can be found, or can be found no more."""

    content: BlockContent
    group: int
    on_host: bool
    stored: bool
    is_shared: bool = False
    """Whether it is about a directory that servers share."""


Changes: TypeAlias = list[CacheChange | None]
"""In order. None: from here on, nothing but what follows can be found."""


class ChangesPublisher(Protocol):
    """Takes the batches away."""

    @property
    def published(self) -> int: ...

    @property
    def dropped(self) -> int: ...

    @property
    def has_room(self) -> bool:
        """Whether `publish` would take a batch."""

    def publish(self, changes: Changes) -> bool:
        """Send a batch, without waiting. False: it was dropped."""

    def close(self) -> None: ...


class _KnownBlock:
    """A content, and where it is: a bit for each group on the device and in the host's memory. `writing`: how many of
    its images are on their way to a directory."""

    __slots__ = ("content", "places", "writing")

    def __init__(self, content: BlockContent) -> None:
        self.content = content
        self.places = 0
        self.writing = 0


def _place(group: int, on_host: bool) -> int:
    return 1 << (2 * group + on_host)


class CacheEventRecorder:
    """Notes what the cache tells, and publishes it once a turn of the step loop; used by its thread alone. After a
    batch was dropped a later one begins anew, with all that there is: its readers are wrong for a while, and not for
    ever."""

    def __init__(self, publisher: ChangesPublisher) -> None:
        self.publisher = publisher
        self._known: dict[bytes, _KnownBlock] = {}
        self._touched: set[bytes] = set()
        self._changes: Changes = [None]  # readers may know blocks of a core that was here before
        self._lost = False

    def describe(self, contents: Sequence[BlockContent]) -> None:
        for content in contents:
            if content.digest not in self._known:
                self._known[content.digest] = _KnownBlock(content)
                self._touched.add(content.digest)

    def stored(self, key: bytes, on_host: bool) -> None:
        digest, group = split_key(key)
        if (block := self._known.get(digest)) is not None:  # of what was not described there is nothing to tell
            block.places |= _place(group, on_host)
            self._changes.append(CacheChange(block.content, group, on_host, stored=True))

    def writing(self, key: bytes) -> None:
        """The image of a block that can be found is to be written to a directory that servers share."""
        digest, _ = split_key(key)
        if (block := self._known.get(digest)) is not None:
            block.writing += 1

    def written(self, key: bytes, is_there: bool) -> None:
        """What became of that. Nobody learns here how long it stays there, so it is told once, and noted nowhere."""
        digest, group = split_key(key)
        block = self._known.get(digest)
        if block is None or not block.writing:
            return
        block.writing -= 1
        self._touched.add(digest)
        if is_there:
            self._changes.append(CacheChange(block.content, group, on_host=False, stored=True, is_shared=True))

    def removed(self, key: bytes, on_host: bool) -> None:
        digest, group = split_key(key)
        block, place = self._known.get(digest), _place(group, on_host)
        if block is not None and block.places & place:
            block.places &= ~place
            self._touched.add(digest)
            self._changes.append(CacheChange(block.content, group, on_host, stored=False))

    @property
    def behind(self) -> bool:
        """Whether a batch was dropped, after which none has begun anew."""
        return self._lost

    def flush(self) -> None:
        """Publish what was noted since the last call."""
        if self._touched:
            for digest in self._touched:
                block = self._known[digest]
                if not (block.places or block.writing):
                    del self._known[digest]
            self._touched.clear()
        if self._lost and self.publisher.has_room:
            self._changes = [None, *self._present()]
        if self._changes:
            self._lost = not self.publisher.publish(self._changes) or (self._lost and self._changes[0] is not None)
            self._changes = []

    def _present(self) -> Changes:
        """Everything that can be found."""
        places = [
            (block, bit)
            for block in self._known.values()
            for bit in range(block.places.bit_length())
            if block.places >> bit & 1
        ]
        places.sort(key=lambda place: place[1])
        return [CacheChange(block.content, bit // 2, bool(bit % 2), stored=True) for block, bit in places]


WireHash: TypeAlias = int


class BlockStored(msgspec.Struct, tag=True, tag_field="type", omit_defaults=True, kw_only=True):
    """Neighbouring blocks of one group, each the parent of the next."""

    block_hashes: list[WireHash]
    parent_block_hash: WireHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[ExtraKey, ...] | None] | None = None
    """For each block what its hash depends on beside tokens, if anything."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, tag_field="type", omit_defaults=True, kw_only=True):
    block_hashes: list[WireHash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, tag_field="type"):
    pass


CacheEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class GroupKind(NamedTuple):
    """A group of layers as events name it: its number, and vLLM's word for what it keeps."""

    number: int
    kind: str
    window: int | None = None


def group_kinds(groups: LayerGroups, latent: bool, keeps_tokens: bool) -> list[GroupKind | None]:
    """The kinds of a cache's groups, that of the snapshots of states last. None: its blocks hold nothing, as in a model
    that keeps states alone, and nobody is told of them."""
    full, sliding = ("mla_attention", "sliding_window_mla") if latent else ("full_attention", "sliding_window")
    if not keeps_tokens:
        return [*[None] * groups.total, GroupKind(0, "mamba")]
    of_blocks = [
        GroupKind(number, full) if number < groups.full else GroupKind(number, sliding, groups.window)
        for number in range(groups.total)
    ]
    return [*of_blocks, GroupKind(groups.total, "mamba")]


class CacheEventEncoder:
    """Makes a batch's payload of changes. `replica`: the engine's, vLLM's data-parallel rank."""

    def __init__(
        self, block_size: int, kinds: Sequence[GroupKind | None], replica: int, as_arrays: bool = False
    ) -> None:
        self._block_size = block_size
        self._kinds = kinds
        self._replica = replica
        self._shape: Callable[[CacheEvent], object] = _as_array if as_arrays else lambda event: event
        self._encode = msgspec.msgpack.Encoder().encode

    def encode(self, seconds: float, changes: Changes) -> bytes:
        """`seconds`: since the epoch."""
        return self._encode((seconds, [self._shape(event) for event in self.events(changes)], self._replica))

    def events(self, changes: Changes) -> list[CacheEvent]:
        """The changes as events: neighbours of one kind are one event, and of blocks that are stored only those that
        follow each other."""
        events: list[CacheEvent] = []
        last: CacheEvent | None = None
        for change in changes:
            if change is None:
                last = AllBlocksCleared()
                events.append(last)
                continue
            kind = self._kinds[change.group]
            if kind is None:
                continue
            medium = "SHARED_STORAGE" if change.is_shared else "CPU" if change.on_host else "GPU"
            if change.stored:
                last = self._store(change.content, kind, medium, last)
            elif isinstance(last, BlockRemoved) and (last.group_idx, last.medium) == (kind.number, medium):
                last.block_hashes.append(_wire_hash(change.content.digest))
            else:
                hashes = [_wire_hash(change.content.digest)]
                last = BlockRemoved(block_hashes=hashes, medium=medium, group_idx=kind.number)
            if not events or events[-1] is not last:
                events.append(last)
        return events

    def _store(self, content: BlockContent, kind: GroupKind, medium: str, last: CacheEvent | None) -> BlockStored:
        parent = None if content.parent is None else _wire_hash(content.parent)
        adapter = content.adapter or None
        if not (
            isinstance(last, BlockStored)
            and (last.group_idx, last.medium, last.lora_name) == (kind.number, medium, adapter)
            and last.block_hashes[-1] == parent
        ):
            last = BlockStored(
                block_hashes=[],
                parent_block_hash=parent,
                token_ids=[],
                block_size=self._block_size,
                lora_id=None,
                medium=medium,
                lora_name=adapter,
                extra_keys=[],
                group_idx=kind.number,
                kv_cache_spec_kind=kind.kind,
                kv_cache_spec_sliding_window=kind.window,
            )
        last.block_hashes.append(_wire_hash(content.digest))
        last.token_ids.extend(content.tokens)
        assert last.extra_keys is not None
        last.extra_keys.append(content.extra_keys or None)
        return last


def _wire_hash(digest: bytes) -> WireHash:
    """The last 64 bits, as vLLM shortens its own."""
    return int.from_bytes(digest[HASH_BYTES - 8 :], "big")


def _as_array(event: CacheEvent) -> list[object]:
    values = [type(event).__name__, *msgspec.structs.astuple(event)]
    return [*dropwhile(lambda value: value is None, reversed(values))][::-1]
