"""Windows of sounds whose tokens wait for their times, several in one execution of a tower: those that come while
others are computed go together."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from ...core.errors import Unavailable
from ...core.media import ALIGNED_ROWS, ALIGNED_SPANS, ALIGNED_TOKENS
from ...core.media_models import AlignedWindow
from ...core.metrics import Reading
from ...core.request_context import RequestContext
from ...core.runtime import Arrays

_TOGETHER = 8
"""Windows of an execution."""

ComputeAlignments: TypeAlias = Callable[[Arrays, RequestContext], Awaitable[bytes]]
"""Makes of the inputs of windows int32 [windows, longest]: the rows at which the tokens behind each prompt begin, and
whatever behind those."""


class _WaitingWindow(NamedTuple):
    window: AlignedWindow
    context: RequestContext
    rows: "asyncio.Future[Sequence[int]]"


class WindowAligner:
    """Lives in one event loop; one execution at a time."""

    def __init__(self, compute: ComputeAlignments) -> None:
        self._compute = compute
        self._waiting = deque[_WaitingWindow]()
        self._batch: Sequence[_WaitingWindow] = ()
        self._execution: asyncio.Task[bytes] | None = None
        self._runner: asyncio.Task[None] | None = None
        self._windows = self._batches = 0
        self._seconds = 0.0

    async def align(self, window: AlignedWindow, context: RequestContext) -> Sequence[int]:
        """See `MediaEncoder.align`."""
        waiting = _WaitingWindow(window, context, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._runner is None:
            self._runner = asyncio.create_task(self._run())
        try:
            return await waiting.rows
        finally:
            if self._execution is not None and all(entry.rows.cancelled() for entry in self._batch):
                self._execution.cancel()

    async def close(self) -> None:
        """End what is computed; those that wait get `Unavailable`."""
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.gather(self._runner, return_exceptions=True)

    async def _run(self) -> None:
        try:
            while batch := self._next_batch():
                self._batch = batch
                try:
                    await self._execute(batch)
                except Exception as error:
                    for entry in batch:
                        if not entry.rows.done():
                            entry.rows.set_exception(error)
        finally:
            self._runner = None
            for entry in (*self._batch, *self._waiting):
                if not entry.rows.done():
                    entry.rows.set_exception(Unavailable("the model is being unloaded"))
            self._batch = ()
            self._waiting.clear()

    def _next_batch(self) -> Sequence[_WaitingWindow]:
        """Those that have waited longest, but for those that nobody waits for any more."""
        batch: list[_WaitingWindow] = []
        while self._waiting and len(batch) < _TOGETHER:
            entry = self._waiting.popleft()
            if not entry.rows.done():
                batch.append(entry)
        return batch

    async def _execute(self, batch: Sequence[_WaitingWindow]) -> None:
        began = time.monotonic()
        inputs = _inputs_of([entry.window for entry in batch])
        execution = self._execution = asyncio.ensure_future(self._compute(inputs, batch[0].context))
        try:
            await asyncio.wait([execution])
        finally:
            execution.cancel()
            self._execution = None
        if execution.cancelled():  # nobody waits any more
            return
        begins = np.frombuffer(execution.result(), np.int32).reshape(len(batch), -1)
        for entry, rows in zip(batch, begins.tolist(), strict=True):
            if not entry.rows.done():
                entry.rows.set_result(rows[: len(entry.window.tokens) - entry.window.prompt])
        self._windows += len(batch)
        self._batches += 1
        self._seconds += time.monotonic() - began

    def readings(self) -> Iterator[Reading]:
        yield Reading("charonia_tower_aligned_windows_total", self._windows)
        yield Reading("charonia_tower_alignments_total", self._batches)
        yield Reading("charonia_tower_alignment_seconds_total", self._seconds)


def _inputs_of(windows: Sequence[AlignedWindow]) -> Arrays:
    tokens = np.zeros((len(windows), max(len(window.tokens) for window in windows)), np.int64)
    for line, window in zip(tokens, windows, strict=True):
        line[: len(window.tokens)] = window.tokens
    spans = [(window.prompt, len(window.tokens), window.sounding) for window in windows]
    rows = [np.frombuffer(window.encoded.rows, np.uint8) for window in windows]
    return {ALIGNED_TOKENS: tokens, ALIGNED_SPANS: np.array(spans, np.int64), ALIGNED_ROWS: np.stack(rows)}
