"""How many blocks an engine's cache has, and how many states it keeps beside them."""

import logging
from typing import NamedTuple

from ...core.errors import InvalidArgument
from ...kvcache.layer_groups import ONE_GROUP, LayerGroups
from ...kvcache.retention.session_retention import NO_RETENTION, RetentionBudget
from ..config import CacheConfig, EngineConfig
from ..worker.executor import Capacity

log = logging.getLogger(__name__)

_USEFUL_TIMES = 4
"""A cache sized by share of memory stops at this many times the tokens that all rows could hold at full length."""

_USEFUL_SNAPSHOTS = 32
"""For each row, in the same way."""

_NUMBERED_BLOCKS = 1 << 20
"""The blocks of a model that keeps no tokens: numbers alone, by which prefixes are found; so many take 20 MB."""

_DRAFTING_ROWS = 8
"""So many rows may verify all the drafts that a step may have, at once, where they have states: with more rows a step
takes longer for each draft, and drafts are seldom worth it."""

_DRAFT_SHARE = 4
"""States of drafts take this part of what rows leave at most, if that is enough for one row."""


class CacheSizes(NamedTuple):
    """What an executor is to allocate. `prefix_caching`: whether prompts share it. `draft_states`: of the states before
    drafts, beside the snapshots."""

    blocks: int
    snapshots: int = 0
    host_blocks: int = 0
    prefix_caching: bool = True
    state_bytes: int = 0
    draft_states: int = 0
    groups: LayerGroups = ONE_GROUP
    host_snapshots: int = 0

    @property
    def extra_states(self) -> int:
        """States beside those of the rows."""
        return self.snapshots + self.draft_states

    def describe(self, block_size: int) -> str:
        """One line for people."""
        line = f"{self.blocks} blocks of {block_size} tokens"
        if self.groups.sliding:
            count = self.groups.total
            sliding = self.groups.sliding
            window = self.groups.window
            line += f" and one of {count} groups of layers, {sliding} of which keep the last {window} tokens"
        if self.host_blocks:
            line += f", {self.host_blocks} in the host's memory"
        if self.state_bytes:
            line += f", {self.snapshots} snapshots of states of {self.state_bytes / 1e6:.3g} MB"
            line += f", {self.host_snapshots} more in the host's memory" if self.host_snapshots else ""
            line += f", {self.draft_states} more for drafts" if self.draft_states else ""
        return line


