"""Decode steps as CUDA graphs, one for each bucket of places and context lengths.

Launching a decode step's kernels takes the host longer than a fast GPU computes. So a graph of them is recorded over
buffers that stay; a step writes its numbers there and replays the graph, one launch for all kernels.
"""

import logging
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..step_adapters import BLOCK_PLACES, AdapterBlocks, StepAdapters
from ..step_batch import StepBatch

log = logging.getLogger(__name__)

CAPTURE_SECONDS = 1.0
"""The least time between two captures under load: each one holds up its step for some tenths of a second."""

LONGEST_RETRY_SECONDS = 600.0
"""After a capture that failed the next one waits twice as long each time, up to this."""

GRAPH_BYTES = 4 << 20
"""What CUDA keeps of one graph, about 10 KiB a node, beside the tensors that torch knows of; twice that with adapters,
whose kernels are nodes, too."""

_SHORT_CONTEXT, _CONTEXT_RATIO = 8192, 4
_PLAIN_SIZES = (1, 2, 4, *range(8, 257, 8), *range(288, 1025, 32))
_OTHER_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)

Launches: TypeAlias = Callable[[], None]
Recorder: TypeAlias = Callable[[Launches], Launches]
"""Records what a function launches, without waiting for the device in it; returns what launches the same again."""


class CudaRecorder:
    """Records CUDA graphs on `device`, the current one, whose tensors share one memory pool: they are never replayed at
    once. A pool that the last of its graphs has left can't be captured into again, so the next graph begins another. A
    capture that fails leaves nothing behind."""

    def __init__(self, device: torch.device) -> None:
        self._pool: Any = None
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()  # of the pool
        self._number = torch.zeros(1, device=device)

    def __call__(self, launches: Launches) -> Launches:
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # Other threads may use the device meanwhile: one that reads an adapter, for instance.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                launches()
        except BaseException:
            self._undo(stream)
            raise
        self._graphs.add(graph)
        replay: Launches = graph.replay
        return replay

    def _undo(self, stream: torch.cuda.Stream) -> None:
        """What a capture that failed leaves behind: its stream is the current one in place of `stream`, memory is taken
        from its pool, and the random numbers' generator waits for its end, which the next capture to succeed brings:
        one of nothing much. Until then whoever draws, or replays, would be refused."""
        torch.cuda.set_stream(stream)
        with suppress(RuntimeError, AttributeError):  # memory was never, or is no longer, taken from it
            torch._C._cuda_endAllocateToPool(stream.device_index, self._pool)
            torch._C._cuda_releasePool(stream.device_index, self._pool)
        self._graphs.clear()  # those that live keep their pool
        with suppress(RuntimeError), torch.cuda.stream(torch.cuda.Stream()):
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            self._number.zero_()
            graph.capture_end()


class _Failures(NamedTuple):
    """Captures that failed one after the other, and the time from which it is tried again."""

    times: int = 0
    again: float = -math.inf

    def more(self, now: float) -> "_Failures":
        return _Failures(self.times + 1, now + min(CAPTURE_SECONDS * 2 ** (self.times + 1), LONGEST_RETRY_SECONDS))


class GraphKey(NamedTuple):
    """A bucket: steps of up to so many `places`, at most `most` of one row (with drafts it has several), in sequences
    of up to `context` tokens, with adapters or without."""

    context: int
    adapted: bool
    most: int
    places: int


