"""The machine's limits, measured: the best read bandwidth and the best matrix product in each precision.

On a shared machine both move from minute to minute: measure them beside whatever they are compared with.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from .command import seconds_of
from .roofline import MachinePeaks, Precision

_ROWS, _IN, _OUT = 512, 1024, 4096
_TRIES = 5
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Product: TypeAlias = Callable[[], object]


class PeakMeter:
    """Holds what it measures with, so that a measurement is short: half a GB, and a few matrices."""

    def __init__(self, precisions: Sequence[Precision], device: str, threads: int) -> None:
        """The fastest way to multiply is found here, once."""
        torch.set_num_threads(threads)
        self.threads = threads
        self._big = torch.ones(1 << 27, device=device)
        size = 8 if device == "cuda" else 1
        self._ops = 2 * (size * _ROWS) * (size * _IN) * (size * _OUT)
        self._products = {precision: self._fastest(precision, device, size) for precision in precisions}

    @property
    def ways(self) -> dict[Precision, str]:
        """The ways to compute a product in each precision, of which the best counts."""
        return {precision: name for precision, (name, _) in self._products.items()}

    def measure(self) -> dict[Precision, MachinePeaks]:
        """The best of several short tries each, by precision."""
        read = self._big.nbytes / _best(lambda: self._big.sum().item(), _TRIES)
        return {
            precision: MachinePeaks(read, self._ops / _best(product, _TRIES))
            for precision, (_, product) in self._products.items()
        }

    def _fastest(self, precision: Precision, device: str, size: int) -> tuple[str, Product]:
        left = torch.randn(size * _ROWS, size * _IN, device=device)
        right = torch.randn(size * _OUT, size * _IN, device=device)
        timed = [(_once(product), name, product) for name, product in _ways(precision, left, right)]
        _, name, product = min(timed, key=lambda candidate: candidate[0])
        return name, product


def _ways(precision: Precision, left: Tensor, right: Tensor) -> Iterator[tuple[str, Product]]:
    """Ways to compute left @ right.T, by name. What converts its operands to fp32 first is at least as fast as that."""
    if left.device.type == "cpu" or precision == "fp32":
        columns = right.t().contiguous()
        yield "fp32 mm", lambda: left @ columns
    if precision in _DTYPES:
        yield from _float_ways(_DTYPES[precision], left, right)
    else:
        yield from _integer_ways(left, right)


def _float_ways(dtype: torch.dtype, left: Tensor, right: Tensor) -> Iterator[tuple[str, Product]]:
    a, b = left.to(dtype), right.to(dtype)
    yield f"{dtype} mm", lambda: _waited(a @ b.t())
    if left.device.type == "cpu":
        try:
            packed = torch.ops.mkldnn._reorder_linear_weight(b, len(a))
        except (RuntimeError, AttributeError):
            return
        yield f"{dtype} oneDNN packed", lambda: torch.ops.mkldnn._linear_pointwise(a, packed, None, "none", [], "")


def _integer_ways(left: Tensor, right: Tensor) -> Iterator[tuple[str, Product]]:
    a, b = ((matrix * 32).clamp(-127, 127).to(torch.int8) for matrix in (left, right))
    yield "_int_mm", lambda: _waited(torch._int_mm(a, b.t()))
    if left.device.type == "cpu" and "x86" in torch.backends.quantized.supported_engines:
        packed = _fbgemm(right)
        yield "fbgemm", lambda: torch.ops.quantized.linear_dynamic(left, packed, True)


def _fbgemm(weights: Tensor) -> object:
    torch.backends.quantized.engine = "x86"
    rows = len(weights)
    with warnings.catch_warnings():
        # Deprecated as a way to quantise models; here it is a ruler.
        warnings.simplefilter("ignore")
        scaled = torch.quantize_per_channel(
            weights, torch.full((rows,), 0.02), torch.zeros(rows, dtype=torch.int64), 0, torch.qint8
        )
    return torch.ops.quantized.linear_prepack(scaled, None)


def _waited(result: Tensor) -> object:
    """Asking for a number waits for the device; on the CPU nothing is outstanding."""
    return result[0, 0].item() if result.is_cuda else None


def _once(action: Product) -> float:
    first = seconds_of(action)
    # The first try pays for what is set up on the way, unless it was hopeless anyway.
    return first if first > 0.3 else _best(action, 2)


def _best(action: Product, tries: int) -> float:
    """Seconds of the fastest try."""
    return min(seconds_of(action) for _ in range(tries))
