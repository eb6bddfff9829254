"""Objects of buckets on disk, under a budget of bytes. Servers may share a directory.

    objects/   whole objects, named by a digest of where they come from and what they are
    partial/   those being read, see `download.py`
    trees/     of each server: directories of models, whose files are links to objects

An object that some tree links to is never removed.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from tempfile import mkdtemp
from time import time

from ...core.errors import DiskFull
from ...core.metrics import Measurement, Reading
from ...processes.private_directory import make_private_directory
from .download import PARTS, Download, ObjectFiles, WantedObject
from .stores import ObjectStore


class CacheFull(DiskFull):
    """What is to be kept is more than the budget has room for beside what is in use."""


class CacheTotals:
    """Bytes: what one server's cache has read and removed since its start, and what the directory holds."""

    def __init__(self) -> None:
        self.downloaded_bytes = self.evicted_bytes = self.held_bytes = 0


class ObjectCache:
    """The cache in `directory`, which may hold `budget` bytes; None is what the disk has.

    Raises:
        InvalidArgument: the directory cannot be made, or somebody else may write to it.
    """

    def __init__(self, directory: Path, budget: int | None = None) -> None:
        make_private_directory(directory, "model_cache_dir")
        self.directory, self._budget = directory, budget
        self.files = ObjectFiles(directory)
        trees = directory / "trees"
        trees.mkdir(mode=0o700, exist_ok=True)
        self.totals = CacheTotals()
        self._numbers = count()
        with self._locked():
            _remove_abandoned(trees)
            self._own = Path(mkdtemp(dir=trees))
            self._lock = os.open(self._own, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.totals.held_bytes = self._held()

    def close(self) -> None:
        """Give up what this server uses, and what it reads."""
        if not self.files.closing.is_set():
            self.files.closing.set()
            shutil.rmtree(self._own, ignore_errors=True)
            os.close(self._lock)

    def new_tree(self) -> Path:
        """A new directory, for files that are in use until it is removed."""
        tree = self._own / str(next(self._numbers))
        tree.mkdir()
        return tree

    def provide(self, store: ObjectStore, wanted: Sequence[WantedObject], on_bytes: Callable[[int, int], None]) -> int:
        """Put every object at its path, in a directory of `new_tree`; the bytes that were read from the store for it.
        `on_bytes` is told, by several threads, how many of how many there are.

        Raises:
            CacheFull: the budget has no room for them beside what is in use; nothing was read.
            ObjectChanged, StoreUnavailable, StoreRefused: see `ObjectStore.read`.
        """
        missing = [wanted_object for wanted_object in wanted if not self._link(store, wanted_object)]
        if not missing:
            return 0
        with self._locked():
            missing = [wanted_object for wanted_object in missing if not self._link(store, wanted_object)]
            self._make_room(store, missing)
        download = Download(self.files, store, sum(wanted_object.stored.size for wanted_object in missing), on_bytes)
        download.run(missing)
        self.totals.downloaded_bytes += download.read_bytes
        self.totals.held_bytes = self._held()
        return download.read_bytes

    def measure(self) -> Measurement:
        totals = self.totals
        readings = (
            Reading("charonia_model_cache_bytes", totals.held_bytes),
            Reading("charonia_model_cache_downloaded_bytes_total", totals.downloaded_bytes),
            Reading("charonia_model_cache_evicted_bytes_total", totals.evicted_bytes),
        )
        return Measurement({}, readings)

    def _link(self, store: ObjectStore, wanted: WantedObject) -> bool:
        """Whether the object is here, and at its path now."""
        wanted.path.parent.mkdir(parents=True, exist_ok=True)
        if not wanted.stored.size:
            wanted.path.touch()
            os.utime(wanted.path, (wanted.stored.modified, wanted.stored.modified))
            return True
        entry = self.files.entry(store, wanted.stored)
        try:
            os.link(entry, wanted.path)
        except FileNotFoundError:
            return False
        except FileExistsError:
            return True
        os.utime(entry, (time(), wanted.stored.modified))
        return True

    def _make_room(self, store: ObjectStore, missing: Sequence[WantedObject]) -> None:
        """Reserve the missing objects' bytes, and remove for it what was not used for longest."""
        partials = {
            self.files.partial(store, wanted_object.stored): wanted_object.stored.size for wanted_object in missing
        }
        needed = sum(size for path, size in partials.items() if not path.exists())
        removable = sorted(self._unused(partials.keys()), key=lambda entry: entry[1].st_atime)
        held, free = self._held(), shutil.disk_usage(self.directory).free
        left = free if self._budget is None else min(free, self._budget - held)
        if needed > left + sum(stat.st_size for _, stat in removable):
            limit = "the disk has room for" if self._budget is None else f"of {self._budget} bytes are left"
            room = left + sum(stat.st_size for _, stat in removable)
            message = f"{store.location.url}: {needed} bytes are to be read, and {max(room, 0)} {limit} in the cache "
            raise CacheFull(f"{message}{self.directory}, beside what models use: raise --model-cache-bytes")
        for path, stat in removable:
            if needed <= left:
                break
            if _remove_unused(path):
                left += stat.st_size
                self.totals.evicted_bytes += stat.st_size
        for path, size in partials.items():
            with path.open("ab") as file:
                file.truncate(size)
            path.chmod(0o600)

    def _unused(self, wanted: Collection[Path]) -> Iterator[tuple[Path, os.stat_result]]:
        """Files that no tree has; none of those `wanted`."""
        for path in self.files:
            if path not in wanted and path.suffix != PARTS:
                with suppress(OSError):
                    if (stat := path.stat()).st_nlink == 1:
                        yield path, stat

    def _held(self) -> int:
        held = 0
        for path in self.files:
            with suppress(OSError):
                held += path.stat().st_size
        return held

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Alone among all servers of this directory."""
        with (self.directory / ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _remove_unused(path: Path) -> bool:
    """Remove a file, unless somebody reads it, or uses it by now."""
    with suppress(OSError), path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file.fileno()).st_nlink == 1:
            path.unlink()
            path.with_suffix(PARTS).unlink(missing_ok=True)
            return True
    return False


def _remove_abandoned(trees: Path) -> None:
    """Remove the trees of servers that are gone: what they linked is in use no more."""
    for tree in trees.iterdir():
        with suppress(OSError):
            descriptor = os.open(tree, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(tree, ignore_errors=True)
            finally:
                os.close(descriptor)
