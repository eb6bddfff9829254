"""What LoRA adapters (arXiv 2106.09685) add to a product, row by row as a step says."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from ..checkpoint.weights import TensorSlice, WeightLoader
from ..cpu import library
from ..cpu.lora import NativeLora, StepAdapters
from ..cpu.op_trace import SymbolicTensor


class LoraProduct:
    """What adapters add to product `number` of a rank. `native`: the kernels that do it, where they serve."""

    def __init__(self, number: int, native: NativeLora | None) -> None:
        self._number, self._native = number, native

    def add(self, x: Tensor, out: Tensor, step: StepAdapters) -> None:
        """Adds it to the product's result `out` [N, outputs] for x [N, inputs]."""
        if self._native is not None:
            self._native.add(x, out, step)
            return
        for adapter, places in step.segments(x.device):
            for part in adapter.parts[self._number]:
                added = F.linear(x[places], part.a).mul_(part.scale) @ part.b
                out[:, part.first : part.first + part.outputs].index_add_(0, places, added)

    def trace(self, x: SymbolicTensor, product: Callable[[SymbolicTensor], SymbolicTensor]) -> SymbolicTensor:
        """Record `product` of x and what is added to it; its result."""
        assert self._native is not None, "what is recorded are kernels"
        shrunk = self._native.trace_shrink(x)
        out = product(x)
        self._native.trace_expand(shrunk, out)
        return out


def lora_product(loader: WeightLoader, slices: list[TensorSlice]) -> LoraProduct | None:
    """What adapters add to the product with `slices`, one below the other; None where there are no adapters."""
    if loader.adaptable is None:
        return None
    loader.adaptable.append(slices)
    number, matrices = len(loader.adaptable) - 1, len({each.name for each in slices})
    native = library.supports(loader.dtype, loader.device)
    return LoraProduct(number, NativeLora(number, matrices * loader.context.max_lora_rank) if native else None)
