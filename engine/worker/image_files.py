"""A rank's images in a directory: read and written by threads beside the steps. A hung file system holds up these
threads alone. Imports no torch."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ...core.metrics import ImageTotals
from ...kvcache.exchange.directory_tier import DroppedImages
from ...kvcache.exchange.image_directory import ImageDirectory, ReadOutcome, share_name
from ...kvcache.tiers.landed_images import ImagePlace
from ...processes.daemon_threads import DaemonThreads
from ...processes.host import lower_thread_priority

log = logging.getLogger(__name__)

_READERS, _WRITERS = 4, 1
_MOST_UNWRITTEN_BYTES = 256 << 20
"""Images that wait to be written have so many bytes at most; more are not written."""
_CLOSE_SECONDS = 2.0
"""How long a rank that ends may write what waits."""


class ImageDirectorySettings(NamedTuple):
    """The directory of an engine: its path, the bytes that all files in it may have, and what tells this engine's
    images from others'."""

    path: str
    budget: int
    fingerprint: bytes

    def share(self, rank: int, ranks: int) -> ImageDirectory:
        """The part of one rank."""
        return ImageDirectory(Path(self.path), share_name(self.fingerprint, rank, ranks), self.budget)


class ImageMover(Protocol):
    """Moves images between the directory and all ranks; for the step loop's thread, which waits for nothing."""

    def fetch(self, images: Sequence[ImagePlace]) -> Future[list[bool]]:
        """Let these images land; which of them have, on every rank. Once one has not, later ones may not be tried."""

    def store(self, images: Sequence[ImagePlace]) -> Future[list[bool]]:
        """Write the images of these places, as they are before the next plan is executed; which of them lie in the
        directory then, of every rank."""

    def drop(self, dropped: DroppedImages) -> None:
        """Forget landed images, none of which is being fetched."""

    @property
    def totals(self) -> ImageTotals: ...


class TakenImage(Protocol):
    """An image that has been taken from a place; any thread may read it."""

    def read(self) -> Any: ...


class Images(Protocol):
    """The images of a rank's blocks, or of its snapshots: see `PlaceImages`."""

    bytes: int
    landed: dict[int, Any]

    @property
    def layout(self) -> str: ...

    def take(self, place: int) -> TakenImage: ...

    def make(self) -> Any:
        """Memory for an image, whose `numpy()` is to be filled."""

    def put(self, image: Any, place: int) -> None: ...


class _ReadingFetch:
    """Images that several threads read."""

    def __init__(self, images: Sequence[ImagePlace], readers: int) -> None:
        self.images = images
        self.arrived = [False] * len(images)
        self.future: Future[list[bool]] = Future()
        self._next = 0
        self._readers = readers
        self._lock = threading.Lock()

    def take(self) -> int | None:
        """The index of an image to read; None: there is none, or reading on is of no use."""
        with self._lock:
            index, self._next = self._next, self._next + 1
        return index if index < len(self.images) else None

    def give_up(self) -> None:
        with self._lock:
            self._next = len(self.images)

    def finish_reader(self) -> None:
        with self._lock:
            self._readers -= 1
            is_last = not self._readers
        if is_last:
            self.future.set_result(self.arrived)


class _Store:
    """Images that wait to be written."""

    def __init__(self, images: int) -> None:
        self.written = [False] * images
        self.future: Future[list[bool]] = Future()
        self._waiting = images
        self._lock = threading.Lock()

    def finish(self, index: int, is_written: bool) -> None:
        with self._lock:
            self.written[index] = is_written
            self._waiting -= 1
            is_last = not self._waiting
        if is_last:
            self.future.set_result(self.written)


class RankImages:
    """The images of one rank in its `directory`: an `ImageMover` where there is no other rank. `blocks` or `states`:
    None where the rank keeps nothing of the kind; then their images are empty."""

    def __init__(self, directory: ImageDirectory, blocks: Images | None, states: Images | None) -> None:
        self._directory = directory
        self._images = blocks, states
        self._totals = ImageTotals()
        self._lock = threading.Lock()
        self._unwritten_bytes = 0
        self._write_failed = False
        self._reading = DaemonThreads("image-reader", _READERS)
        self._writing = DaemonThreads("image-writer", _WRITERS, lower_thread_priority)

    @property
    def totals(self) -> ImageTotals:
        with self._lock:
            self._totals.evicted = self._directory.evicted
            copied = ImageTotals()
            copied.add(self._totals)
        return copied

    def fetch(self, images: Sequence[ImagePlace]) -> Future[list[bool]]:
        readers = max(min(_READERS, len(images)), 1)
        fetch = _ReadingFetch(images, readers)
        for _ in range(readers):
            self._reading.start(partial(self._read_some, fetch))
        return fetch.future

    def _read_some(self, fetch: _ReadingFetch) -> None:
        try:
            while (index := fetch.take()) is not None:
                fetch.arrived[index] = self._read(fetch.images[index])
                if not fetch.arrived[index]:
                    fetch.give_up()
        finally:
            fetch.finish_reader()

    def _read(self, image: ImagePlace) -> bool:
        began = time.perf_counter()
        images = self._images[image.of_state]
        size = 0 if images is None else images.bytes
        memory = None if images is None else images.make()
        into = memoryview(bytearray() if memory is None else memory.numpy())
        outcome = self._directory.read(image.key, into)
        is_read = outcome is ReadOutcome.READ
        if is_read and images is not None:
            images.landed[image.number] = memory
        with self._lock:
            totals = self._totals
            totals.read += is_read
            totals.missing += outcome is ReadOutcome.MISSING
            totals.damaged += outcome is ReadOutcome.DAMAGED
            totals.read_failures += outcome is ReadOutcome.FAILED
            totals.read_bytes += size * is_read
            totals.read_seconds += time.perf_counter() - began
        return is_read

    def store(self, images: Sequence[ImagePlace]) -> Future[list[bool]]:
        """See `ImageMover.store`; for the thread that computes."""
        store = _Store(len(images))
        for index, image in enumerate(images):
            own = self._images[image.of_state]
            size = 0 if own is None else own.bytes
            with self._lock:
                fits = self._unwritten_bytes + size <= _MOST_UNWRITTEN_BYTES
                self._unwritten_bytes += size * fits
                self._totals.unwritten += not fits
            if fits:
                taken = None if own is None else own.take(image.number)
                self._writing.start(partial(self._write, image.key, taken, size, partial(store.finish, index)))
            else:
                store.finish(index, False)
        return store.future

    def _write(self, key: bytes, taken: TakenImage | None, size: int, finish: Callable[[bool], None]) -> None:
        began = time.perf_counter()
        written = False
        failed = True
        try:
            written = self._directory.write(key, memoryview(b"" if taken is None else taken.read()))
            failed = self._write_failed = False
        except OSError as error:
            if not self._write_failed:
                log.warning("kv_cache_dir: blocks are not written: %s", error)
            self._write_failed = True
        finally:
            with self._lock:
                self._unwritten_bytes -= size
                self._totals.written += written
                self._totals.written_bytes += size * written
                self._totals.write_failures += failed
                self._totals.write_seconds += time.perf_counter() - began
            finish(not failed)

    def drop(self, dropped: DroppedImages) -> None:
        for images, numbers in zip(self._images, dropped, strict=True):
            if images is not None:
                for number in numbers:
                    images.landed.pop(number, None)  # some may never have come

    def close(self) -> None:
        """Write what waits, for some seconds at most; then threads end, or are left behind."""
        self._writing.close(_CLOSE_SECONDS)
        self._reading.close()
