"""Runs the batches of a store on the models of this server, beside the requests of clients and behind them.

Each request goes the way of one over HTTP (`api/http/internal_request.py`). A batch survives the server: its journals
say what is done, everything else runs again.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from types import MappingProxyType
from typing import Any

import msgspec

from ...api.api_keys import Tenant
from ...api.http.internal_request import InternalAnswer, ask_endpoint
from ...core.errors import NotFound, NotReady, RequestTimeout
from ...core.extension_contracts import EndpointFunction
from ...core.gateway import ModelLookup
from ...core.metrics import Measurement, Reading
from .input_lines import check_input
from .journal import LineOutcome, encode_outcome
from .records import BatchError, BatchRecord, BatchStatus, FilePurpose, StoredFile
from .running_batch import RunningBatch
from .store import FileStore, StorageFull, charged


class FairSlots:
    """`free` slots. One that becomes free goes to the tenant who holds the fewest of those who wait, and among that
    tenant's to the one that has waited longest."""

    def __init__(self, free: int) -> None:
        self.free = free
        self._held = Counter[str]()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._granting: asyncio.Handle | None = None

    async def acquire(self, tenant: str) -> None:
        if self.free and not self._waiting:
            self.free -= 1
            self._held[tenant] += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # granted in the same moment
                self.release(tenant)
            raise

    def release(self, tenant: str) -> None:
        self.free += 1
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        self._grant_soon()

    def _grant_soon(self) -> None:
        # One in a turn of the event loop: who got one may then wait for the next, and counts with it.
        if self._granting is None and self.free and self._waiting:
            self._granting = asyncio.get_running_loop().call_soon(self._grant)

    def _grant(self) -> None:
        self._granting = None
        tenant = min(self._waiting, key=self._held.__getitem__)
        queue = self._waiting[tenant]
        turn = queue.popleft()
        if not queue:
            del self._waiting[tenant]
        if not turn.done():
            self.free -= 1
            self._held[tenant] += 1
            turn.set_result(None)
        self._grant_soon()


log = logging.getLogger(__name__)

_SWEEP_SECONDS = 300.0
_DISK_SECONDS = 5.0
"""Pause before a record is written again that the disk refused."""

_MAX_LOSSES = 5
"""Engines that may end under a request before it is taken for the reason."""

_SUSPECT_LOSSES = 2
"""Engines that ended under a request before it runs without other suspects."""

_STREAM_ERROR = {"message": "stream can't be true in a batch", "type": "invalid_request_error", "param": "stream"}

_UNFINISHED = tuple(status.value for status in BatchStatus if not status.ended)


