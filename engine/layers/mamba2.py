"""Mamba-2 (arXiv 2405.21060): each head keeps a matrix that decays by a step of the token's own, and to which every
token adds; queries, keys and values are called C, B and x there."""

from itertools import accumulate

from torch import Tensor

from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.recurrence import Mamba2Spec
from ..checkpoint.weights import WeightLoader
from ..cpu.op_trace import untraceable_reason
from ..cpu.recurrent import ConvolutionColumns, HeadNorm, RecurrenceShape, ScanSteps
from .head_gate import build_head_gate
from .linear import OutputShard, RowLinear, column_linear
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
        inner = mamba.inner
        channels = mamba.state.channels
        self._input = column_linear(loader, _input_parts(f"{name}.in_proj", mamba), spec.hidden_size, bias=mamba.bias)
        sizes = channels, mamba.kernel
        self._convolution = StateConvolution(
            loader,
            f"{name}.conv1d",
            number,
            ConvolutionColumns(inner),
            sizes,
            bias=mamba.convolution_bias,
            activated=True,
        )
        keyed = mamba.groups * mamba.state_size
        shape = RecurrenceShape(mamba.heads, mamba.groups, mamba.state_size, mamba.head_dim, inner + keyed, inner, 0)
        heads = mamba.heads
        rates = loader.floats(f"{name}.A_log", heads).exp().neg()
        bias, skip = (loader.floats(f"{name}.{vector}", heads) for vector in ("dt_bias", "D"))
        steps = ScanSteps(rates, bias, skip, *mamba.step_limits)
        self._recurrence = build_selective_scan(loader, number, shape, inner + channels, steps)
        weight = loader.floats(f"{name}.norm.weight", inner).view(mamba.groups, -1) if mamba.normalised else None
        norm = HeadNorm(weight, spec.norm_eps, mamba.gates_first)
        self._output_gate = build_head_gate(loader, mamba.groups, inner // mamba.groups, 0, norm)
        self._out = RowLinear(loader, f"{name}.out_proj", inner, slice(0, inner), spec.hidden_size, bias=mamba.out_bias)
        parts = self._convolution, self._recurrence, self._output_gate, self._out
        self.untraceable = untraceable_reason(parts)

    def __call__(self, x: Tensor, context: StepContext) -> Tensor:
        wide = self._input(x, context)
        read = self._recurrence(self._convolution(wide, context), wide, context)
        return self._out(self._output_gate(read, wide), context)


def _input_parts(name: str, mamba: Mamba2Spec) -> list[OutputShard]:
    """The rows of the projection into a layer: gate, x, B, C and steps, those next to each other with one factor
    together."""
    keyed = mamba.groups * mamba.state_size
    ends = [*accumulate((mamba.inner, mamba.inner, keyed, keyed, mamba.heads))]
    parts: list[OutputShard] = []
    for first, end, factor in zip([0, *ends], ends, mamba.factors, strict=False):
        if parts and parts[-1].factor == factor:
            first = parts.pop().features.start
        parts.append(OutputShard(name, ends[-1], slice(first, end), factor))
    return parts
