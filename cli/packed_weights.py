"""`charonia cache`: the packed weights that a directory keeps."""

import time
from pathlib import Path

from ..core.errors import InvalidArgument
from ..engine.checkpoint.packing_cache import PackingCache, is_whole


def print_packed_weights(directory: Path, *, clear: bool, verify: bool) -> int:
    """Print a line for each file, the one used last first; the status is 1 if one that was verified is damaged.

    Raises:
        InvalidArgument: there is no such directory.
    """
    if not directory.is_dir():
        raise InvalidArgument(f"{directory}: there is no such directory")
    cache = PackingCache(directory, 0)
    status = 0
    entries = cache.entries()
    for entry in entries:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        whole = not verify or _is_whole(entry.path)
        status = status if whole else 1
        print(f"{entry.bytes / 1e6:10,.1f} MB  used {used}  {entry.about}{'' if whole else '  DAMAGED'}")
    total = f"{len(entries)} packed checkpoints, {sum(entry.bytes for entry in entries) / 1e6:,.1f} MB"
    if clear:
        cache.clear()
    print(f"removed {total}" if clear else total)
    return status


def _is_whole(path: Path) -> bool:
    try:
        return is_whole(path)
    except (OSError, ValueError):
        return False
