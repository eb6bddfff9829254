"""Linear attention by the gated delta rule (arXiv 2412.06464): each value head keeps a matrix that maps keys to values,
which decays, and which every token corrects by what it gets wrong of the token's value."""

from torch import Tensor

from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.recurrence import DeltaNetSpec
from ..checkpoint.weights import WeightLoader
from ..cpu.op_trace import untraceable_reason
from ..cpu.recurrent import ConvolutionColumns, HeadNorm, RecurrenceShape
from .head_gate import build_head_gate
from .linear import OutputShard, RowLinear, column_linear, column_slices
from .product_matrix import SMALL_LAYER, build_matmul
from .recurrence import DeltaRuleGates, build_delta_rule
from .state_convolution import StateConvolution
from .step_context import StepContext


class GatedDeltaNet:
    """x [N, hidden] -> [N, hidden], layer `index` of the model."""

    def __init__(self, loader: WeightLoader, spec: ModelSpec, index: int, name: str, grouped: bool = False) -> None:
        """`grouped`: as `_grouped_projections` has it."""
        net = spec.recurrence
        assert isinstance(net, DeltaNetSpec), "config.json was read for such layers"
        number = spec.state_index(index, loader.stage.layers(spec.layers).start)
        hidden = spec.hidden_size
        mixed = 2 * net.key_width + net.value_width
        values = slice(0, net.value_width)
        inputs, gates = _grouped_projections(name, net) if grouped else _projections(name, net)
        self._input = column_linear(loader, inputs, hidden, bias=False)
        # Few numbers, and the decays are exponents of theirs: not quantised.
        self._gates = build_matmul(loader, column_slices(gates, hidden), use=SMALL_LAYER)
        sizes = mixed, net.kernel
        columns = ConvolutionColumns(0)
        self._convolution = StateConvolution(
            loader, f"{name}.conv1d", number, columns, sizes, bias=False, activated=True
        )
        shape = RecurrenceShape(
            net.value_heads, net.key_heads, net.key_dim, net.value_dim, 0, net.key_width, 2 * net.key_width
        )
        rates = loader.floats(f"{name}.A_log", net.value_heads).exp().neg()
        bias = loader.floats(f"{name}.dt_bias", net.value_heads)
        self._recurrence = build_delta_rule(loader, number, shape, DeltaRuleGates(rates, bias, 0, net.value_heads))
        norm = HeadNorm(loader.floats(f"{name}.norm.weight", net.value_dim), spec.norm_eps)
        self._output_gate = build_head_gate(loader, net.value_heads, net.value_dim, mixed, norm)
        self._out = RowLinear(loader, f"{name}.out_proj", net.value_width, values, hidden, bias=False)
        parts = self._convolution, self._recurrence, self._output_gate, self._out
        self.untraceable = untraceable_reason(parts)

    def __call__(self, x: Tensor, context: StepContext) -> Tensor:
        wide = self._input(x, context)
        read = self._recurrence(self._convolution(wide, context), self._gates(x), context)
        return self._out(self._output_gate(read, wide), context)


def _projections(name: str, net: DeltaNetSpec) -> tuple[list[OutputShard], list[OutputShard]]:
    """Queries, keys and values in one matrix, and the outputs' gates; and decays and betas."""
    mixed = 2 * net.key_width + net.value_width
    wide = OutputShard(f"{name}.in_proj_qkv", mixed, slice(0, mixed))
    gate = OutputShard(f"{name}.in_proj_z", net.value_width, slice(0, net.value_width))
    heads = slice(0, net.value_heads)
    return [wide, gate], [OutputShard(f"{name}.in_proj_{part}", net.value_heads, heads) for part in "ab"]


def _grouped_projections(name: str, net: DeltaNetSpec) -> tuple[list[OutputShard], list[OutputShard]]:
    """The same of two matrices that have them key head by key head, as Qwen 3-Next's do."""
    served = net.value_heads // net.key_heads
    values = served * net.value_dim

    def parts(matrix: str, sizes: list[int]) -> list[list[OutputShard]]:
        """Of each part with these sizes in a key head's lines, those of all key heads."""
        line = sum(sizes)
        firsts = [sum(sizes[:number]) for number in range(len(sizes))]
        shard = OutputShard(f"{name}.{matrix}", net.key_heads * line, slice(0))
        return [
            [
                shard._replace(features=slice(head * line + first, head * line + first + size))
                for head in range(net.key_heads)
            ]
            for first, size in zip(firsts, sizes, strict=True)
        ]

    wide = parts("in_proj_qkvz", [net.key_dim, net.key_dim, values, values])
    betas, decays = parts("in_proj_ba", [served, served])
    return [shard for part in wide for shard in part], [*decays, *betas]
