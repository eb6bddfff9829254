"""Decode steps as CUDA graphs, one for each bucket of batch sizes and context lengths.

A decode step launches the same kernels again and again, and launching them takes the host longer than a fast GPU
computes. A graph is recorded of a step over buffers that stay: the numbers of its rows, padded to the bucket by rows of
count 0, and its logits. A step then writes its numbers there and replays the graph, one launch for all kernels.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import product
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

log = logging.getLogger(__name__)

CAPTURE_SECONDS = 1.0
"""The least time between two captures under load: each one holds up its step for some tenths of a second."""

GRAPH_BYTES = 4 << 20
"""What CUDA keeps of one graph, about 10 KiB a node, beside the tensors that torch knows of."""

_SHORT_CONTEXT, _CONTEXT_RATIO = 8192, 4

Launches: TypeAlias = Callable[[], None]
Recorder: TypeAlias = Callable[[Launches], Launches]
"""Records what a function launches, without waiting for the device in it; returns what launches the same again."""


class CudaRecorder:
    """Records CUDA graphs whose tensors share one memory pool: they are never replayed at once."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, launches: Launches) -> Launches:
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile: one that reads an adapter, for instance.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            launches()
        replay: Launches = graph.replay
        return replay


class GraphBuckets(NamedTuple):
    """The batch sizes and context lengths that steps are padded to, ascending."""

    rows: tuple[int, ...]
    contexts: tuple[int, ...]

    @classmethod
    def of_limits(cls, most_rows: int, longest: int) -> "GraphBuckets":
        """Those for steps of up to `most_rows` rows, and sequences of up to `longest` tokens."""
        rows = (1, 2, 4, *range(8, 257, 8), *range(288, 1025, 32))
        contexts = [_SHORT_CONTEXT]
        while contexts[-1] < longest:
            contexts.append(contexts[-1] * _CONTEXT_RATIO)
        most = min(most_rows, rows[-1])
        return cls((*(size for size in rows if size < most), most), (*contexts[:-1], longest))

    @property
    def bytes(self) -> int:
        """Memory to set aside for all graphs, logits apart."""
        return len(self.rows) * len(self.contexts) * GRAPH_BYTES


class DecodeGraphs:
    """`compute(numbers, context)`: the logits [B, vocabulary] of a step with the rows of `numbers`, int32 [4, B]: lines
    of the worker's tables, starts, counts (1, or 0 for a padded row) and first places. No sequence is longer than
    `context` tokens. It reads the numbers on the device alone, and whatever else it reads or writes stays where it is
    until `forget`. `eager_steps` counts decode steps that found no graph. Not for threads."""

    def __init__(
        self,
        compute: Callable[[Tensor, int], Tensor],
        buckets: GraphBuckets,
        device: torch.device,
        record: Recorder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._compute, self.buckets, self._device = compute, buckets, device
        self._record, self._clock = record, clock
        self._captured_at = -CAPTURE_SECONDS
        self._usable = True
        self.eager_steps = 0
        self.forget()

    def forget(self) -> None:
        """Drop all graphs: the cache or the tables that they read are about to move."""
        self._replays: dict[tuple[int, int], Launches] = {}
        self._logits: Tensor | None = None

    @torch.inference_mode()
    def replay(self, columns: Sequence[NDArray[np.int32]]) -> Tensor | None:
        """The logits [R, vocabulary] of a step of R rows of one token each, good until the next step. `columns`: rows,
        starts, counts and first places, each [R]. None: it has no graph yet, or is too large for one."""
        rows, longest = len(columns[0]), int(columns[1].max()) + 1
        key = _bucket(rows, self.buckets.rows), _bucket(longest, self.buckets.contexts)
        if key[0] is None or key[1] is None or not self._may_replay((key[0], key[1])):
            self.eager_steps += 1
            return None
        self._fill(columns)
        self._replays[key[0], key[1]]()
        assert self._logits is not None
        return self._logits[:rows]

    @torch.inference_mode()
    def capture_one(self) -> None:
        """Capture a graph that is missing, the ones for short contexts first; for an idle engine."""
        missing = ((rows, context) for context, rows in product(self.buckets.contexts, self.buckets.rows))
        key = next((each for each in missing if each not in self._replays), None)
        if key is not None and self._usable:
            self._capture(key)

    @torch.inference_mode()
    def capture_now(self, rows: int, longest: int) -> None:
        """Capture the graph for steps of `rows` rows of up to `longest` tokens; for measurements."""
        key = _bucket(rows, self.buckets.rows), _bucket(longest, self.buckets.contexts)
        if self._usable and key[0] is not None and key[1] is not None:
            self._capture((key[0], key[1]))

    def _may_replay(self, key: tuple[int, int]) -> bool:
        """Whether there is a graph, captured now if it is time for one."""
        if self._usable and key not in self._replays and self._clock() - self._captured_at >= CAPTURE_SECONDS:
            self._capture(key)
        return key in self._replays

    def _capture(self, key: tuple[int, int]) -> None:
        """Record the step of a bucket, all of whose rows are padded: it touches nothing. The first computation compiles
        kernels and finds out how wide logits are."""
        rows, context = key
        self._numbers.zero_()
        try:
            first = self._compute(self._numbers[:, :rows], context)
            if self._logits is None:
                self._logits = first.new_zeros((self.buckets.rows[-1], first.shape[1]))
            out = self._logits[:rows]
            self._replays[key] = self._record(lambda: _copy(out, self._compute(self._numbers[:, :rows], context)))
        except RuntimeError as error:
            self._usable = False
            self.forget()
            log.warning("decode steps are computed without CUDA graphs: %s", error)
        self._captured_at = self._clock()

    def _fill(self, columns: Sequence[NDArray[np.int32]]) -> None:
        """Write the numbers of a step, followed by padded rows, into the buffer that graphs read."""
        rows = len(columns[0])
        packed = np.zeros(self._numbers.shape, np.int32)
        packed[:, :rows] = columns
        packed[3, rows:] = rows
        staged = torch.from_numpy(packed)
        self._numbers.copy_(staged if self._device.type == "cpu" else staged.pin_memory(), non_blocking=True)

    @cached_property
    def _numbers(self) -> Tensor:
        """int32 [4, W]; each line begins at 16 bytes, by which Triton distinguishes the forms of a kernel."""
        return torch.zeros((4, -(-self.buckets.rows[-1] // 4) * 4), dtype=torch.int32, device=self._device)


def _bucket(size: int, buckets: Sequence[int]) -> int | None:
    """The smallest of ascending `buckets` that `size` fits into."""
    at = bisect_left(buckets, size)
    return buckets[at] if at < len(buckets) else None


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)
