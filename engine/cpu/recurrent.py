"""Layers that keep a state of each sequence in C (`recurrent.h`): causal convolutions, the gated delta rule (arXiv
2412.06464), Mamba's selective scans (arXiv 2405.21060, 2312.00752), and the gates behind them and behind attention.

The state of one layer is two tensors, or one of them, contiguous, with a line for each slot (`step_states.py`):

    windows   [slots, kernel - 1, channels]          in the model's dtype: a convolution's last inputs, oldest first
    matrices  [slots, heads, key size, value size]   in float32

Mamba-2's key size is its state size N and its value size the head dim P, so that its state h [P, N] lies transposed; B
is the key, C the query, and its groups are key heads. What a slot holds before its row begins does not matter: a row
whose source is -1 begins with zeros. A call reads the sources, computes all of a row's tokens, and writes the row's
slot and the saves: nothing else is to be copied or cleared.

Inputs are lines of [N, width], float32 or bfloat16, the last axis contiguous, of which a layer takes the columns that
it is built with: one product may have made all of them. Inside all is float32; results are rounded once. A sequence's
bits depend on nothing but the sequence. Shapes are not checked. tests/engine/cpu/test_recurrent.py has the reference.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..step_batch import StepBatch
from ..step_states import StepStates
from . import library
from .attention import StepStruct
from .library import struct_fields
from .op_trace import CONVOLVE, GATE_HEADS, RECUR, SCAN, OpStruct, SymbolicTensor, TensorOrSymbol

MAX_KEY_SIZE = 256
"""The longest keys that the kernels take, as in recurrent.h."""

_NONE = -1
_DELTA_RULE, _SELECTIVE_SCAN = range(2)


class MovesStruct(ctypes.Structure):
    """`StateMoves` of recurrent.h."""

    _fields_ = struct_fields("p sources save_begins save_counts save_slots")


class ConvolutionStruct(ctypes.Structure):
    """`Convolution` of recurrent.h."""

    _fields_ = struct_fields("l channels kernel inputs input_gates output_gates", "p weight bias", "i activated kind")


class RecurrenceStruct(ctypes.Structure):
    """`Recurrence` of recurrent.h."""

    _fields_ = struct_fields(
        "l heads key_heads key_size value_size queries keys values decay_gates betas",
        "p rates bias skip",
        "f scale least most",
        "i rule kind gates_kind",
    )


class ChannelScanStruct(ctypes.Structure):
    """`ChannelScan` of recurrent.h."""

    _fields_ = struct_fields("l channels size", "p rates bias skip", "i kind")


class HeadGateStruct(ctypes.Structure):
    """`HeadGate` of elementwise.h."""

    _fields_ = struct_fields("l heads n weights column", "p weight", "f eps", "i gates_first sigmoid kind")


class LayerStates:
    """The states of each layer that keeps some, as C reads them: `windows` and `matrices` by the layer's number among
    these, contiguous tensors; None: it has none. Valid as long as this object lives."""

    def __init__(self, windows: Sequence[Tensor | None], matrices: Sequence[Tensor | None]) -> None:
        self._kept = windows, matrices
        columns = ([0 if state is None else state.data_ptr() for state in states] for states in (windows, matrices))
        self.windows, self.matrices = (np.array(column, np.int64) for column in columns)
        """The tensors' addresses, int64 [layers] each."""


class StepSlots:
    """A step's rows and the slots of their states in all `layers`, as C reads them."""

    def __init__(self, batch: StepBatch, states: StepStates, layers: LayerStates) -> None:
        self.layers = layers
        self._kept = batch, states
        self._step = StepStruct(*batch.c_fields)
        self.moves = MovesStruct(*states.c_fields)
        self.addresses = ctypes.addressof(self._step), ctypes.addressof(self.moves)


class ConvolutionColumns(NamedTuple):
    """Where a convolution's numbers begin in a line of its input: `inputs`, what they are multiplied with before it,
    and what its results are multiplied with (LFM2's B and C); None: nothing."""

    inputs: int
    input_gates: int | None = None
    output_gates: int | None = None


