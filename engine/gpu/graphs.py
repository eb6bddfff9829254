"""Steps as CUDA graphs, one for each bucket of places and context lengths.

Launching the kernels of a decode step, or of one with a short part of a prompt, takes longer than a fast GPU computes.
A graph is recorded over static buffers; a step writes its numbers there and replays the graph, one launch for all
kernels.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cached_property
from traceback import clear_frames
from typing import Any, NamedTuple, Protocol, TypeAlias
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...core.eager_reason import EagerReason
from ..step_adapters import BLOCK_PLACES, AdapterBlocks, StepAdapters
from ..step_batch import StepBatch
from ..step_states import StepStates
from .graph_buckets import GraphBuckets, GraphKey, StepExtent
from .state_rows import StateMoves

log = logging.getLogger(__name__)

CAPTURE_SECONDS = 1.0
"""The least time between two captures under load: each delays its step by some tenths of a second."""

LONGEST_RETRY_SECONDS = 600.0
"""The longest wait after failed captures, which doubles each time."""

Launches: TypeAlias = Callable[[], None]
Recorder: TypeAlias = Callable[[Launches], Launches]
"""Records the launches of a function, which must not wait for the device; returns what launches them again."""


class CudaRecorder:
    """Records CUDA graphs on `device`, the current one. They share one memory pool, since they never run at once. A
    pool without graphs cannot be captured into again, so the next graph begins another. A failed capture leaves nothing
    behind."""

    def __init__(self, device: torch.device) -> None:
        self._pool: Any = None
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()  # of the pool
        self._number = torch.zeros(1, device=device)

    def __call__(self, launches: Launches) -> Launches:
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        try:
            # Other threads may use the device meanwhile, to read an adapter, for instance.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                launches()
        except BaseException:
            self._undo(stream)
            raise
        self._graphs.add(graph)
        replay: Launches = graph.replay
        return replay

    def _undo(self, stream: torch.cuda.Stream) -> None:
        """Undo a failed capture: restore `stream` as the current one, take memory from its pool no longer, and capture
        something trivial, without which the generator of random numbers would refuse every draw and replay."""
        torch.cuda.set_stream(stream)
        with suppress(RuntimeError, AttributeError):  # memory was never taken from it, or is no longer
            torch._C._cuda_endAllocateToPool(stream.device_index, self._pool)
            torch._C._cuda_releasePool(stream.device_index, self._pool)
        self._graphs.clear()  # live graphs keep their pool
        with suppress(RuntimeError), torch.cuda.stream(torch.cuda.Stream()):
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            self._number.zero_()
            graph.capture_end()


class CapturingRanks(Protocol):
    """The ranks that compute a step together, and capture it at the same time."""

    def alone(self) -> AbstractContextManager[None]:
        """What is computed meanwhile waits for no other rank, and means nothing."""

    def agree(self, own: bool, device: torch.device) -> bool:
        """Whether all ranks say yes; `own`: whether this one does. All ask at once."""

    def connect(self) -> None:
        """Exchange something of each kind that was left out alone, when all have agreed: NCCL connects ranks, and takes
        memory, at the first exchange of a kind, which no graph can have. An error is not for one rank to survive."""


class _Failures(NamedTuple):
    """Consecutive failed captures."""

    times: int = 0
    again: float = -math.inf
    """The time of the next try."""

    def more(self, now: float) -> "_Failures":
        return _Failures(self.times + 1, now + min(CAPTURE_SECONDS * 2 ** (self.times + 1), LONGEST_RETRY_SECONDS))


class StaticStep(NamedTuple):
    """A step that is recorded, over static buffers: R rows and N places at most."""

    numbers: Tensor
    """int32 [5, R]: lines of the worker's tables, starts, counts (0 for a padded row), first places, and shifts of
    positions (`StepPositions`)."""
    key: GraphKey
    """Its bucket."""
    logits_at: Tensor | None = None
    """int64 [L]: the packed places with logits, of a step that may have parts of prompts; None: all are."""
    adapters: StepAdapters | None = None
    """The adapters of places that have one; None where none has."""
    moves: StateMoves | None = None
    """The moves of its rows' states, where layers keep some."""


