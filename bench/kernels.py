"""The matrix products of one step by themselves: `python -m charonia.bench.kernels [--precisions bf16 int8]`.

All linear layers of Qwen2.5-0.5B's shape, and its head where rows are few, with random weights: ours beside torch's,
in turns, and the machine's limits measured between them. The fastest try counts: on a machine with neighbours the
others say more about those.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from time import perf_counter
from typing import Annotated, NamedTuple, TypeAlias

import torch
from cyclopts import App, Parameter
from rich.console import Console
from torch import Tensor

from ..engine.cpu import library
from ..engine.cpu.matmul import GroupedFormat, GroupedMatmul, GroupedRows, MatmulFormat, PackedMatmul
from ..engine.cpu.memory import HugePageArena
from ..engine.layers.int4 import BYTES, GROUP_SIZE, TorchInt4Matmul, quantize_int4
from ..engine.layers.torch_matmul import TorchInt8Matmul, quantize_rows, torch_matmul
from .command import report_console, seconds_of, table_of
from .machine_peaks import PeakMeter
from .roofline import MachinePeaks, Precision

HIDDEN, INNER, VOCAB, LAYERS = 896, 4864, 151936, 24
SHAPES = ((1152, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER))
"""[outputs, inputs] of queries, keys and values; of attention's output; of gate and up; of down."""

HOPELESS = 2.0
"""Seconds: a contender that takes longer gets no further turns, and no more rows."""

HEADED = 64
"""Rows up to which the head takes part: in a prefill few rows sample."""

KEPT = {"bf16": torch.bfloat16, "int8": torch.int8, "int4": torch.int8, "fp32": torch.float32}
"""The dtype of weights; of int4 that of the head, whose layers have four bits."""

Product: TypeAlias = Callable[[Tensor], Tensor]

app = App(name="python -m charonia.bench.kernels", help=__doc__)


class ProductStack(NamedTuple):
    """One contender's products, layer by layer, and its head."""

    layers: list[list[Product]]
    head: Product

    def run(self, inputs: dict[int, Tensor]) -> None:
        for layer in self.layers:
            for product, (_, columns) in zip(layer, SHAPES, strict=True):
                product(inputs[columns])
        if len(inputs[HIDDEN]) <= HEADED:
            self.head(inputs[HIDDEN])


class ProductFigure(NamedTuple):
    """Seconds of the whole stack for `rows` rows, the best of each contender; and the machine peaks of the same run."""

    rows: int
    ours: float
    torchs: float
    limits: MachinePeaks

    def least(self, precision: Precision) -> float:
        """Seconds the machine needs at least."""
        return max(weight_bytes(precision, self.rows) / self.limits.read, self.operations / self.limits.peak)

    @property
    def operations(self) -> float:
        return 2.0 * self.rows * numbers(self.rows)


def numbers(rows: int) -> int:
    """Weights that a step of so many rows reads."""
    head = VOCAB * HIDDEN if rows <= HEADED else 0
    return LAYERS * sum(outputs * columns for outputs, columns in SHAPES) + head


def weight_bytes(precision: Precision, rows: int) -> float:
    """Bytes of those weights."""
    layers, width = numbers(HEADED + 1), KEPT[precision].itemsize
    return layers * (BYTES if precision == "int4" else width) + (numbers(rows) - layers) * width


def stacks(precision: Precision) -> list[ProductStack]:
    """Ours and torch's. Every layer has memory of its own; what is in it is the same."""
    *weights, head = _weights(precision)
    layers = [[_torchs(weight, KEPT[precision]) for weight in weights] for _ in range(LAYERS)]
    return [our_stack(precision), ProductStack(layers, _torchs(head, KEPT[precision]))]


def our_stack(precision: Precision) -> ProductStack:
    memory = HugePageArena()
    kept = KEPT[precision]
    *weights, head = _weights(precision)
    layers = [[_ours(weight, kept, memory) for weight in weights] for _ in range(LAYERS)]
    return ProductStack(layers, _ours(head, kept, memory))


def _weights(precision: Precision) -> list[Tensor | GroupedRows]:
    """Of one layer, and of the head: the same for the same shapes."""
    drawn = torch.Generator().manual_seed(1)
    *layer, head = [torch.randn(shape, generator=drawn).to(_x(precision)) for shape in (*SHAPES, (VOCAB, HIDDEN))]
    return [*map(quantize_int4, layer), head] if precision == "int4" else [*layer, head]


