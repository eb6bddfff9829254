"""Attention of one step by itself: `python -m charonia.bench.attention`.

All layers of Qwen2.5-0.5B's shape over a paged cache with random contents, decoding and prefilling: our kernels in
bf16 and int8 beside torch's attention, in turns, and the memory's speed measured between them. The fastest try counts.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from cyclopts import App

from ..engine.attention.backend import CacheSpec
from ..engine.attention.selector import create_backend
from ..engine.checkpoint.model_spec import LayerAttention, RopeSpec
from ..engine.cpu import library
from ..engine.layers.rotary import build_rotary
from ..engine.step_batch import StepBatch
from .command import report_console, seconds_of, table_of
from .machine_peaks import PeakMeter

HEADS, KV_HEADS, HEAD_DIM, LAYERS, BLOCK = 14, 2, 64, 24, 16

app = App(name="python -m charonia.bench.attention", help=__doc__)


class AttentionCase(NamedTuple):
    """A batch of so many sequences that each compute `new` tokens after `context`."""

    sequences: int
    context: int
    new: int = 1

    def __str__(self) -> str:
        return f"{self.sequences} x {self.new} on {self.context}"

    @property
    def operations(self) -> float:
        keys = sum(self.context + at + 1 for at in range(self.new))
        return 4.0 * self.sequences * keys * HEADS * HEAD_DIM * LAYERS

    @property
    def tokens(self) -> int:
        return self.sequences * (self.context + self.new)


CASES = (*(AttentionCase(count, context) for count in (1, 8, 32) for context in (128, 1024, 4096)), AttentionCase(1, 0,
256),
         AttentionCase(1, 1024, 256), AttentionCase(1, 2048, 512))  # fmt: skip

CONTENDERS = (("native", "auto"), ("native", "int8"), ("cpu", "auto"))
"""Backend, and how it stores keys and values."""

BYTES = {"auto": 2 * 2 * KV_HEADS * HEAD_DIM * LAYERS, "int8": 2 * KV_HEADS * (HEAD_DIM + 4) * LAYERS}
"""Of one token in the cache."""


class AttentionFigure(NamedTuple):
    """Seconds of all layers, the best of each contender, and bytes a second that memory gave beside them."""

    case: AttentionCase
    seconds: list[float]
    read: float


def step(case: AttentionCase, backend: str, stored: str) -> Callable[[], None]:
    """All layers of the case, with a cache of their own."""
    device, dtype = torch.device("cpu"), torch.bfloat16
    spec = CacheSpec((LayerAttention(),) * LAYERS, HEADS, KV_HEADS, HEAD_DIM, BLOCK, dtype, device, stored)
    attention, batch = create_backend(backend, spec), _batch(case)
    attention.allocate(batch.tables.numel())
    packed = torch.randn(case.sequences * case.new, HEADS + 2 * KV_HEADS, HEAD_DIM).to(dtype)
    angles = build_rotary(RopeSpec(), HEAD_DIM, case.context + case.new, dtype, device)(batch.positions)

    @torch.inference_mode()
    def run() -> None:
        attend = attention.begin_step(batch).apply_rope_and_attend
        for layer in range(LAYERS):
            attend(layer, packed, angles)

    return run


def _batch(case: AttentionCase) -> StepBatch:
    """Blocks lie anywhere, as they do after a while."""
    width = -(-(case.context + case.new) // BLOCK)
    tables = torch.randperm(case.sequences * width).view(case.sequences, width)
    starts, counts = ([number] * case.sequences for number in (case.context, case.new))
    return StepBatch.from_tokens(torch.zeros(case.sequences * case.new), starts, counts, tables, BLOCK)


def measure(turns: int) -> Iterator[AttentionFigure]:
    gauge = PeakMeter(["bf16"], "cpu", torch.get_num_threads())
    for case in CASES:
        contenders = [step(case, *contender) for contender in CONTENDERS]
        best, read = [math.inf] * len(contenders), 0.0
        for _ in range(turns):
            for at, run in enumerate(contenders):
                best[at] = min(best[at], seconds_of(run))
            read = max(read, gauge.measure()["bf16"].read)
        yield AttentionFigure(case, best, read)


@app.default
def main(*, turns: int = 10) -> None:
    """Measure.

    Parameters
    ----------
    turns
        Tries of each contender.
    """
    console = report_console()
    title = f"attention, {LAYERS} layers; kernels: {library.level()}, {torch.get_num_threads()} threads"
    columns = ("bf16 ms", "GFLOP/s", "GB/s", "int8 ms", "GB/s", "torch ms", "memory GB/s")
    table = table_of(("sequences x tokens",), columns, title)
    for case, (ours, small, torchs), read in measure(turns):
        rates = [case.operations / ours, *(case.tokens * BYTES[s] / t for s, t in (("auto", ours), ("int8", small)))]
        flops, full, half = (f"{rate / 1e9:.1f}" for rate in rates)
        times = [f"{seconds * 1e3:.2f}" for seconds in (ours, small, torchs)]
        table.add_row(str(case), times[0], flops, full, times[1], half, times[2], f"{read / 1e9:.1f}")
    console.print(table)


if __name__ == "__main__":
    app()