def resolve_cache_sizes(config: EngineConfig, capacity: Capacity, length: int) -> CacheSizes:
    """The sizes for sequences of at most `length` tokens. A model with states has one for each row first, and some for
    drafts; of the rest, and of the host's memory, snapshots get a share, unless no prompt is to share anything.

    Raises:
        InvalidArgument: not one block or one state for each row fits, or nothing into the host's memory.
    """
    rows, caching = config.scheduler.max_num_seqs, config.cache.prefix_caching
    if config.cache.gpu_utilization is not None and not capacity.on_gpu:
        log.warning("gpu_memory_utilization has no effect: no GPU computes; kv_cache_memory_fraction is the host's")
    if not capacity.state_bytes:
        blocks = resolve_cache_blocks(config.cache, capacity, rows * length)
        host_blocks, _ = _host_sizes(config, capacity, caching, 0.0)
        return CacheSizes(blocks, host_blocks=host_blocks, prefix_caching=caching, groups=capacity.groups)
    fraction = config.cache.state_fraction if caching else 0.0
    if not capacity.block_bytes:
        fraction = float(caching)
    drafts = _draft_states(config, capacity)
    if config.cache.blocks is not None and capacity.block_bytes:
        blocks = config.cache.blocks
        state_bytes = int(blocks * capacity.block_bytes * fraction / (1 - fraction))
    else:
        state_bytes, block_bytes = _divide_bytes(config, capacity, fraction, drafts)
        given = CacheConfig(block_size=config.cache.block_size, blocks=config.cache.blocks, bytes=block_bytes)
        blocks = resolve_cache_blocks(given, capacity, rows * length)
        if config.cache.blocks is None and config.cache.bytes is None:
            blocks = min(blocks, _useful_blocks(config.cache, rows * length) * capacity.groups.total)
    snapshots = min(state_bytes // capacity.state_bytes, _USEFUL_SNAPSHOTS * rows)
    if config.cache.blocks is not None:
        _check_memory_holds(blocks, snapshots + drafts, rows, capacity)
    if caching and not snapshots:
        reason = "state_cache_fraction is 0"
        if fraction:
            reason = f"state_cache_fraction {fraction:g} has no room for a state of {capacity.state_bytes} bytes"
        log.warning("prefix caching is off, for there are no snapshots of states: %s", reason)
    host_blocks, host_snapshots = _host_sizes(config, capacity, snapshots > 0, fraction)
    return CacheSizes(
        blocks,
        snapshots,
        host_blocks,
        snapshots > 0,
        capacity.state_bytes,
        drafts,
        capacity.groups,
        host_snapshots,
    )


def _cache_bytes(config: EngineConfig, capacity: Capacity) -> int:
    """The bytes that the cache may have, where its blocks are not given."""
    cache = config.cache
    return int(capacity.free_bytes * cache.share_of_free(capacity.on_gpu)) if cache.bytes is None else cache.bytes


def _draft_states(config: EngineConfig, capacity: Capacity) -> int:
    """Slots for the states before the drafts of some rows, and for each row that from which it goes on."""
    if config.speculation is None:
        return 0
    rows, of_a_row = config.scheduler.max_num_seqs, config.most_drafts + 1
    room = _cache_bytes(config, capacity) // capacity.state_bytes - rows
    return max(min(min(rows, _DRAFTING_ROWS) * of_a_row, room // _DRAFT_SHARE), of_a_row)


def _check_memory_holds(blocks: int, extra_states: int, rows: int, capacity: Capacity) -> None:
    needed = (rows + extra_states) * capacity.state_bytes + blocks * capacity.block_bytes
    if needed > capacity.free_bytes:
        states = f"the states of {rows} sequences, {extra_states} more, and {blocks} blocks take {needed} bytes"
        message = f"no room for the cache: {states}, and {capacity.free_bytes} are free; lower max_num_seqs"
        raise InvalidArgument(f"{message} or kv_cache_blocks", field="max_num_seqs")


def _divide_bytes(config: EngineConfig, capacity: Capacity, fraction: float, drafts: int) -> tuple[int, int]:
    """The bytes for snapshots and for blocks."""
    states = config.scheduler.max_num_seqs + drafts
    total = _cache_bytes(config, capacity)
    left = total - states * capacity.state_bytes
    for_snapshots = int(left * fraction)
    if left - for_snapshots < capacity.block_bytes:
        needed = (
            f"the states of {config.scheduler.max_num_seqs} sequences take {states} times {capacity.state_bytes} bytes"
        )
        message = f"no room for the cache: {needed}, of {total} that it may have; lower max_num_seqs"
        raise InvalidArgument(message, field="max_num_seqs")
    return for_snapshots, left - for_snapshots


def _useful_blocks(cache: CacheConfig, useful_tokens: int) -> int:
    return _USEFUL_TIMES * useful_tokens // cache.block_size + 1


def resolve_cache_blocks(cache: CacheConfig, capacity: Capacity, useful_tokens: int) -> int:
    """The number of blocks to allocate, when all rows at full length hold `useful_tokens`.

    Raises:
        InvalidArgument: not even one fits.
    """
    if cache.blocks is not None:
        blocks = cache.blocks
    elif not capacity.block_bytes:
        blocks = min(_useful_blocks(cache, useful_tokens), _NUMBERED_BLOCKS)
    elif cache.bytes is not None:
        blocks = cache.bytes // capacity.block_bytes
    else:
        share = int(capacity.free_bytes * cache.share_of_free(capacity.on_gpu)) // capacity.block_bytes
        blocks = min(share, _useful_blocks(cache, useful_tokens) * capacity.groups.total)
    if blocks >= 1:
        return blocks
    block = f"no room for the cache: a block of {cache.block_size} tokens takes {capacity.block_bytes} bytes"
    if cache.bytes is not None:
        raise InvalidArgument(f"{block}, and kv_cache_bytes is {cache.bytes}", field="kv_cache_bytes")
    if capacity.on_gpu and cache.gpu_utilization is not None:
        field = "gpu_memory_utilization"
        left = f"{field} {cache.gpu_utilization:g} leaves {capacity.free_bytes}"
        raise InvalidArgument(f"{block}, and {left}", field=field)
    field = "kv_cache_memory_fraction"
    allowed = f"of {capacity.free_bytes} that are free it may have {field} {cache.share_of_free(capacity.on_gpu):g}"
    raise InvalidArgument(f"{block}, and {allowed}", field=field)


def _host_sizes(config: EngineConfig, capacity: Capacity, caching: bool, fraction: float) -> tuple[int, int]:
    """The number of blocks and of snapshots for which there is to be host memory; snapshots get this `fraction` of it.

    Raises:
        InvalidArgument: not even one fits, or without prefix caching none would ever be found.
    """
    room, field = config.cache.host_bytes, "kv_cache_host_bytes"
    if not room:
        return 0, 0
    if not caching:
        message = f"{field}: what is in the host's memory is found by prefix caching, which is off"
        raise InvalidArgument(message, field=field)
    ranks = config.parallel.world
    kinds = (
        (f"a block of {config.cache.block_size} tokens", capacity.block_bytes * ranks, room - int(room * fraction)),
        ("a state", capacity.state_bytes * ranks, int(room * fraction)),
    )
    for kind, size, share in kinds:
        if share < size:
            of = f", of which it gets {share}" if share < room else ""
            raise InvalidArgument(f"{kind} takes {size} bytes, and {field} is {room}{of}", field=field)
    blocks, snapshots = (share // size if size else 0 for _, size, share in kinds)
    return blocks, snapshots


def retention_budget(config: EngineConfig, sizes: CacheSizes, capacity: Capacity) -> RetentionBudget:
    """What sessions may retain of a cache of these sizes: the same share of its blocks and of its snapshots.

    Raises:
        InvalidArgument: it is not even a block, or nothing that is cached would be found again.
    """
    room, field = config.cache.retention_bytes, "kv_cache_retention_bytes"
    if not room:
        return NO_RETENTION
    if not sizes.prefix_caching:
        raise InvalidArgument(f"{field}: what is retained is found by prefix caching, which is off", field=field)
    ranks = config.parallel.world
    total = max((sizes.blocks * capacity.block_bytes + sizes.snapshots * capacity.state_bytes) * ranks, 1)
    blocks = sizes.blocks * min(room, total) // total
    if not blocks:
        size = capacity.block_bytes * ranks
        raise InvalidArgument(f"a block takes {size} bytes of the cache's {total}, and {field} is {room}", field=field)
    return RetentionBudget(blocks, sizes.snapshots * min(room, total) // total)