def _ours(weight: Tensor | GroupedRows, kept: torch.dtype, memory: HugePageArena) -> Product:
    if isinstance(weight, GroupedRows):
        outputs, inputs = weight.weights.shape
        small = GroupedMatmul(
            GroupedFormat(outputs, inputs, GROUP_SIZE, False, torch.bfloat16, torch.bfloat16), None, memory
        )
        small.pack(0, weight)
        return small
    packed = PackedMatmul(MatmulFormat(len(weight), weight.shape[1], kept, weight.dtype, weight.dtype), None, memory)
    packed.pack(0, weight)
    return packed


def _torchs(weight: Tensor | GroupedRows, kept: torch.dtype) -> Product:
    if isinstance(weight, GroupedRows):
        return TorchInt4Matmul(weight, None)
    if kept == torch.int8:
        quantized, scales = quantize_rows(weight)
        return TorchInt8Matmul(quantized.t(), scales, None)
    return torch_matmul(weight.clone(), None)


def measure(precision: Precision, rows: list[int], turns: int) -> Iterator[ProductFigure]:
    contenders = stacks(precision)
    gauge = PeakMeter([precision], "cpu", torch.get_num_threads())
    for count in rows:
        inputs = _inputs(precision, count)
        best, limits = [math.inf] * 2, MachinePeaks(0.0, 0.0)
        for _ in range(turns):
            for at in range(len(contenders)):
                best[at] = min(best[at], _seconds(contenders[at], inputs))
            now = gauge.measure()[precision]
            limits = MachinePeaks(max(limits.read, now.read), max(limits.peak, now.peak))
            contenders = contenders[: 1 if best[1] > HOPELESS else 2]
        yield ProductFigure(count, best[0], best[1], limits)


def row_seconds(precision: Precision, rows: Sequence[int], enough: float) -> dict[int, float]:
    """Seconds of all our products of a step, by rows: each the best of several, in turns for `enough` seconds."""
    stack, best = our_stack(precision), dict.fromkeys(rows, math.inf)
    inputs = {count: _inputs(precision, count) for count in rows}
    end = perf_counter() + enough
    while perf_counter() < end:
        for count in rows:
            best[count] = min(best[count], _seconds(stack, inputs[count]))
    return best


def _inputs(precision: Precision, rows: int) -> dict[int, Tensor]:
    return {columns: torch.randn(rows, columns).to(_x(precision)) for columns in (HIDDEN, INNER)}


def _x(precision: Precision) -> torch.dtype:
    return torch.float32 if precision == "fp32" else torch.bfloat16


@torch.inference_mode()
def _seconds(stack: ProductStack, inputs: dict[int, Tensor]) -> float:
    return seconds_of(lambda: stack.run(inputs))


def show(console: Console, precision: Precision, figures: list[ProductFigure]) -> None:
    """Our best product may be the machine's best: then it is the peak."""
    peak = max(chain(*((figure.limits.peak, figure.operations / figure.ours) for figure in figures)))
    columns = ["rows", "ms", "torch ms", "torch / ours", "over the first", "GB/s", "of", "GOP/s", "of", "of the limit"]
    table = table_of((), columns, f"{precision}, all products of a step")
    for figure in figures:
        limits = MachinePeaks(figure.limits.read, peak)
        table.add_row(
            str(figure.rows),
            f"{figure.ours * 1e3:.2f}",
            f"{figure.torchs * 1e3:.2f}",
            f"{figure.torchs / figure.ours:.2f}",
            f"{figure.ours / figures[0].ours:.2f}",
            f"{weight_bytes(precision, figure.rows) / figure.ours / 1e9:.1f}",
            f"{limits.read / 1e9:.1f}",
            f"{figure.operations / figure.ours / 1e9:.0f}",
            f"{peak / 1e9:.0f}",
            f"{figure._replace(limits=limits).least(precision) / figure.ours:.0%}",
        )
    console.print(table)


@app.default
def main(
    *,
    precisions: Annotated[list[Precision] | None, Parameter(consume_multiple=True)] = None,
    rows: Annotated[list[int] | None, Parameter(consume_multiple=True)] = None,
    turns: int = 5,
    threads: int = 0,
) -> None:
    """Measure.

    Parameters
    ----------
    precisions
        Of the weights: bf16, int8, int4, fp32.
    rows
        Of the activations: sequences that decode, or tokens of a prefill.
    turns
        Tries of each contender.
    threads
        0: as torch has them.
    """
    console = report_console()
    if threads:
        torch.set_num_threads(threads)
    console.print(f"kernels: {library.level()}, {torch.get_num_threads()} threads")
    for precision in precisions or ["bf16", "int8"]:
        figures = list(measure(precision, rows or [1, 2, 4, 8, 12, 16, 32, 128, 512], turns))
        show(console, precision, figures)


if __name__ == "__main__":
    app()
