"""The cost of sending a step's plan to ranks: `python -m charonia.bench.broadcast [--rows 256] [--ranks 2]`.

Plans go the way they go while serving: encoded, sent over a connection to each rank process, and decoded there; ranks
answer with one byte. Every kind of step is timed alone; nothing is computed between.
"""

import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np
from cyclopts import App
from rich.table import Table

from ..engine.parallel.rank_messages import ComputeStep, SampledBatch, decode_command, encode_message
from ..processes.child_process import python_child
from ..scheduler.plan import IntArray, NewSequence, ResolvedSampling, StepPlan
from .command import report_console

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
    sampled: bool = False
    groups: int = 1


KINDS = (
    StepKind("decode", 0.0),
    StepKind("decode, a block for every 16th", 1 / BLOCK),
    StepKind("decode, a block for each", 1.0),
    StepKind("decode, a block for each, stages told", 1.0, sampled=True),
    StepKind("decode, half of them in turn, stages told", 1 / BLOCK, sampled=True, groups=2),
    StepKind(f"the first, and a new prompt of {_PROMPT}", 1 / BLOCK, new=1),
)


class BroadcastCost(NamedTuple):
    """The cost of one kind of step: its bytes, and microseconds of the median step. Encoding, sending and decoding are
    processor time: on a machine with few cores a rank that wakes up takes the sender's. `confirmed` is wall-clock time,
    from the plan to the last rank's confirmation, whose way back is a part of it."""

    size: int
    encode: float
    send: float
    decode: float
    confirmed: float


def sample_steps(kind: StepKind, rows: int, steps: int) -> Iterator[ComputeStep]:
    """A run of steps of one kind."""
    random = np.random.default_rng(1)
    all_rows: IntArray = np.arange(rows, dtype=np.int32)
    ends: IntArray = random.integers(100, 100_000, rows).astype(np.int32)
    for step in range(steps):
        running: IntArray = all_rows[step % kind.groups :: kind.groups].copy()
        starts, ones = ends[running], np.ones_like(running)
        owners = running[: round(len(running) * kind.blocks)]
        blocks = random.integers(0, _BLOCKS, len(owners)).astype(np.int32)
        new = tuple(_new_sequence(row, random) for row in range(kind.new))
        tokens = random.integers(0, _VOCAB, len(running)).astype(np.int32)
        sampled = SampledBatch(running, starts, tokens) if kind.sampled else None
        plan = StepPlan(step, running, starts, ones, ones == 1, ones, np.stack([owners, blocks], 1), new, _NOTHING)
        yield ComputeStep(plan, sampled)
        ends[running] += 1


def _new_sequence(row: int, random: np.random.Generator) -> NewSequence:
    return NewSequence(row, random.integers(0, _VOCAB, _PROMPT).astype(np.int32), 0, ResolvedSampling(), _PROMPT)


def measure(kind: StepKind, rows: int, ranks: int, steps: int) -> BroadcastCost:
    """Time `steps` steps of a kind."""
    sizes: list[int] = []
    encode, send, decode, confirmed = (list[float]() for _ in range(4))
    with _ranks(ranks) as connections:
        for command in sample_steps(kind, rows, _WARM_UP + steps):
            began, now = time.perf_counter(), time.thread_time()
            message = encode_message(command)
            now = _lap(encode, now)
            for connection in connections:
                connection.send_bytes(message)
            _lap(send, now)
            for connection in connections:
                connection.recv_bytes()
            confirmed.append(time.perf_counter() - began)
            now = time.thread_time()
            decode_command(message)
            _lap(decode, now)
            sizes.append(len(message))
    times = (statistics.median(each[_WARM_UP:]) * 1e6 for each in (encode, send, decode, confirmed))
    return BroadcastCost(sizes[-1], *times)


def _lap(laps: list[float], began: float) -> float:
    """Note the processor time since; now."""
    now = time.thread_time()
    laps.append(now - began)
    return now


@contextmanager
def _ranks(count: int) -> Iterator[Sequence[Connection]]:
    """Connections to so many processes."""
    with ExitStack() as stack:
        connections = []
        for _ in range(count):
            ours, theirs = multiprocessing.Pipe()
            with theirs:
                child = python_child("bench-rank", _decode_steps, theirs)
            stack.callback(child.close, 60.0)
            connections.append(stack.enter_context(ours))
        for connection in connections:
            connection.recv_bytes()
        yield connections


def _decode_steps(connection: Connection) -> None:
    connection.send_bytes(b"!")
    try:
        while True:
            decode_command(connection.recv_bytes())
            connection.send_bytes(b"!")
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
        Processes that receive.
    steps
        Steps of each kind; the median is shown.
    """
    table = Table("step", "bytes", "encode us", "send us", "decode us", "all three us", "until all have it us")
    for kind in KINDS:
        cost = measure(kind, rows, ranks, steps)
        own = cost.encode + cost.send + cost.decode
        figures = (cost.encode, cost.send, cost.decode, own, cost.confirmed)
        table.add_row(kind.name, str(cost.size), *(f"{figure:.0f}" for figure in figures))
    report_console().print(f"{rows} rows, {ranks} ranks", table)


if __name__ == "__main__":
    from . import broadcast  # children import the ranks by this name

    broadcast.app()
