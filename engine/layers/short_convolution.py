"""LFM2's gated short convolution: what a token adds to a convolution over time, and what it takes of it, are both
products with numbers of its own."""

from torch import Tensor

from ..checkpoint.build_context import rank_slice
from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.recurrence import ShortConvolutionSpec
from ..checkpoint.weights import WeightLoader
from ..cpu.recurrent import ConvolutionColumns
from .linear import OutputShard, RowLinear, column_linear, join_shards
from .state_convolution import StateConvolution
from .step_context import StepContext


class ShortConvolution:
    """x [N, hidden] -> out(C * convolution(B * u)) [N, hidden], where B, C and u, [N, channels] each, are what the
    input projection makes of x, side by side; layer `index` of the model."""

    def __init__(self, loader: WeightLoader, spec: ModelSpec, index: int, name: str) -> None:
        short = spec.recurrence
        assert isinstance(short, ShortConvolutionSpec), "config.json was read for such layers"
        number = spec.state_index(index, loader.stage.layers(spec.layers).start)
        mine = rank_slice(short.channels, loader.group)
        gates = OutputShard(f"{name}.in_proj", 3 * short.channels, mine)
        inputs = join_shards(gates.shifted(part * short.channels) for part in range(3))
        self._input = column_linear(loader, inputs, spec.hidden_size, bias=short.bias)
        channels = mine.stop - mine.start
        columns = ConvolutionColumns(2 * channels, input_gates=0, output_gates=channels)
        sizes = short.channels, short.kernel
        self._convolution = StateConvolution(
            loader, f"{name}.conv", number, columns, sizes, [mine], bias=short.bias, activated=False
        )
        self._out = RowLinear(loader, f"{name}.out_proj", short.channels, mine, spec.hidden_size, bias=short.bias)
        self.untraceable = self._convolution.untraceable or self._out.untraceable
        self.host_bound = self._convolution.host_bound

    def __call__(self, x: Tensor, context: StepContext) -> Tensor:
        return self._out(self._convolution(self._input(x, context), context), context)