class GraphBuckets(NamedTuple):
    """The sizes that steps are padded to, ascending: the places of steps whose rows have one each and no adapter, the
    lengths of contexts, and the `others`: places of steps with drafts, or with adapters, which have fewer buckets. A
    row has up to `most` places, and a step up to `adapters` different ones; 0: none may have any."""

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    others: tuple[int, ...] = ()
    most: int = 1
    adapters: int = 0

    @classmethod
    def of_limits(cls, most_rows: int, longest: int, most: int = 1, adapters: int = 0) -> "GraphBuckets":
        """Those for steps of up to `most_rows` rows, and sequences of up to `longest` tokens."""
        contexts = [_SHORT_CONTEXT]
        while contexts[-1] < longest:
            contexts.append(contexts[-1] * _CONTEXT_RATIO)
        others = _sizes_to(most_rows * most, _OTHER_SIZES) if most > 1 or adapters else ()
        return cls(_sizes_to(most_rows, _PLAIN_SIZES), (*contexts[:-1], longest), others, most, adapters)

    @property
    def keys(self) -> list[GraphKey]:
        """All buckets: those for short contexts first, and of these the plain ones."""
        kinds = [(False, 1), (False, self.most), (True, 1), (True, self.most)]
        return [
            GraphKey(context, adapted, most, places)
            for context in self.contexts
            for adapted, most in dict.fromkeys(kinds[: 4 if self.adapters else 2])
            for places in self._sizes(adapted, most)
            if places > 1 or most == 1
        ]

    def _sizes(self, adapted: bool, most: int) -> tuple[int, ...]:
        return self.others if adapted or most > 1 else self.rows

    @property
    def places(self) -> int:
        """Those of the largest bucket."""
        return max(self.rows + self.others)

    @property
    def bytes(self) -> int:
        """Memory of all graphs, what comes out of them apart."""
        return sum(GRAPH_BYTES << key.adapted for key in self.keys)

    def find(self, places: int, most: int, longest: int, adapted: bool) -> GraphKey | None:
        """The bucket of a step; None: it is too large for one."""
        size = _bucket(places, self._sizes(adapted, most))
        context = _bucket(longest, self.contexts)
        if size is None or context is None or most > self.most or (adapted and not self.adapters):
            return None
        return GraphKey(context, adapted, self.most if most > 1 else 1, size)


class StaticStep(NamedTuple):
    """A step that is recorded, over buffers that stay: N rows and N places at most, `most` of one row, no sequence
    longer than `context` tokens. `numbers`, int32 [4, N]: lines of the worker's tables, starts, counts (0 for a padded
    row) and first places. `adapters`: of places that have one; None where none has."""

    numbers: Tensor
    most: int
    context: int
    adapters: StepAdapters | None = None