class StepGraphs:
    """The graphs of steps, for one thread. `compute(step)` returns the logits [L, vocabulary], and then other outputs
    at each place; it reads numbers on the device alone, and its buffers stay in place until `forget`. `eager_steps`
    counts steps without a graph, and `failed_captures` is counted, too: each is tried again later. `ranks`: those that
    compute such a step together, if there are several; then `clock` is theirs, too."""

    def __init__(
        self,
        compute: Callable[[StaticStep], Sequence[Tensor]],
        buckets: GraphBuckets,
        device: torch.device,
        record: Recorder,
        clock: Callable[[], float] = time.monotonic,
        ranks: CapturingRanks | None = None,
    ) -> None:
        self._compute = compute
        self._ranks = ranks
        self.buckets = buckets
        self._device = device
        self._record = record
        self._clock = clock
        self._captured_at = -CAPTURE_SECONDS
        self._failures: dict[GraphKey | None, _Failures] = {}
        """By bucket; None: those of all buckets, since the last success."""
        self._output_bytes = 0
        self.eager_steps: Counter[EagerReason] = Counter()
        self.failed_captures = 0
        self.forget()

    def forget(self) -> None:
        """Drop all graphs, since the cache or the tables that they read are about to move."""
        self._replays: dict[GraphKey, Launches] = {}
        self._outputs: list[Tensor] = []

    @property
    def bytes(self) -> int:
        """Memory of all graphs and their outputs; known after `compute_largest`."""
        return self.buckets.bytes + self._output_bytes

    @torch.inference_mode()
    def replay(
        self,
        batch: StepBatch,
        adapters: StepAdapters | None = None,
        states: StepStates | None = None,
        logits_at: Tensor | None = None,
    ) -> list[Tensor] | None:
        """The outputs of a step at each of its places, valid until the next step; of one with parts of prompts the
        logits at `logits_at`, int64 on the device. `states`: of its rows, if layers keep some. None: it has no graph
        yet, or is too large for one."""
        counts, prompts = batch.counts, logits_at is not None
        few = counts[counts <= self.buckets.most] if prompts else counts
        most = int(few.max()) if len(few) else 1
        logits = batch.size if logits_at is None else len(logits_at)
        extent = StepExtent(batch.size, batch.longest, most, adapters is not None, prompts, len(counts), logits)
        key = self.buckets.find(extent)
        if states is not None and len(states.saves) > self._moves.shape[1]:
            key = None
        if key is None or not self._may_replay(key):
            too_large = EagerReason.PROMPT if prompts else EagerReason.TOO_LARGE
            self.eager_steps[too_large if key is None else EagerReason.NOT_CAPTURED] += 1
            return None
        rows = len(batch.rows)
        packed = np.zeros(self._numbers.shape, np.int32)
        packed[:4, :rows] = batch.rows, batch.starts, batch.counts, batch.first_places
        packed[4, :rows] = 0 if batch.moved is None else batch.moved.shifts
        packed[3, rows:] = batch.size
        self._write(self._numbers, packed)
        if adapters is not None:
            self._write(self._adapters, adapters.pack(self._adapters.shape[1]))
        if states is not None:
            self._write(self._moves, states.pack(self._moves.shape[1]))
        if logits_at is not None:
            self._logits_at.zero_()  # what is left of larger steps may be no place of this one
            self._logits_at[:logits].copy_(logits_at)
        self._replays[key]()
        return [self._outputs[0][:logits], *(output[: batch.size] for output in self._outputs[1:])]

    @torch.inference_mode()
    def capture_one(self) -> bool:
        """Capture a missing graph, for an idle engine: in the order of `GraphBuckets.keys`, the most often failed last.
        False: none is missing, or it is too soon after a failure."""
        now = self._clock()
        missing = (key for key in self.buckets.keys if key not in self._replays and self._may_try(key, now))
        key = min(missing, key=lambda key: self._failures.get(key, _Failures()).times, default=None)
        if key is None:
            return False
        self._capture(key)
        return True

    @torch.inference_mode()
    def capture_next_usual(self) -> float:
        """Capture the next graph of `GraphBuckets.usual_keys`, before a request waits for it; returns the fraction that
        is captured, 1.0 also where the others are left to `capture_one` after a failure."""
        keys = self.buckets.usual_keys
        missing = [key for key in keys if key not in self._replays]
        if not missing or not self._may_try(missing[0], self._clock()):
            return 1.0
        self._capture(missing[0])
        return 1.0 - (len(missing) - 1) / len(keys)

    @torch.inference_mode()
    def capture_now(self, places: int, longest: int, most: int = 1) -> None:
        """Capture the graph for steps of so many places in sequences of up to `longest` tokens, for measurements."""
        key = self.buckets.find(StepExtent(places, longest, most))
        if key is not None:
            self._capture(key)

    @torch.inference_mode()
    def compute_largest(self) -> None:
        """Compute the steps that take the most memory, and record nothing; of several ranks each `alone`."""
        computed = (self._compute(self._padded_step(key)) for key in self.buckets.largest_keys)
        sizes = [[output.nbytes for output in outputs] for outputs in computed]
        self._output_bytes = sum(map(max, *sizes)) if len(sizes) > 1 else sum(sizes[0])

    def _may_replay(self, key: GraphKey) -> bool:
        """Whether there is a graph; one is captured now if the last capture is long enough ago."""
        if key not in self._replays:
            now = self._clock()
            if now - self._captured_at >= CAPTURE_SECONDS and self._may_try(key, now):
                self._capture(key)
        return key in self._replays

    def _may_try(self, key: GraphKey, now: float) -> bool:
        """Whether the waits after the bucket's failures, and after all since the last success, are over."""
        return all(now >= self._failures[failed].again for failed in (key, None) if failed in self._failures)

    def _capture(self, key: GraphKey) -> None:
        """Record the step of a bucket. What one of several ranks cannot compute or capture none of them has."""
        failure: str | None = None  # an error in a local would be held by its own traceback, with tensors of the step
        try:
            step, out = self._compute_first(key)
        except Exception as error:  # the step is launched kernel by kernel, which shows whether it can be computed
            failure = _release(error)
        failure = self._vote(failure)
        if failure is None:
            if self._ranks is not None:
                self._ranks.connect()
            try:
                self._replays[key] = self._record(lambda: _copy(out, self._compute(step)))
            except Exception as error:
                failure = _release(error)
            failure = self._vote(failure)
        if failure is None:
            self._failures.pop(key, None)
            self._failures.pop(None, None)
        else:
            self._replays.pop(key, None)
            self._count_failure(key, failure)
        self._captured_at = self._clock()

    def _compute_first(self, key: GraphKey) -> tuple[StaticStep, list[Tensor]]:
        """The step of a bucket, and where its outputs go: it is computed once, which compiles kernels and finds out how
        wide outputs are; by each of several ranks alone, so none that fails leaves another in the middle."""
        step = self._padded_step(key)
        with nullcontext() if self._ranks is None else self._ranks.alone():
            first = self._compute(step)
        if not self._outputs:
            lines = self.buckets.lines, *[self.buckets.places] * (len(first) - 1)
            sizes = ((most, output.shape[1]) for most, output in zip(lines, first, strict=True))
            self._outputs = [output.new_zeros(size) for output, size in zip(first, sizes, strict=True)]
        return step, [whole[: len(output)] for whole, output in zip(self._outputs, first, strict=True)]

    def _vote(self, failure: str | None) -> str | None:
        """This rank's failure, or another's."""
        if self._ranks is None or self._ranks.agree(failure is None, self._device):
            return failure
        return failure or "another rank could not capture it"

    def _count_failure(self, key: GraphKey, failure: str) -> None:
        now = self._clock()
        self.failed_captures += 1
        failures = {failed: self._failures.get(failed, _Failures()).more(now) for failed in (key, None)}
        self._failures |= failures
        seconds = max(failed.again for failed in failures.values()) - now
        message = "a CUDA graph for steps of %d places could not be captured, and is tried again in %.0f s: %s"
        log.warning(message, key.places, seconds, failure)

    def _padded_step(self, key: GraphKey) -> StaticStep:
        """The step of a bucket with padded rows alone: it changes no row."""
        self._numbers.zero_()
        adapters = None
        if key.adapted:
            self._adapters.zero_()
            blocks = min(key.places, key.places // BLOCK_PLACES + self.buckets.adapters)
            adapters = StepAdapters.on_device(AdapterBlocks(self._adapters, blocks))
        numbers = self._numbers[:, : self.buckets.rows_of(key)]
        logits_at = self._logits_at[: self.buckets.logits_of(key)].zero_() if key.prompts else None
        return StaticStep(numbers, key, logits_at, adapters, StateMoves(*self._moves))

    def _write(self, buffer: Tensor, numbers: NDArray[Any]) -> None:
        """Copy numbers to the device without waiting for it."""
        staged = torch.from_numpy(numbers)
        buffer.copy_(staged if self._device.type == "cpu" else staged.pin_memory(), non_blocking=True)

    @cached_property
    def _numbers(self) -> Tensor:
        """int32 [5, W]; each line is aligned to 16 bytes, for which Triton has forms of its own."""
        return torch.zeros((5, -(-self.buckets.lines // 4) * 4), dtype=torch.int32, device=self._device)

    @cached_property
    def _logits_at(self) -> Tensor:
        return torch.zeros(self.buckets.lines, dtype=torch.int64, device=self._device)

    @cached_property
    def _moves(self) -> Tensor:
        """int32 [5, W], see `StepStates.pack`."""
        return torch.zeros_like(self._numbers)

    @cached_property
    def _adapters(self) -> Tensor:
        """int64 [4, W], see `AdapterBlocks`."""
        return torch.zeros((4, self.buckets.places), dtype=torch.int64, device=self._device)


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _release(error: BaseException) -> str:
    """What went wrong first: a capture's end reports only that something did. All that the errors hold of the device's
    memory, in the frames that they came through, is let go."""
    clear_frames(error.__traceback__)
    while error.__context__ is not None and not error.__suppress_context__:
        error = error.__context__
        clear_frames(error.__traceback__)
    return f"{type(error).__name__}: {error}"