class CausalConvolution:
    """A depthwise convolution over a sequence's tokens: `weight` [channels, kernel], the last for the token itself, and
    `bias` [channels] or none, both float32; then SiLU if `activated`."""

    untraceable: str | None = None

    def __init__(
        self, weight: Tensor, bias: Tensor | None, activated: bool, columns: ConvolutionColumns, dtype: torch.dtype
    ) -> None:
        self._weight, self._bias = weight.T.contiguous(), bias
        self.channels, self.kernel = weight.shape
        gates = (_NONE if column is None else column for column in columns[1:])
        addresses = self._weight.data_ptr(), None if bias is None else bias.data_ptr()
        sizes = self.channels, self.kernel, columns.inputs, *gates
        self._struct = ConvolutionStruct(*sizes, *addresses, activated, library.DTYPE_CODES[dtype])
        self._convolve = library.bind_function("charonia_convolve")

    def __call__(self, x: TensorOrSymbol, layer: int, slots: StepSlots | None) -> TensorOrSymbol:
        """x [N, width] -> [N, channels]; changes the windows of `layer`. A symbolic x needs no slots."""
        if isinstance(x, SymbolicTensor):
            operation = OpStruct(kind=CONVOLVE, what=ctypes.addressof(self._struct), layer=layer, stride=x.width)
            return x.trace.add_op(operation, x, self.channels)
        assert slots is not None, "a step has states"
        out = torch.empty((len(x), self.channels), dtype=x.dtype)
        addresses = x.data_ptr(), x.stride(0), int(slots.layers.windows[layer]), out.data_ptr()
        self._convolve(ctypes.addressof(self._struct), *slots.addresses, *addresses)
        return out


class RecurrenceShape(NamedTuple):
    """The heads of a recurrence, and where their numbers begin in a line of their input: queries and keys [key heads,
    key size], values [heads, value size]."""

    heads: int
    key_heads: int
    key_size: int
    value_size: int
    queries: int
    keys: int
    values: int

    @property
    def channels(self) -> int:
        """Numbers of all queries, keys and values of a token."""
        return 2 * self.key_heads * self.key_size + self.heads * self.value_size


class Recurrence:
    """A recurrence over the matrices of its heads: `gated_delta_rule` or `selective_scan`."""

    untraceable: str | None = None

    def __init__(self, shape: RecurrenceShape, struct: RecurrenceStruct, kept: tuple[Tensor | None, ...]) -> None:
        self._shape = shape
        self._struct = struct
        self._kept = kept
        self._recur = library.bind_function("charonia_recur")

    def __call__(self, x: TensorOrSymbol, gates: TensorOrSymbol, layer: int, slots: StepSlots | None) -> TensorOrSymbol:
        """x [N, width] with queries, keys and values, and gates [N, other width] -> [N, heads * value size]; changes
        the matrices of `layer`. Symbolic ones need no slots."""
        width = self._shape.heads * self._shape.value_size
        self._struct.gates_kind = library.DTYPE_CODES[gates.dtype]
        if isinstance(x, SymbolicTensor):
            sizes = {"layer": layer, "stride": x.width, "size": gates.width}
            operation = OpStruct(kind=RECUR, what=ctypes.addressof(self._struct), **sizes)
            return x.trace.add_op(operation, x, width, delta=gates)
        assert slots is not None, "a step has states"
        out = torch.empty((len(x), width), dtype=x.dtype)
        inputs = x.data_ptr(), x.stride(0), gates.data_ptr(), gates.stride(0), int(slots.layers.matrices[layer])
        self._recur(ctypes.addressof(self._struct), *slots.addresses, *inputs, out.data_ptr())
        return out


def gated_delta_rule(
    shape: RecurrenceShape, decay_column: int, beta_column: int, rates: Tensor, bias: Tensor, dtype: torch.dtype
) -> Recurrence:
    """Queries and keys of length 1, queries by key_size^-0.5; for each token S *= exp(rate * softplus(decay + bias)),
    then S += k (sigmoid(beta) (v - k^T S)), and the result is q^T S. `rates`, -exp(A_log), and `bias`, dt_bias, are
    float32 [heads]. Decays and betas, [heads], begin at their columns of the gates."""
    columns = *shape, decay_column, beta_column
    addresses = rates.data_ptr(), bias.data_ptr(), None
    kind = library.DTYPE_CODES[dtype]
    struct = RecurrenceStruct(*columns, *addresses, shape.key_size**-0.5, 0.0, 0.0, _DELTA_RULE, kind, kind)
    return Recurrence(shape, struct, (rates, bias))


class ScanSteps(NamedTuple):
    """What a selective scan's steps dt are made with: `rates` -exp(A_log), `bias` dt_bias, and `skip` D, each float32
    [heads]; and their bounds."""

    rates: Tensor
    bias: Tensor
    skip: Tensor | None
    least: float = 0.0
    most: float = float("inf")


