"""The cost of sending a step's plan to ranks: `python -m charonia.bench.broadcast [--rows 256] [--ranks 2]`.

Plans go the way they go while serving: encoded by rows, written to a ring in shared memory, read and decoded by rank
processes, which answer with one byte. Every kind of step is timed alone; nothing is computed between.
"""

import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np
from cyclopts import App
from rich.console import Console
from rich.table import Table

from ..engine.parallel.broadcast_ring import RING_BYTES, BroadcastRing, RingReader
from ..engine.parallel.plan_codec import PlanDecoder, PlanEncoder, SampledBatch, StepBroadcast
from ..processes.child_process import python_child
from ..processes.shared_arena import SharedArena
from ..scheduler.plan import IntArray, NewSequence, SamplerParams, StepPlan

BLOCK = 16
_NOTHING: IntArray = np.zeros(0, np.int32)
_NO_PAIRS: IntArray = np.zeros((0, 2), np.int32)
_BLOCKS, _VOCAB = 1_000_000, 256_000
_PROMPT = 512
_WARM_UP = 50

app = App(name="python -m charonia.bench.broadcast", help=__doc__)


class StepKind(NamedTuple):
    """A step in which rows decode: the share of them that takes a block, how many sequences are new, whether stages are
    told what was sampled, and how many groups of the rows take turns, as they do in a pipeline."""

    name: str
    blocks: float
    new: int = 0
    landed: bool = False
    groups: int = 1


KINDS = (
    StepKind("decode", 0.0),
    StepKind("decode, a block for every 16th", 1 / BLOCK),
    StepKind("decode, a block for each", 1.0),
    StepKind("decode, a block for each, stages told", 1.0, landed=True),
    StepKind("decode, half of them in turn, stages told", 1 / BLOCK, landed=True, groups=2),
    StepKind(f"the first, and a new prompt of {_PROMPT}", 1 / BLOCK, new=1),
)


class BroadcastCost(NamedTuple):
    """The cost of one kind of step: its bytes, and microseconds of the median step. Writing and reading are processor
    time: on a machine with few cores a reader that wakes up takes the writer's. `told` is wall-clock time, from the
    plan to the last rank's confirmation, whose way back is a part of it."""

    size: int
    written: float
    posted: float
    read: float
    told: float


def sample_broadcasts(kind: StepKind, rows: int, steps: int) -> Iterator[StepBroadcast]:
    """A run of steps of one kind."""
    random = np.random.default_rng(1)
    all_rows: IntArray = np.arange(rows, dtype=np.int32)
    ends: IntArray = random.integers(100, 100_000, rows).astype(np.int32)
    for step in range(steps):
        running: IntArray = all_rows[step % kind.groups :: kind.groups].copy()
        starts, ones = ends[running], np.ones_like(running)
        owners = running[: round(len(running) * kind.blocks)]
        blocks = random.integers(0, _BLOCKS, len(owners)).astype(np.int32)
        fresh = tuple(_newcomer(row, random) for row in range(kind.new))
        tokens = random.integers(0, _VOCAB, len(running)).astype(np.int32)
        landed = SampledBatch(running, starts, tokens) if kind.landed else None
        plan = StepPlan(step, running, starts, ones, ones == 1, ones, np.stack([owners, blocks], 1), fresh, _NOTHING)
        yield StepBroadcast(plan, landed)
        ends[running] += 1


def _newcomer(row: int, random: np.random.Generator) -> NewSequence:
    return NewSequence(row, random.integers(0, _VOCAB, _PROMPT).astype(np.int32), 0, SamplerParams(), _PROMPT)


def measure(kind: StepKind, rows: int, ranks: int, steps: int) -> BroadcastCost:
    """Time `steps` steps of a kind."""
    writer, reader = PlanEncoder(), PlanDecoder()
    sizes: list[int] = []
    written, posted, read, told = (list[float]() for _ in range(4))
    with readers(ranks) as (board, lines):
        for bulletin in sample_broadcasts(kind, rows, _WARM_UP + steps):
            begun, now = time.perf_counter(), time.thread_time()
            message = writer.encode(bulletin)
            now = _lap(written, now)
            board.publish(message)
            _lap(posted, now)
            for line in lines:
                line.recv_bytes()
            told.append(time.perf_counter() - begun)
            board.release_oldest()
            now = time.thread_time()
            reader.decode(message)
            _lap(read, now)
            sizes.append(len(message))
    return BroadcastCost(
        sizes[-1], *(statistics.median(each[_WARM_UP:]) * 1e6 for each in (written, posted, read, told))
    )


def _lap(laps: list[float], begun: float) -> float:
    """Note the processor time since; now."""
    now = time.thread_time()
    laps.append(now - begun)
    return now


@contextmanager
def readers(count: int) -> Iterator[tuple[BroadcastRing, Sequence[Connection]]]:
    """A board before so many processes, and their lines."""
    with ExitStack() as stack:
        memory = stack.enter_context(closing(SharedArena(RING_BYTES)))
        lines = []
        for _ in range(count):
            ours, theirs = multiprocessing.Pipe()
            with theirs:
                child = python_child("bench-reader", _read, theirs, memory)
            stack.callback(child.close, 60.0)
            lines.append(stack.enter_context(ours))
        for line in lines:
            line.recv_bytes()
        yield BroadcastRing(lines, memory), lines


def _read(line: Connection, memory: SharedArena) -> None:
    desk, reader = RingReader(line, memory), PlanDecoder()
    line.send_bytes(b"!")
    try:
        while True:
            reader.decode(desk.read())
            line.send_bytes(b"!")
    except EOFError:
        return


@app.default
def main(rows: int = 256, ranks: int = 2, steps: int = 1000) -> None:
    """Print bytes and microseconds of each kind of step, of processors but for the last column.

    Parameters
    ----------
    rows
        Sequences in every step.
    ranks
        Processes that read.
    steps
        Steps of each kind; the median is shown.
    """
    table = Table("step", "bytes", "write us", "post us", "read us", "all three us", "until all have read us")
    for kind in KINDS:
        cost = measure(kind, rows, ranks, steps)
        own = cost.written + cost.posted + cost.read
        figures = (cost.written, cost.posted, cost.read, own, cost.told)
        table.add_row(kind.name, str(cost.size), *(f"{figure:.0f}" for figure in figures))
    Console().print(f"{rows} rows, {ranks} ranks", table)


if __name__ == "__main__":
    from . import broadcast  # children import the readers by this name

    broadcast.app()
