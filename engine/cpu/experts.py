"""Mixtures of experts in C (`experts.h`): a router's scores choose the experts of each token, and each expert computes
the rows that chose it. `layers/mlp.py` has the reference.

A row's result depends on nothing but the row: an expert's sums are those of its products (`matmul.py`), a token's
experts are added in float32, ascending by number, and rounded once.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import library
from .elementwise import ACTIVATION_CODES, SQUARED_RELU
from .library import struct_fields
from .matmul import MatrixProduct
from .op_trace import EXPERTS, GATE_ROWS, OpStruct, SymbolicTensor, TensorOrSymbol


class _RouterStruct(ctypes.Structure):
    """`Router` of experts.h."""

    _fields_ = struct_fields(
        "l count per_token groups chosen_groups group_judges",
        "p bias scales",
        "f least_sum scale",
        "i sigmoid normalised",
    )


class _MixtureStruct(ctypes.Structure):
    """`Mixture` of experts.h."""

    _fields_ = [
        ("router", _RouterStruct),
        *struct_fields("l first experts hidden outputs intermediate kind_count", "p gate_up down kinds"),
        *struct_fields("i activation kind"),
    ]


class Routing(NamedTuple):
    """How a token's experts are chosen and weighed by their scores; `bias`, where they are chosen, and `scales` of
    their weights are float32 [experts]."""

    experts: int
    """All that the router knows, here or not."""
    per_token: int
    sigmoid: bool
    """Whether the weights are sigmoids of the scores, and not a softmax."""
    normalised: bool
    """Whether a token's weights are divided by their sum, and `least_sum` of sigmoids."""
    least_sum: float = 0.0
    scale: float = 1.0
    bias: Tensor | None = None
    scales: Tensor | None = None
    groups: int = 1
    """Groups of neighbouring experts, of the best of which a token's are chosen (arXiv 2405.04434)."""
    chosen_groups: int = 1
    group_judges: int = 1
    """How many of a group's best experts it is judged by, with their sum."""


class FusedMixture:
    """x [N, hidden] and a router's scores, float32 [N, experts] -> the weighted sum of the experts that are here."""

    def __init__(
        self,
        routing: Routing,
        experts: Sequence[tuple[MatrixProduct, MatrixProduct]],
        first: int,
        activation: str,
        dtype: torch.dtype,
    ) -> None:
        """`experts`: gate and up as one product, and down, of each expert from number `first` on; x is of `dtype`.

        Raises:
            ValueError: fewer experts may be chosen than a token takes.
        """
        if routing.per_token > routing.experts // routing.groups * min(routing.chosen_groups, routing.groups):
            raise ValueError(f"{routing.per_token} experts can't be chosen of {routing.experts}")
        halves, downs = zip(*experts, strict=True)
        kinds = {product.kind: product for product in (*halves, *downs)}
        self._kept = routing, experts, [_addresses(products) for products in (halves, downs, list(kinds.values()))]
        outputs = halves[0].outputs
        router = _RouterStruct(
            routing.experts,
            routing.per_token,
            routing.groups,
            routing.chosen_groups,
            routing.group_judges,
            *(None if tensor is None else tensor.data_ptr() for tensor in (routing.bias, routing.scales)),
            routing.least_sum,
            routing.scale,
            routing.sigmoid,
            routing.normalised,
        )
        sizes = halves[0].inputs, outputs, outputs if activation == SQUARED_RELU else outputs // 2, len(kinds)
        arrays = (ctypes.addressof(array) for array in self._kept[2])
        codes = ACTIVATION_CODES[activation], library.DTYPE_CODES[dtype]
        self._struct = _MixtureStruct(router, first, len(experts), *sizes, *arrays, *codes)
        self._mix = library.bind_function("charonia_mix")

    def __call__(self, x: TensorOrSymbol, scores: TensorOrSymbol) -> TensorOrSymbol:
        at = ctypes.addressof(self._struct)
        if isinstance(x, SymbolicTensor):
            return x.trace.add_op(OpStruct(kind=EXPERTS, what=at), x, x.width, delta=scores)
        x, scores = x.contiguous(), scores.contiguous()
        out = torch.empty_like(x)
        if self._mix(at, x.data_ptr(), scores.data_ptr(), len(x), out.data_ptr()):
            raise MemoryError("no memory for a mixture of experts")
        return out


def gate_rows(x: TensorOrSymbol, gates: TensorOrSymbol) -> TensorOrSymbol:
    """x [N, n], contiguous, times the sigmoid of each row's gate, float32 [N, 1], in place; the sigmoid is rounded to
    x's dtype first."""
    if isinstance(x, SymbolicTensor):
        x.trace.add_in_place(OpStruct(kind=GATE_ROWS, size=x.width), x, gates)
    else:
        kind = library.DTYPE_CODES[x.dtype]
        library.bind_function("charonia_gate_rows")(x.data_ptr(), gates.data_ptr(), *x.shape, kind)
    return x


def _addresses(products: Sequence[MatrixProduct]) -> "ctypes.Array[ctypes.c_void_p]":
    return (ctypes.c_void_p * len(products))(*(product.address for product in products))