def selective_scan(shape: RecurrenceShape, step_column: int, steps: ScanSteps, dtype: torch.dtype) -> Recurrence:
    """For each token dt = softplus(step + bias) within its bounds, S *= exp(rate * dt), S += B (dt x), and the result
    is C^T S + skip x. Steps, [heads], begin at a column of the gates."""
    rates, bias, skip, least, most = steps
    addresses = rates.data_ptr(), bias.data_ptr(), None if skip is None else skip.data_ptr()
    kind = library.DTYPE_CODES[dtype]
    struct = RecurrenceStruct(*shape, step_column, _NONE, *addresses, 1.0, least, most, _SELECTIVE_SCAN, kind, kind)
    return Recurrence(shape, struct, (rates, bias, skip))


class ChannelScan:
    """Mamba's first selective scan (arXiv 2312.00752), whose channels keep `size` numbers each, with decays of their
    own: dt = softplus(step + bias), S = exp(rate dt) S + B dt x, and the result is C^T S + skip x. A layer's matrices
    are [slots, 1, size, channels]."""

    untraceable: str | None = None

    def __init__(self, steps: ScanSteps, dtype: torch.dtype) -> None:
        """`steps`: rates [size, channels], bias and skip [channels], without bounds."""
        self._kept = rates, bias, skip = steps.rates.contiguous(), steps.bias, steps.skip
        assert skip is not None, "what goes past the state is multiplied with something"
        addresses = rates.data_ptr(), bias.data_ptr(), skip.data_ptr()
        size, channels = rates.shape
        self._struct = ChannelScanStruct(channels, size, *addresses, library.DTYPE_CODES[dtype])
        self._scan = library.bind_function("charonia_scan_channels")

    def __call__(
        self, x: TensorOrSymbol, pairs: TensorOrSymbol, steps: TensorOrSymbol, layer: int, slots: StepSlots | None
    ) -> TensorOrSymbol:
        """x and steps [N, channels], and pairs [N, 2 * size], B and then C -> [N, channels]; changes the matrices of
        `layer`. Symbolic ones need no slots."""
        if isinstance(x, SymbolicTensor):
            sizes = {"layer": layer, "stride": pairs.width, "size": x.width}
            operation = OpStruct(kind=SCAN, what=ctypes.addressof(self._struct), **sizes)
            return x.trace.add_op(operation, x, x.width, delta=steps, aside=pairs)
        assert slots is not None, "a step has states"
        out = torch.empty_like(x)
        inputs = x.data_ptr(), x.stride(0), pairs.data_ptr(), pairs.stride(0), steps.data_ptr(), steps.stride(0)
        state = int(slots.layers.matrices[layer])
        self._scan(ctypes.addressof(self._struct), *slots.addresses, *inputs, state, out.data_ptr())
        return out


class HeadNorm(NamedTuple):
    """An RMS norm of each head: `weight` float32 [n] or [heads, n]; None: it has no norm. The gate, through SiLU or a
    `sigmoid`, multiplies its result, or if it `gates_first` what is normalised."""

    weight: Tensor | None
    eps: float
    gates_first: bool = False
    sigmoid: bool = False


class HeadGate:
    """Heads [heads, n] with a gate for each number: a `norm` and its gate, or the sigmoid of the gate alone."""

    untraceable: str | None = None

    def __init__(self, heads: int, size: int, column: int, dtype: torch.dtype, norm: HeadNorm | None = None) -> None:
        """Gates, [heads, n], begin at `column` of their lines."""
        self._weight = None if norm is None or norm.weight is None else norm.weight.contiguous()
        weights, address = 1, None
        if self._weight is not None:
            weights, address = self._weight.numel() // size, self._weight.data_ptr()
        eps, gates_first, sigmoid = (0.0, False, True) if norm is None else norm[1:]
        kind = library.DTYPE_CODES[dtype]
        self._struct = HeadGateStruct(heads, size, weights, column, address, eps, gates_first, sigmoid, kind)
        self._gate = library.bind_function("charonia_gate_heads")

    def __call__(self, x: TensorOrSymbol, gates: TensorOrSymbol) -> TensorOrSymbol:
        """x [N, heads * n], contiguous, and gates [N, width] -> [N, heads * n]."""
        if isinstance(x, SymbolicTensor):
            operation = OpStruct(kind=GATE_HEADS, what=ctypes.addressof(self._struct), size=gates.width)
            return x.trace.add_op(operation, x, x.width, delta=gates)
        out = torch.empty_like(x)
        addresses = x.data_ptr(), gates.data_ptr(), gates.stride(0), out.data_ptr()
        self._gate(ctypes.addressof(self._struct), *addresses, len(x))
        return out