class BatchRunner:
    """The batches of `store` that have not ended, each a task. `concurrency`: requests under way in all. `endpoints`:
    by path, those that a batch may ask."""

    def __init__(
        self,
        store: FileStore,
        gateway: ModelLookup,
        concurrency: int,
        endpoints: Mapping[str, EndpointFunction] = MappingProxyType({}),
    ) -> None:
        self.store = store
        self._gateway = gateway
        self.endpoints = endpoints
        self._concurrency = concurrency
        self._slots = FairSlots(concurrency)
        self._checking = asyncio.Lock()
        self._saving = asyncio.Lock()
        self._alone = asyncio.Lock()
        self._batches: dict[str, RunningBatch] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._paused = True
        self._answers = {"completed": 0, "failed": 0, "repeated": 0}

    def measure(self) -> Iterator[Measurement]:
        """The readings of a scrape."""
        readings = [Reading("charonia_batch_requests_total", n, {"outcome": name}) for name, n in self._answers.items()]
        states = [batch.status.value for batch in self.store.unfinished.values()]
        gauges = [Reading("charonia_batches_unfinished", states.count(name), {"status": name}) for name in _UNFINISHED]
        files = Reading("charonia_files_bytes", self.store.used)
        yield Measurement({}, (*readings, *gauges, files))

    # Life

    def start(self) -> None:
        """Go on with every batch that has not ended, and sweep old files from now on."""
        self._paused = False
        for record in list(self.store.unfinished.values()):
            self.launch(record)
        self._spawn(self._sweep())

    async def pause(self) -> None:
        """Begin nothing more, and give up what is under way: it runs again when the server has started anew."""
        self._paused = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def launch(self, record: BatchRecord) -> None:
        """Run a batch from where it is, once the server runs batches."""
        if not self._paused:
            batch = self._batches[record.id] = RunningBatch(record, self.store, self._concurrency)
            self._spawn(self._run(batch))

    async def cancel(self, record: BatchRecord) -> None:
        """Ask for the end of a batch, which has not ended. Raises `StorageFull` if that cannot be kept now: it ends all
        the same, unless the server does before there is room."""
        if record.ends_as is None:
            record.ends_as = BatchStatus.CANCELLED
            self._note(record, BatchStatus.CANCELLING)
            batch = self._batches.get(record.id)
            if batch is not None:
                batch.stop.set()
            await self._save(record)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # One batch

    async def _run(self, batch: RunningBatch) -> None:
        record = batch.record
        try:
            await self._prepare(batch)
            if record.ends_as is None:
                await self._ask_all(batch)
        except StorageFull as error:
            self._fail(record, BatchError(error.openai_code or "storage_failed", error.message))
        except Exception as error:
            log.exception("batch %s cannot go on", record.id)
            self._fail(record, BatchError("server_error", f"the server could not go on with the batch: {error}"))
        try:
            await self._finish(batch)
        except Exception:
            log.exception("batch %s cannot be ended before the server starts anew", record.id)
        del self._batches[record.id]

    def _fail(self, record: BatchRecord, *errors: BatchError) -> None:
        record.ends_as = BatchStatus.FAILED
        record.errors = [*record.errors, *errors]

    async def _prepare(self, batch: RunningBatch) -> None:
        """Check the input file of a new batch; find out how far an old one came."""
        record = batch.record
        if record.total:
            self.store.unpublish(record)
            async with self._checking:
                try:
                    await self.store.in_thread(batch.recover)
                finally:
                    batch.charged = batch.output.size + batch.errors.size
                    self.store.count(record.tenant, batch.charged)
            return
        async with self._checking:
            most = self.store.limits.lines
            checked = await self.store.in_thread(check_input, batch.input, record.endpoint, most)
        errors = checked.errors
        if not errors:
            try:
                self._gateway.model_config(checked.model)
            except NotFound as error:
                errors = [BatchError("model_not_found", error.message, "body.model", 1)]
            except Exception:
                log.info("batch %s waits for model '%s'", record.id, checked.model)
        if record.ends_as is not None:  # cancelled meanwhile
            return
        if errors:
            self._fail(record, *errors)
        else:
            batch.begin(checked)
            await self._enter(record, BatchStatus.IN_PROGRESS)

    async def _ask_all(self, batch: RunningBatch) -> None:
        """Ask what is to be asked, until all is done, or the batch is cancelled or its time is over."""
        record = batch.record
        feeding = asyncio.create_task(self._feed(batch))
        stopping = asyncio.create_task(batch.stop.wait())
        left = max(0.0, record.expires_at - self.store.clock())
        try:
            await asyncio.wait({feeding, stopping}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if feeding.done():
                feeding.result()
                record.ends_as = record.ends_as or BatchStatus.COMPLETED
            elif record.ends_as is None:
                record.ends_as = BatchStatus.EXPIRED
        finally:
            tasks = [feeding, stopping, *batch.running]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _feed(self, batch: RunningBatch) -> None:
        """Begin one request after another; return when all are done. Raises why the batch cannot go on, if so."""
        loop = asyncio.get_running_loop()
        tenant = batch.record.tenant
        while True:
            if batch.failure is not None:
                raise batch.failure
            if len(batch.running) < batch.window:
                if (pause := batch.resume_at - loop.time()) > 0:
                    await asyncio.sleep(pause)
                await self._slots.acquire(tenant)
                if (index := batch.take_next()) is not None:
                    task = loop.create_task(self._ask(batch, index))
                    batch.running.add(task)
                    task.add_done_callback(batch.running.discard)
                    task.add_done_callback(lambda _: self._slots.release(tenant))
                    continue
                self._slots.release(tenant)
                if not batch.running:
                    return
            await asyncio.wait(batch.running, return_when=asyncio.FIRST_COMPLETED)

    async def _ask(self, batch: RunningBatch, index: int) -> None:
        """Ask one request, and keep the answer; or put it back, to be asked again."""
        try:
            line, streams = await self.store.in_thread(batch.read, index)
            if streams:
                body = msgspec.json.encode({"error": {**_STREAM_ERROR, "code": None}})
                outcome = LineOutcome(400, batch.record.id, body)
            else:
                suspect = batch.losses.get(index, 0) >= _SUSPECT_LOSSES
                async with self._alone if suspect else nullcontext():
                    ready = self._gateway.is_model_ready(batch.record.model or "")
                    answer = await self._ask_model(batch.record, bytes(line.body))
                if answer.status == 503 and (answer.begun or (ready and isinstance(answer.error, NotReady))):
                    batch.losses[index] = batch.losses.get(index, 0) + 1  # what computed it ended
                if _is_passing(answer, batch.losses.get(index, 0)):
                    self._answers["repeated"] += 1
                    busy = answer.status == 429
                    return batch.put_back(index, asyncio.get_running_loop().time(), wait=not busy)
                batch.note_answer()
                outcome = LineOutcome(answer.status, answer.request_id, answer.body, warning=answer.warning)
            text = encode_outcome(batch.record.id, index, line.custom_id, outcome)
            self.store.charge(batch.record.tenant, len(text))
            batch.charged += len(text)
            await self.store.in_thread(batch.write, index, text, outcome.succeeded)
            self._answers["completed" if outcome.succeeded else "failed"] += 1
            batch.count_answers()
        except Exception as error:
            batch.failure = error

    async def _ask_model(self, record: BatchRecord, body: bytes) -> InternalAnswer:
        tenant = Tenant(record.tenant, record.tenant_weight)
        return await ask_endpoint(self._gateway, self.endpoints[record.endpoint], record.endpoint, body, tenant)

    async def _finish(self, batch: RunningBatch) -> None:
        """Make the files whole, let them be seen, and end the batch as it is to end."""
        record = batch.record
        store = self.store
        assert record.ends_as is not None
        if record.status is BatchStatus.IN_PROGRESS:
            await self._enter(record, BatchStatus.FINALIZING)
        if record.total:
            if record.ends_as in (BatchStatus.CANCELLED, BatchStatus.EXPIRED):
                with suppress(StorageFull, OSError):  # then they are told of nowhere, but for the counts
                    await store.in_thread(batch.fill, record.ends_as)
            record.has_output = await self._publish(batch, record.output_id, "output")
            record.has_errors = await self._publish(batch, record.error_id, "error")
            batch.count_answers()
            store.count(record.tenant, -batch.charged)
        await self._enter(record, record.ends_as)
        done = record.completed
        total = record.total
        log.info("batch %s %s: %d of %d requests answered well", record.id, record.ends_as.value, done, total)

    async def _publish(self, batch: RunningBatch, file_id: str, kind: str) -> bool:
        """Let clients see a journal that is whole, as a file; False for one without a line."""
        record = batch.record
        store = self.store
        journal = batch.output if file_id == record.output_id else batch.errors
        await self._persist(partial(store.in_thread, journal.sync))
        if not journal.size:
            return False
        now = store.time_ns()
        file = StoredFile(
            id=file_id,
            tenant=record.tenant,
            purpose=FilePurpose.BATCH_OUTPUT,
            filename=f"{record.id}_{kind}.jsonl",
            size=journal.size,
            made=now,
            expires_at=now // 10**9 + record.output_seconds,
        )
        await self._persist(partial(store.in_thread, store.write_file, file))
        store.count(file.tenant, charged(file.size))
        store.add_file(file)
        return True

    async def _enter(self, record: BatchRecord, status: BatchStatus) -> None:
        self._note(record, status)
        await self._persist(partial(self._save, record))

    def _note(self, record: BatchRecord, status: BatchStatus) -> None:
        record.status = status
        record.times[status.value] = self.store.now()
        self.store.add_batch(record)

    async def _save(self, record: BatchRecord) -> None:
        """Write the record as it is when its turn comes. Raises `StorageFull`."""
        async with self._saving:
            await self.store.in_thread(self.store.write_batch, record.id, msgspec.json.encode(record))

    async def _persist(self, write: Callable[[], Awaitable[object]]) -> None:
        """Write what the state of a batch depends on, as often as it takes."""
        while True:
            try:
                await write()
                return
            except StorageFull as error:
                log.warning("a batch waits for the disk: %s", error.message)
                await asyncio.sleep(_DISK_SECONDS)

    # The end of what is old

    async def _sweep(self) -> None:
        store = self.store
        while True:
            files, batches = store.expired()
            for file in files:
                store.forget_file(file)
                await self._remove(partial(store.write_file_away, file.id))
            for batch in batches:
                store.forget_batch(batch)
                await self._remove(partial(store.write_batch_away, batch.id))
            await asyncio.sleep(_SWEEP_SECONDS)

    async def _remove(self, remove: Callable[[], None]) -> None:
        try:
            await self.store.in_thread(remove)
        except OSError as error:
            log.warning("what has expired could not be removed: %s", error)


def _is_passing(answer: InternalAnswer, losses: int) -> bool:
    """Whether another try may be answered: the queue is full, the model is loaded, or its engine was lost."""
    error = answer.error
    if isinstance(error, RequestTimeout):  # the time that the request itself gave
        return False
    if isinstance(error, NotFound):  # the model was there when the batch was checked
        return error.field == "model"
    return answer.status in (429, 503) and losses < _MAX_LOSSES
