"""The directory of an engine's cache: whose images are whose, and how many may be on their way."""

from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from ... import __version__
from ...core.errors import InvalidArgument
from ...kvcache.exchange.directory_tier import DirectoryTier
from ...kvcache.manager import KVCacheManager
from ...processes.private_directory import make_private_directory
from ...scheduler.scheduler import Scheduler
from ..config import DIRECTORY_BYTES, EngineConfig
from ..worker.executor import Capacity, Executor
from ..worker.image_files import ImageDirectorySettings
from .cache_events import CacheEventRecorder
from .cache_facts import cache_facts
from .cache_sizes import CacheSizes
from .inbox import Inbox
from .prefix_fetches import PrefixFetches

_LANDING_BYTES = 1 << 30
"""Images that are on their way, or have landed, have so many bytes of the host's memory at most, and half of what the
cache has."""


def check_cache_directory(config: EngineConfig) -> None:
    """Make the configured directory, if there is one; called before weights are read.

    Raises:
        InvalidArgument: it can't be made, others may write to it, or nothing would ever be found there.
    """
    cache = config.cache
    if cache.directory:
        if not cache.prefix_caching:
            message = "kv_cache_dir: what is in it is found by prefix caching, which is off"
            raise InvalidArgument(message, field="kv_cache_dir")
        make_private_directory(Path(cache.directory).expanduser(), "kv_cache_dir")
    elif cache.directory_bytes is not None:
        raise InvalidArgument("kv_cache_dir_bytes needs kv_cache_dir", field="kv_cache_dir_bytes")


class Landing(NamedTuple):
    """How many images of blocks, and of states, may be on their way at a time."""

    blocks: int = 0
    states: int = 0


def landing_sizes(config: EngineConfig, capacity: Capacity, sizes: CacheSizes) -> Landing:
    """Nothing without a directory; else room for one image of each kind at least."""
    if not config.cache.directory:
        return Landing()
    block_bytes = capacity.block_bytes * config.parallel.world
    room = min(_LANDING_BYTES, sizes.blocks * block_bytes // 2)
    blocks = room // block_bytes if block_bytes else sizes.blocks // 2
    states = _LANDING_BYTES // (capacity.state_bytes * config.parallel.world) if capacity.state_bytes else 0
    return Landing(max(blocks, 1), min(max(states, 1), max(sizes.snapshots // 2, 1)) if sizes.snapshots else 0)


def open_cache_directory(
    config: EngineConfig,
    capacity: Capacity,
    executor: Executor,
    cache: KVCacheManager,
    scheduler: Scheduler,
    inbox: Inbox,
    events: CacheEventRecorder | None,
) -> PrefixFetches | None:
    """What exchanges images with the configured directory, if there is one: from now on the cache notes what is to be
    written.

    Raises:
        InvalidArgument: it has no room for one image.
        CharoniaError, OSError: the checkpoint cannot be read.
    """
    own = config.cache
    if not own.directory or not cache.prefix_caching:
        return None
    most = DIRECTORY_BYTES if own.directory_bytes is None else own.directory_bytes
    for size, what in (
        (capacity.block_bytes, f"a block of {own.block_size} tokens"),
        (capacity.state_bytes, "a state"),
    ):
        if size >= most:
            message = f"{what} takes {size} bytes, and kv_cache_dir_bytes is {most}"
            raise InvalidArgument(message, field="kv_cache_dir_bytes")
    fingerprint = sha256(repr((__version__, cache_facts(config, capacity, executor))).encode()).digest()
    settings = ImageDirectorySettings(str(Path(own.directory).expanduser()), most, fingerprint)
    ranks = config.parallel.world
    shares = [settings.share(rank, ranks) for rank in range(ranks)]
    mover = executor.open_directory(settings)
    return PrefixFetches(DirectoryTier(cache), mover, shares, inbox.post, scheduler.step_times.prompt_seconds, events)
