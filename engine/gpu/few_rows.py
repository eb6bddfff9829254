"""Products of few rows by cuBLAS or by a kernel of ours, whichever is faster on the device. Without Triton."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from .graphs import Launches, Recorder
from .runtime import FEW_ROWS

if TYPE_CHECKING:
    from .gate import TritonGate

log = logging.getLogger(__name__)

LEAST_GAIN = 1.03
"""How much faster the kernel must be: what is nearly as fast would be chosen at one start and not at the next."""

_MEASURED_ROWS = (1, FEW_ROWS)
_MOST_TURNS = 16
"""Weights of one shape that are measured in turn: more than the device caches, where a model has as many."""

Timer: TypeAlias = Callable[[Launches], float]
"""Seconds of what a function launches."""


class FewRowMatmul:
    """x [N, in] -> x W^T + b [N, out] by cuBLAS, and where it `uses_kernel` of up to FEW_ROWS rows by a kernel, to the
    same bits whichever rows are beside one."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        from .few_rows_kernel import multiply_few_rows

        self.weight = weight.contiguous()
        self.bias = bias
        self.uses_kernel = False
        self.activation = ""
        """The gate behind it, which `gated` computes with it."""
        self._gate: TritonGate | None = None
        self._multiply = multiply_few_rows

    def end_with(self, activation: str, gate: "TritonGate") -> None:
        """Have `gated` compute this gate of its results."""
        self.activation = activation
        self._gate = gate

    def __call__(self, x: Tensor) -> Tensor:
        if self.uses_kernel and 0 < len(x) <= FEW_ROWS:
            return self._multiply(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)

    def gated(self, x: Tensor) -> Tensor:
        """What the gate makes of the product."""
        if self.uses_kernel and 0 < len(x) <= FEW_ROWS:
            return self._multiply(x, self.weight, self.bias, self.activation)
        assert self._gate is not None, "a gate was given"
        return self._gate(F.linear(x, self.weight, self.bias))

    @property
    def shape(self) -> tuple[int, int, bool, str]:
        """What decides how long it takes."""
        return *self.weight.shape, self.bias is not None, self.activation


class FewRowProducts:
    """The products of a rank whose few rows the kernel may compute. `by_kernel`: it does, without a measurement."""

    def __init__(self, by_kernel: bool) -> None:
        self._by_kernel = by_kernel
        self._made: list[FewRowMatmul] = []

    def make(self, weight: Tensor, bias: Tensor | None) -> FewRowMatmul:
        product = FewRowMatmul(weight, bias)
        product.uses_kernel = self._by_kernel
        self._made.append(product)
        return product

    @contextmanager
    def forced(self, by_kernel: bool) -> Iterator[None]:
        """The kernel computes all meanwhile, or none, for measurements."""
        before = [product.uses_kernel for product in self._made]
        _use_kernel(self._made, by_kernel)
        try:
            yield
        finally:
            for product, uses_kernel in zip(self._made, before, strict=True):
                product.uses_kernel = uses_kernel

    @torch.inference_mode()
    def choose(self, seconds: Timer) -> None:
        """Measure which is faster for each shape, unless the kernel is used anyway; to be called when all are built.
        Where a measurement fails, cuBLAS computes."""
        if self._by_kernel:
            return
        by_shape = defaultdict[tuple[int, int, bool, str], list[FewRowMatmul]](list)
        for product in self._made:
            by_shape[product.shape].append(product)
        for (outputs, inputs, _, _), products in by_shape.items():
            try:
                cublas, kernel = _measure(products[:_MOST_TURNS], seconds)
            except Exception as error:
                log.warning("the kernel for few rows fails for [%d, %d]: %s", outputs, inputs, error)
                _use_kernel(products, False)
                continue
            chosen = kernel * LEAST_GAIN <= cublas
            _use_kernel(products, chosen)
            message = "few rows of [%d, %d] are computed by %s: cuBLAS takes %.1f us, the kernel %.1f"
            log.info(message, outputs, inputs, "the kernel" if chosen else "cuBLAS", 1e6 * cublas, 1e6 * kernel)


def _measure(products: Sequence[FewRowMatmul], seconds: Timer) -> tuple[float, float]:
    """Seconds of a product by cuBLAS and by the kernel, the mean of few rows and many, each the least of three."""
    times = {False: 0.0, True: 0.0}
    for rows in _MEASURED_ROWS:
        x = products[0].weight.new_ones(rows, products[0].weight.shape[1])
        least = dict.fromkeys(times, float("inf"))
        for _ in range(3):
            for by_kernel in times:
                _use_kernel(products, by_kernel)
                taken = seconds(lambda x=x: _compute(products, x))  # type: ignore[misc]
                least[by_kernel] = min(least[by_kernel], taken)
        for by_kernel, taken in least.items():
            times[by_kernel] += taken / len(products) / len(_MEASURED_ROWS)
    return times[False], times[True]


def _use_kernel(products: Sequence[FewRowMatmul], by_kernel: bool) -> None:
    for product in products:
        product.uses_kernel = by_kernel


def _compute(products: Sequence[FewRowMatmul], x: Tensor) -> None:
    for product in products:
        if product.activation:
            product.gated(x)
        else:
            product(x)


def graph_timer(record: Recorder, device: torch.device, times: int = 5) -> Timer:
    """Times launches in a graph that `record` makes, without what the host takes for them."""

    def seconds(launches: Launches) -> float:
        launches()  # which compiles kernels
        replay = record(launches)
        replay()
        torch.cuda.synchronize(device)
        began = perf_counter()
        for _ in range(times):
            replay()
        torch.cuda.synchronize(device)
        return (perf_counter() - began) / times

    return seconds
