"""Sends the requests of a load to a server, in an open or a closed loop, and takes their times.

Knows nothing of endpoints: a `RequestSender` sends. Latencies count from the moment when a request was due, even if the
generator was late: a slow server would otherwise slow its own examination.
"""

import asyncio
from collections.abc import Iterator, Sequence
from time import perf_counter

import msgspec

from .endpoints import OK, RequestResult, RequestSender
from .plan import PlannedRequest, Prompt, Prompts


class LoadRecord(msgspec.Struct, kw_only=True):
    """One request and what came of it; all times in seconds after the start of the load.

    `times` are those at which tokens came, `tokens` and `prompt_tokens` as the server counted them, where it did.
    """

    index: int
    due: float
    sent: float
    ended: float
    status: str
    times: list[float]
    tokens: int
    prompt_tokens: int
    frames: int
    size: int


class LoopMode(msgspec.Struct, frozen=True, kw_only=True):
    """`concurrency` requests at a time, or each when it is due (0); closed loops begin none after `duration`.
    `timeout`: seconds a request may take."""

    concurrency: int = 0
    duration: float | None = None
    timeout: float = 600.0


class LoadCounters:
    """The requests so far, for a progress display."""

    def __init__(self) -> None:
        self.sent = self.done = self.failed = self.tokens = 0


class LoadDriver:
    """Runs jobs through a caller; `start` is the moment in `perf_counter` seconds that everything counts from."""

    def __init__(self, caller: RequestSender, prompts: Prompts, pace: LoopMode, start: float) -> None:
        self._caller, self._prompts, self._pace, self._start = caller, prompts, pace, start
        self.tally = LoadCounters()
        self.records: list[LoadRecord] = []

    async def run(self, jobs: Sequence[PlannedRequest]) -> None:
        """Return when every request has ended."""
        await self._until(0.0)
        await (self._closed(jobs) if self._pace.concurrency else self._open(jobs))

    async def _open(self, jobs: Sequence[PlannedRequest]) -> None:
        async with asyncio.TaskGroup() as requests:
            for job in jobs:
                await self._until(job.due)
                requests.create_task(self._request(job, job.due))

    async def _closed(self, jobs: Sequence[PlannedRequest]) -> None:
        remaining = iter(jobs)
        async with asyncio.TaskGroup() as slots:
            for _ in range(self._pace.concurrency):
                slots.create_task(self._slot(remaining))

    async def _slot(self, remaining: Iterator[PlannedRequest]) -> None:
        while self._pace.duration is None or self._now() < self._pace.duration:
            job = next(remaining, None)
            if job is None:
                return
            await self._request(job, self._now())

    async def _request(self, job: PlannedRequest, due: float) -> None:
        prompt, sent = self._prompts.write(job), self._now()
        self.tally.sent += 1
        heard = await self._ask(prompt, job.new)
        record = self._record(job, heard, due, sent)
        self.records.append(record)
        self.tally.done += 1
        self.tally.failed += record.status != OK
        self.tally.tokens += max(0, record.tokens)

    async def _ask(self, prompt: Prompt, new: int) -> RequestResult:
        try:
            async with asyncio.timeout(self._pace.timeout):
                return await self._caller.send(prompt, new)
        except TimeoutError:
            return RequestResult(status="timeout")
        except OSError as error:
            return RequestResult(status=f"connection: {error.strerror or error}"[:80])

    def _record(self, job: PlannedRequest, heard: RequestResult, due: float, sent: float) -> LoadRecord:
        # Where the server was not asked to count, eos was to be ignored: then a good end is a full one.
        tokens = job.new if heard.tokens < 0 and heard.status == OK else heard.tokens
        return LoadRecord(
            index=job.index,
            due=due,
            sent=sent,
            ended=self._now(),
            status=heard.status,
            times=[at - self._start for at in heard.times],
            tokens=max(0, tokens),
            prompt_tokens=heard.prompt_tokens if heard.prompt_tokens >= 0 else job.prompt,
            frames=heard.frames,
            size=heard.size,
        )

    async def _until(self, due: float) -> None:
        # A loop's timers may go off a little early.
        while (left := due - self._now()) > 0:  # noqa: ASYNC110 - time is no event
            await asyncio.sleep(left)

    def _now(self) -> float:
        return perf_counter() - self._start
