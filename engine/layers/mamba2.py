"""Mamba-2 (arXiv 2405.21060): each head keeps a matrix that decays by a step of the token's own, and to which every
token adds; queries, keys and values are called C, B and x there."""

from torch import Tensor

from ..checkpoint.build_context import kv_head_slice, rank_slice
from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.recurrence import Mamba2Spec
from ..checkpoint.weights import WeightLoader
from ..cpu.op_trace import untraceable_reason
from ..cpu.recurrent import ConvolutionColumns, HeadNorm, RecurrenceShape, ScanSteps
from .head_gate import BuiltHeadGate, SplitHeadGate, build_head_gate
from .linear import OutputShard, RowLinear, column_linear, join_shards
from .recurrence import build_selective_scan
from .state_convolution import StateConvolution
from .step_context import StepContext


class Mamba2:
    """x [N, hidden] -> [N, hidden], layer `index` of the model. The input projection makes the output's gates, x, B and
    C together, and the steps, side by side."""

    def __init__(self, loader: WeightLoader, spec: ModelSpec, index: int, name: str) -> None:
        mamba = spec.recurrence
        assert isinstance(mamba, Mamba2Spec), "config.json was read for such layers"
        number = spec.state_index(index, loader.stage.layers(spec.layers).start)
        group = loader.group
        own = mamba.share(group.rank, group.size)
        heads, groups = rank_slice(mamba.heads, group), kv_head_slice(mamba.groups, group)
        values = _features(heads, mamba.head_dim)
        keys = _features(groups, mamba.state_size)
        inputs = _input_parts(f"{name}.in_proj", mamba, values, keys, heads)
        self._input = column_linear(loader, inputs, spec.hidden_size, bias=mamba.bias)
        inner = own.inner
        channels = own.state.channels
        sizes = mamba.state.channels, mamba.kernel
        self._convolution = StateConvolution(
            loader,
            f"{name}.conv1d",
            number,
            ConvolutionColumns(inner),
            sizes,
            _convolved(mamba, values, keys),
            bias=mamba.convolution_bias,
            activated=True,
        )
        keyed = own.groups * own.state_size
        shape = RecurrenceShape(own.heads, own.groups, own.state_size, own.head_dim, inner + keyed, inner, 0)
        rates, bias, skip = (loader.floats(f"{name}.{part}", mamba.heads)[heads] for part in ("A_log", "dt_bias", "D"))
        rates = rates.exp().neg()
        steps = ScanSteps(rates, bias, skip, *mamba.step_limits)
        self._recurrence = build_selective_scan(loader, number, shape, inner + channels, steps)
        weight = None
        if mamba.normalised:
            weight = loader.floats(f"{name}.norm.weight", mamba.inner)[values].view(own.groups, -1)
        norm = HeadNorm(weight, spec.norm_eps, mamba.gates_first)
        self._output_gate: BuiltHeadGate | SplitHeadGate
        if mamba.normalised and mamba.groups < group.size:
            self._output_gate = SplitHeadGate(group, mamba.groups, inner, norm)
        else:
            self._output_gate = build_head_gate(loader, own.groups, inner // own.groups, 0, norm)
        out_bias = mamba.out_bias
        self._out = RowLinear(loader, f"{name}.out_proj", mamba.inner, values, spec.hidden_size, bias=out_bias)
        parts = self._convolution, self._recurrence, self._output_gate, self._out
        self.untraceable = untraceable_reason(parts)
        self.host_bound = self._convolution.host_bound or self._recurrence.host_bound

    def __call__(self, x: Tensor, context: StepContext) -> Tensor:
        wide = self._input(x, context)
        read = self._recurrence(self._convolution(wide, context), wide, context)
        return self._out(self._output_gate(read, wide), context)


def _features(heads: slice, size: int) -> slice:
    return slice(heads.start * size, heads.stop * size)


def _shifted(features: slice, by: int) -> slice:
    return slice(features.start + by, features.stop + by)


def _convolved(mamba: Mamba2Spec, values: slice, keys: slice) -> list[slice]:
    """The channels of x, B and C that a rank has, of those of all."""
    keyed = mamba.groups * mamba.state_size
    return [values, _shifted(keys, mamba.inner), _shifted(keys, mamba.inner + keyed)]


def _input_parts(name: str, mamba: Mamba2Spec, values: slice, keys: slice, heads: slice) -> list[OutputShard]:
    """The rows of the projection into a layer that a rank has: of gate, x, B, C and steps."""
    convolved = [_shifted(part, mamba.inner) for part in _convolved(mamba, values, keys)]
    steps = mamba.inner + mamba.state.channels
    rows = [values, *convolved, _shifted(heads, steps)]
    return join_shards(
        OutputShard(name, steps + mamba.heads, part, factor) for part, factor in zip(rows, mamba.factors, strict=True)
    )
