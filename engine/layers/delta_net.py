"""Linear attention by the gated delta rule (arXiv 2412.06464): each value head keeps a matrix that maps keys to values,
which decays, and which every token corrects by what it gets wrong of the token's value."""

from torch import Tensor

from ..checkpoint.build_context import rank_slice
from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.recurrence import DeltaNetSpec
from ..checkpoint.weights import WeightLoader
from ..cpu.op_trace import untraceable_reason
from ..cpu.recurrent import ConvolutionColumns, HeadNorm, RecurrenceShape
from .head_gate import build_head_gate
from .linear import OutputShard, RowLinear, column_linear, column_slices, join_shards
from .product_matrix import SMALL_LAYER, build_matmul
from .recurrence import DeltaRuleGates, build_delta_rule
from .state_convolution import StateConvolution
from .step_context import StepContext


class GatedDeltaNet:
    """x [N, hidden] -> [N, hidden], layer `index` of the model."""

    def __init__(self, loader: WeightLoader, spec: ModelSpec, index: int, name: str) -> None:
        net = spec.recurrence
        assert isinstance(net, DeltaNetSpec), "config.json was read for such layers"
        number = spec.state_index(index, loader.stage.layers(spec.layers).start)
        hidden = spec.hidden_size
        own = net.share(loader.group.rank, loader.group.size)
        heads = rank_slice(net.key_heads, loader.group)
        value_heads = rank_slice(net.value_heads, loader.group)
        keys = slice(heads.start * net.key_dim, heads.stop * net.key_dim)
        values = slice(value_heads.start * net.value_dim, value_heads.stop * net.value_dim)
        inputs, gates = _projections(name, net, heads)
        grouped_inputs, grouped_gates = _grouped_projections(name, net, heads)
        if loader.has(f"{name}.in_proj_qkvz.weight"):
            inputs = grouped_inputs
        if loader.has(f"{name}.in_proj_ba.weight"):
            gates = grouped_gates
        self._input = column_linear(loader, inputs, hidden, bias=False)
        # Few numbers, and the decays are exponents of theirs: not quantised.
        self._gates = build_matmul(loader, column_slices(gates, hidden), use=SMALL_LAYER)
        mixed = own.state.channels
        self._convolution = StateConvolution(
            loader,
            f"{name}.conv1d",
            number,
            ConvolutionColumns(0),
            (net.state.channels, net.kernel),
            _mixed_parts(net, keys, values),
            bias=False,
            activated=True,
        )
        shape = RecurrenceShape(
            own.value_heads, own.key_heads, own.key_dim, own.value_dim, 0, own.key_width, 2 * own.key_width
        )
        rates, bias = (loader.floats(f"{name}.{part}", net.value_heads)[value_heads] for part in ("A_log", "dt_bias"))
        columns = DeltaRuleGates(rates.exp().neg(), bias, 0, own.value_heads)
        self._recurrence = build_delta_rule(loader, number, shape, columns)
        norm = HeadNorm(loader.floats(f"{name}.norm.weight", net.value_dim), spec.norm_eps)
        self._output_gate = build_head_gate(loader, own.value_heads, own.value_dim, mixed, norm)
        self._out = RowLinear(loader, f"{name}.out_proj", net.value_width, values, hidden, bias=False)
        parts = self._convolution, self._recurrence, self._output_gate, self._out
        self.untraceable = untraceable_reason(parts)
        self.host_bound = self._convolution.host_bound or self._recurrence.host_bound

    def __call__(self, x: Tensor, context: StepContext) -> Tensor:
        wide = self._input(x, context)
        read = self._recurrence(self._convolution(wide, context), self._gates(x), context)
        return self._out(self._output_gate(read, wide), context)


def _mixed_parts(net: DeltaNetSpec, keys: slice, values: slice) -> list[slice]:
    """The features of queries, keys and values that a rank has, of those of all."""
    firsts = 0, net.key_width, 2 * net.key_width
    parts = zip((keys, keys, values), firsts, strict=True)
    return [slice(first + part.start, first + part.stop) for part, first in parts]


def _projections(name: str, net: DeltaNetSpec, heads: slice) -> tuple[list[OutputShard], list[OutputShard]]:
    """The projections of these key heads, and of the value heads that they serve: queries, keys and values in one
    matrix, and the outputs' gates; and decays and betas."""
    served = net.value_heads // net.key_heads
    value_heads = slice(heads.start * served, heads.stop * served)
    keys = slice(heads.start * net.key_dim, heads.stop * net.key_dim)
    values = slice(value_heads.start * net.value_dim, value_heads.stop * net.value_dim)
    mixed = 2 * net.key_width + net.value_width
    wide = [OutputShard(f"{name}.in_proj_qkv", mixed, part) for part in _mixed_parts(net, keys, values)]
    gate = OutputShard(f"{name}.in_proj_z", net.value_width, values)
    small = [OutputShard(f"{name}.in_proj_{part}", net.value_heads, value_heads) for part in "ab"]
    return [*join_shards(wide), gate], small


def _grouped_projections(name: str, net: DeltaNetSpec, heads: slice) -> tuple[list[OutputShard], list[OutputShard]]:
    """The same of two matrices that have them key head by key head, as Qwen 3-Next's do."""
    served = net.value_heads // net.key_heads
    values = served * net.value_dim

    def parts(matrix: str, sizes: list[int]) -> list[list[OutputShard]]:
        """The rows of each part with these sizes in a key head's lines, for these key heads."""
        line = sum(sizes)
        firsts = [sum(sizes[:number]) for number in range(len(sizes))]
        shard = OutputShard(f"{name}.{matrix}", net.key_heads * line, slice(0))
        return [
            [
                shard._replace(features=slice(head * line + first, head * line + first + size))
                for head in range(heads.start, heads.stop)
            ]
            for first, size in zip(firsts, sizes, strict=True)
        ]

    wide = parts("in_proj_qkvz", [net.key_dim, net.key_dim, values, values])
    betas, decays = parts("in_proj_ba", [served, served])
    return [shard for part in wide for shard in part], [*decays, *betas]