class DecodeGraphs:
    """`compute(step)`: what comes out of a step at each of its places, the logits [N, vocabulary] first. It reads
    numbers on the device alone, and whatever else it reads or writes stays where it is until `forget`. `eager_steps`
    counts steps that found no graph, `failed_captures` graphs that could not be captured: each is tried again later.
    Not for threads."""

    def __init__(
        self,
        compute: Callable[[StaticStep], Sequence[Tensor]],
        buckets: GraphBuckets,
        device: torch.device,
        record: Recorder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._compute, self.buckets, self._device = compute, buckets, device
        self._record, self._clock = record, clock
        self._captured_at = -CAPTURE_SECONDS
        self._failures: dict[GraphKey | None, _Failures] = {}  # of each bucket; None: in a row, whatever the bucket
        self._output_bytes = 0
        self.eager_steps = self.failed_captures = 0
        self.forget()

    def forget(self) -> None:
        """Drop all graphs: the cache or the tables that they read are about to move."""
        self._replays: dict[GraphKey, Launches] = {}
        self._outputs: list[Tensor] = []

    @property
    def bytes(self) -> int:
        """Memory that all graphs keep, and what comes out of them; known when the largest step was computed."""
        return self.buckets.bytes + self._output_bytes

    @torch.inference_mode()
    def replay(self, batch: StepBatch, adapters: StepAdapters | None = None) -> list[Tensor] | None:
        """What comes out of a step at each of its places, good until the next step. None: it has no graph yet, or is
        too large for one."""
        most = int(batch.counts.max())
        key = self.buckets.find(batch.size, most, batch.longest, adapters is not None)
        if key is None or not self._may_replay(key):
            self.eager_steps += 1
            return None
        rows, packed = len(batch.rows), np.zeros(self._numbers.shape, np.int32)
        packed[:, :rows] = batch.rows, batch.starts, batch.counts, batch.first_places
        packed[3, rows:] = batch.size
        self._write(self._numbers, packed)
        if adapters is not None:
            self._write(self._adapters, adapters.pack(self._adapters.shape[1]))
        self._replays[key]()
        return [each[: batch.size] for each in self._outputs]

    @torch.inference_mode()
    def capture_one(self) -> bool:
        """Capture a graph that is missing, in the order of `GraphBuckets.keys` but those last that failed, for an idle
        engine; False: there is none, or it is too soon after one that failed."""
        now = self._clock()
        missing = (key for key in self.buckets.keys if key not in self._replays and self._may_try(key, now))
        key = min(missing, key=lambda key: self._failures.get(key, _Failures()).times, default=None)
        if key is None:
            return False
        self._capture(key)
        return True

    @torch.inference_mode()
    def capture_now(self, places: int, longest: int, most: int = 1) -> None:
        """Capture the graph for steps of so many places, in sequences of up to `longest` tokens; for measurements."""
        key = self.buckets.find(places, most, longest, False)
        if key is not None:
            self._capture(key)

    @torch.inference_mode()
    def compute_largest(self) -> None:
        """Compute the step that takes the most memory, and record nothing."""
        buckets = self.buckets
        key = GraphKey(buckets.contexts[-1], bool(buckets.adapters), buckets.most, buckets.places)
        self._output_bytes = sum(each.nbytes for each in self._compute(self._padded_step(key)))

    def _may_replay(self, key: GraphKey) -> bool:
        """Whether there is a graph, captured now if it is time for one."""
        if key not in self._replays:
            now = self._clock()
            if now - self._captured_at >= CAPTURE_SECONDS and self._may_try(key, now):
                self._capture(key)
        return key in self._replays

    def _may_try(self, key: GraphKey, now: float) -> bool:
        """Whether it is long enough since the bucket's capture failed, and since any did if none has succeeded."""
        return all(now >= self._failures[each].again for each in (key, None) if each in self._failures)

    def _capture(self, key: GraphKey) -> None:
        """Record the step of a bucket. The first computation compiles kernels and finds out how wide outputs are."""
        step = self._padded_step(key)
        try:
            first = self._compute(step)
            if not self._outputs:
                self._outputs = [each.new_zeros((self.buckets.places, each.shape[1])) for each in first]
            out = [each[: key.places] for each in self._outputs]
            self._replays[key] = self._record(lambda: _copy(out, self._compute(step)))
        except Exception as error:  # the step is launched kernel by kernel, which shows whether it can be computed
            self._count_failure(key, error)
        else:
            self._failures = {each: seen for each, seen in self._failures.items() if each not in (key, None)}
        self._captured_at = self._clock()

    def _count_failure(self, key: GraphKey, error: Exception) -> None:
        now = self._clock()
        self.failed_captures += 1
        failures = {each: self._failures.get(each, _Failures()).more(now) for each in (key, None)}
        self._failures |= failures
        seconds = max(each.again for each in failures.values()) - now
        message = "a CUDA graph for steps of %d places could not be captured, and is tried again in %.0f s: %s"
        log.warning(message, key.places, seconds, _first_cause(error))

    def _padded_step(self, key: GraphKey) -> StaticStep:
        """The step of a bucket, all of whose rows are padded: it touches nothing."""
        self._numbers.zero_()
        adapters = None
        if key.adapted:
            self._adapters.zero_()
            blocks = min(key.places, key.places // BLOCK_PLACES + self.buckets.adapters)
            adapters = StepAdapters.on_device(AdapterBlocks(self._adapters, blocks))
        return StaticStep(self._numbers[:, : key.places], key.most, key.context, adapters)

    def _write(self, buffer: Tensor, numbers: NDArray[Any]) -> None:
        """Without waiting for the device."""
        staged = torch.from_numpy(numbers)
        buffer.copy_(staged if self._device.type == "cpu" else staged.pin_memory(), non_blocking=True)

    @cached_property
    def _numbers(self) -> Tensor:
        """int32 [4, W]; each line begins at 16 bytes, by which Triton distinguishes the forms of a kernel."""
        return torch.zeros((4, -(-self.buckets.places // 4) * 4), dtype=torch.int32, device=self._device)

    @cached_property
    def _adapters(self) -> Tensor:
        """int64 [4, W], see `AdapterBlocks`."""
        return torch.zeros(self._numbers.shape, dtype=torch.int64, device=self._device)


def _sizes_to(most: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Those below `most`, and it itself, unless the largest is less."""
    most = min(most, sizes[-1])
    return (*(size for size in sizes if size < most), most)


def _bucket(size: int, buckets: Sequence[int]) -> int | None:
    """The smallest of ascending `buckets` that `size` fits into."""
    at = bisect_left(buckets, size)
    return buckets[at] if at < len(buckets) else None


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _first_cause(error: BaseException) -> str:
    """What went wrong first: a capture's end reports only that something did."""
    while error.__context__ is not None and not error.__suppress_context__:
        error = error.__context__
    return f"{type(error).__name__}: {error}"
