"""Makes of the media of requests what an encoder takes: a queue, processes that may be killed, and a cache.

Knows nothing of encoders and prompts.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256

from msgspec.structs import replace

from ..core.errors import InvalidArgument, NotReady, QueueFull, Unavailable
from ..core.media import EMBEDS, MediaKind, MediaSource, PreparedMedium, plural_nouns
from ..core.media_models import MediaFacts
from ..core.metrics import Reading
from ..core.request_context import RequestContext
from ..processes.patient_work import patient_work
from .encoded_file import blank_image, grid_of_places, read_rows
from .limits import MediaLimits
from .prepared_cache import PreparedCache
from .preparing_worker import PreparingWorker
from .sources import MediaFiles

_GRACE = 0.5
"""Seconds that a process has to end what nobody waits for any more."""
_RETRY_AFTER = 1.0
_LARGE = 1 << 18
"""Bytes of a file whose hash is computed in a thread."""


@dataclass(slots=True)
class _Preparation:
    """A medium that is being prepared, for all requests that have it."""

    task: "asyncio.Task[PreparedMedium]"
    waiters: int = 0


@dataclass(slots=True)
class _Job:
    """One call of a worker, in a thread."""

    source: MediaSource
    data: bytes
    digest: bytes
    worker: PreparingWorker | None = None
    abandoned: bool = False

    def abandon(self) -> None:
        """End it, since nobody waits for it."""
        self.abandoned = True
        if self.worker is not None:
            self.worker.kill()


class MediaReader:
    """Prepares the media of one model's requests, in one event loop, from `load` to `unload`: a `MediaPreparer`. Raises
    as `MediaFiles` does.

    Media of one content that are wanted at the same time are prepared once. Those of different tenants are different,
    unless they share: neither a digest nor the time tells what others have sent.
    """

    def __init__(
        self,
        checkpoint: str,
        limits: MediaLimits,
        files: MediaFiles | None = None,
        kinds: tuple[MediaKind, ...] = ("image",),
    ) -> None:
        config = limits.config
        self._kinds = kinds
        self._patient = "image" in kinds  # as the processes of a `PreparingWorker`
        self._checkpoint, self._limits, self._files = checkpoint, limits, files or MediaFiles(limits)
        self._threads = ThreadPoolExecutor(config.processes, "media-prepare")
        self._places = asyncio.Semaphore(config.processes)
        self._running: set[PreparingWorker] = set()
        self._idle: list[PreparingWorker] = []
        self._under_way: dict[bytes, _Preparation] = {}
        self._cache = PreparedCache(config.cache_bytes)
        self._outcomes = {"prepared": 0, "cached": 0, "refused": 0}
        self._seconds = 0.0
        self._facts: Mapping[MediaKind, MediaFacts] = {}
        self._closed = False
        self.waiting = 0
        """Media that are fetched, or wait to be prepared."""

    @property
    def facts(self) -> Mapping[MediaKind, MediaFacts]:
        """What is known of the checkpoint's processors, once they have started."""
        if not self._facts:
            raise NotReady(f"{plural_nouns(self._kinds)} cannot be prepared yet")
        return self._facts

    @property
    def processes(self) -> int:
        """How many processes run."""
        return len(self._running)

    async def load(self) -> None:
        """Return when media can be prepared. Raises `InvalidArgument` for a checkpoint whose media can't be, and
        `Unavailable`."""
        try:
            with patient_work.pending(self._patient):
                self._facts = await asyncio.get_running_loop().run_in_executor(self._threads, self._start_first)
        except BaseException:
            await self.unload()
            raise

    def check(self, media: Sequence[MediaSource]) -> None:
        """Raises for the media of a prompt together `InvalidArgument`, if there are more than it may have, and
        `QueueFull`, if too many wait already."""
        self._limits.check_count(media)
        if media and self.waiting + len(media) > self._limits.max_waiting:
            self._outcomes["refused"] += len(media)
            message = f"{self.waiting} {plural_nouns(self._kinds)} wait to be prepared already"
            raise QueueFull(message, retry_after=_RETRY_AFTER)

    async def prepare(self, medium: MediaSource, context: RequestContext) -> PreparedMedium:
        """The prepared medium. Raises `InvalidArgument` by its field if it cannot be had, is broken or costs too much,
        `QueueFull` as `check` does, and `Unavailable` while the model is being unloaded."""
        if self._closed:
            raise Unavailable("the model is being unloaded")
        self.check((medium,))
        salt = b"" if self._limits.config.share_cache else context.tenant.encode()
        if medium.uuid and not (medium.data or medium.url):
            return self._named(medium, salt)
        began = time.monotonic()
        try:
            return await self._prepare(medium, salt)
        finally:
            self._seconds += time.monotonic() - began

    async def _prepare(self, medium: MediaSource, salt: bytes) -> PreparedMedium:
        self.waiting += 1
        try:
            data = await self._files.read(medium)
            settings = self.facts[medium.kind].settings + medium.options.encode()
            if medium.encoded:
                settings += repr(medium.grid).encode()
            parts = (settings, len(salt).to_bytes(4, "little"), salt, data)
            digest = await asyncio.to_thread(_hash, parts) if len(data) > _LARGE else _hash(parts)
        finally:
            self.waiting -= 1
        prepared = self._cache.get(digest)
        if prepared is not None:
            self._outcomes["cached"] += 1
        elif medium.encoded:
            self.waiting += 1
            try:
                encoded, grid = await asyncio.to_thread(_encoded_medium, medium, self.facts[medium.kind], digest, data)
            finally:
                self.waiting -= 1
            known = self.facts[medium.kind].patch and any(grid)
            text = await self._text_of_grid(medium, encoded, grid) if known else encoded.placeholder
            prepared = replace(encoded, placeholder=text)
            self._outcomes["prepared"] += 1
            self._cache.put(prepared)
        else:
            prepared = await self._share(digest, medium, data)
        if medium.uuid:
            self._cache.name(salt, medium, digest)
        return prepared

    async def _text_of_grid(self, source: MediaSource, encoded: PreparedMedium, grid: tuple[int, int, int]) -> str:
        """What the processor puts in place of an image of this size, with other texts between the rows; empty if it has
        places for another number of them. Raises `InvalidArgument` for a grid of no image that is taken."""
        facts, most = self.facts[source.kind], self._limits.config.max_pixels
        frames, height, width = grid
        if frames != 1 or min(grid) < 1 or height * width * facts.patch**2 > most:
            message = f"image_grid_thw {list(grid)} is none of an image of at most {most:,} pixels"
            raise InvalidArgument(f"{source.field}: {message}", field=source.field)
        blank = await asyncio.to_thread(blank_image, width * facts.patch, height * facts.patch)
        text = (await self._share(_hash((facts.settings, blank)), source, blank)).placeholder
        return text if text.count(facts.token) == len(encoded.inputs[EMBEDS]) else ""

    def _named(self, source: MediaSource, salt: bytes) -> PreparedMedium:
        medium = self._cache.named(salt, source)
        if medium is None or medium.kind != source.kind:
            message = f"there is no {source.kind} with uuid {source.uuid!r} here (any more): send it whole"
            raise InvalidArgument(f"{source.field}: {message}", field=source.field)
        self._outcomes["cached"] += 1
        return medium

    async def _share(self, digest: bytes, source: MediaSource, data: bytes) -> PreparedMedium:
        """The medium, from whoever prepares it already."""
        preparation = self._under_way.get(digest)
        if preparation is None:
            job = _Job(source, data, digest)
            preparation = self._under_way[digest] = _Preparation(asyncio.create_task(self._queue(job)))
        preparation.waiters += 1
        try:
            return await asyncio.shield(preparation.task)
        except InvalidArgument as error:
            if error.field is not None:  # not the medium, but what the request says about it
                raise
            raise InvalidArgument(f"{source.field}: {error.message}", field=source.field) from error
        finally:
            preparation.waiters -= 1
            if not preparation.waiters:
                preparation.task.cancel()
                if self._under_way.get(digest) is preparation:
                    del self._under_way[digest]

    async def _queue(self, job: _Job) -> PreparedMedium:
        """Do a job when its turn comes."""
        self.waiting += 1
        try:
            await self._places.acquire()
        finally:
            self.waiting -= 1
        loop = asyncio.get_running_loop()
        try:
            call = loop.run_in_executor(self._threads, self._run, job)
        except RuntimeError as error:
            self._places.release()
            raise Unavailable("the model is being unloaded") from error
        call.add_done_callback(self._release)
        try:
            with patient_work.pending(self._patient):
                medium = await asyncio.shield(call)
        except asyncio.CancelledError:
            loop.call_later(_GRACE, job.abandon)
            raise
        self._outcomes["prepared"] += 1
        self._cache.put(medium)
        return medium

    def _release(self, call: "asyncio.Future[PreparedMedium]") -> None:
        self._places.release()
        if not call.cancelled():
            call.exception()  # nobody may wait for it any more

    def _start_first(self) -> Mapping[MediaKind, MediaFacts]:
        worker = self._started()
        try:
            facts = worker.facts()
        except BaseException:
            self._end(worker)
            raise
        self._idle.append(worker)
        return facts

    def _started(self) -> PreparingWorker:
        """A new worker; in a thread."""
        is_first = not any(worker.alive for worker in list(self._running))
        worker = PreparingWorker(self._checkpoint, self._limits, self._kinds, is_first)
        self._running.add(worker)
        if self._closed:  # meanwhile
            worker.kill()
        return worker

    def _run(self, job: _Job) -> PreparedMedium:
        """Do a job; in a thread, of which there are as many as workers."""
        self._check_wanted(job)
        try:
            worker = self._idle.pop()  # not asked first: another thread may take the last one in between
        except IndexError:
            worker = self._started()
            try:
                worker.facts()
            except BaseException:
                self._end(worker)
                raise
        job.worker = worker
        try:
            return worker.prepare(job.source.kind, job.data, job.digest, job.source.options)
        except InvalidArgument:
            if not worker.alive:
                self._check_wanted(job)
            raise
        finally:
            job.worker = None
            if worker.alive and not (job.abandoned or self._closed):
                self._idle.append(worker)
            else:
                self._end(worker)

    def _check_wanted(self, job: _Job) -> None:
        if self._closed or job.abandoned:
            raise Unavailable("the model is being unloaded")

    def _end(self, worker: PreparingWorker) -> None:
        worker.close()
        self._running.discard(worker)

    def readings(self) -> Iterator[Reading]:
        """The reader's series, for a scrape."""
        yield Reading("charonia_media_waiting", self.waiting)
        yield Reading("charonia_media_seconds_total", self._seconds)
        yield Reading("charonia_media_cache_bytes", self._cache.bytes)
        for outcome, count in self._outcomes.items():
            yield Reading("charonia_media_total", count, {"outcome": outcome})

    async def unload(self) -> None:
        """End all processes; whoever waits gets an error. May be called again."""
        self._closed = True
        for worker in list(self._running):
            worker.kill()
        await asyncio.to_thread(self._threads.shutdown)
        while self._idle:
            self._end(self._idle.pop())
        self._files.close()
        self._cache.clear()


def _encoded_medium(
    source: MediaSource, facts: MediaFacts, digest: bytes, data: bytes
) -> tuple[PreparedMedium, tuple[int, int, int]]:
    """What was encoded elsewhere, as it stands in a prompt, and its grid. Raises `InvalidArgument` by the source's
    field."""
    try:
        rows, grid = read_rows(data, source.width)
        grid = source.grid if any(source.grid) else grid
        if any(grid) and not facts.patch:
            grid = grid_of_places(grid, len(rows))
        elif facts.gridded:
            raise InvalidArgument("it needs image_grid_thw, for places of this model's images have three positions")
    except InvalidArgument as error:
        raise InvalidArgument(f"{source.field}: {error.message}", field=source.field) from error
    begin, row, end = facts.row_text or ("", "", "")
    placeholder = begin + row * len(rows) + end
    medium = PreparedMedium(source.kind, digest, placeholder, {EMBEDS: rows}, grid if facts.gridded else (0, 0, 0))
    return medium, grid


def _hash(parts: Sequence[bytes]) -> bytes:
    return sha256(b"".join(parts[:-1]) + sha256(parts[-1]).digest()).digest()
