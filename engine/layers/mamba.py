"""Mamba's first layer (arXiv 2312.00752): each channel keeps some numbers, each of which decays by a rate of its own
times the token's step in that channel; queries, keys and values are called C, B and x there."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.recurrence import MambaSpec
from ..checkpoint.weights import WeightLoader
from ..cpu import library
from ..cpu.op_trace import untraceable_reason
from ..cpu.recurrent import MAX_KEY_SIZE, ChannelScan, ConvolutionColumns, HeadNorm, ScanSteps
from .head_gate import build_head_gate
from .linear import OutputShard, RowLinear, column_linear, column_slices
from .norm import rms_norm
from .product_matrix import SMALL_LAYER, build_matmul
from .recurrent_state import StepSlotStates
from .state_convolution import StateConvolution
from .step_context import StepContext
from .torch_matmul import Matmul


class Mamba:
    """x [N, hidden] -> [N, hidden], layer `index` of the model. The input projection makes x and the output's gates
    side by side; what the convolution makes of x also makes the steps, by way of `step_rank` numbers, and B and C."""

    def __init__(self, loader: WeightLoader, spec: ModelSpec, index: int, name: str) -> None:
        mamba = spec.recurrence
        assert isinstance(mamba, MambaSpec), "config.json was read for such layers"
        number = spec.state_index(index, loader.stage.layers(spec.layers).start)
        channels, size, rank = mamba.channels, mamba.state_size, mamba.step_rank
        every = slice(0, channels)
        wide = OutputShard(f"{name}.in_proj", 2 * channels, slice(0, 2 * channels))
        self._input = column_linear(loader, [wide], spec.hidden_size, bias=mamba.bias)
        self._convolution = StateConvolution(
            loader,
            f"{name}.conv1d",
            number,
            ConvolutionColumns(0),
            (channels, mamba.kernel),
            [every],
            bias=mamba.convolution_bias,
            activated=True,
        )

        def product(part: str, outputs: int, inputs: int, rows: slice) -> Matmul:
            # Few numbers, and the decays are exponents of theirs: not quantised.
            shard = OutputShard(f"{name}.{part}", outputs, rows)
            return build_matmul(loader, column_slices([shard], inputs), use=SMALL_LAYER)

        outputs = rank + 2 * size
        self._narrow_steps = product("x_proj", outputs, channels, slice(0, rank))
        self._pairs = product("x_proj", outputs, channels, slice(rank, outputs))
        self._steps = product("dt_proj", channels, rank, every)
        self._norms = None
        if mamba.norm_eps is not None:
            ones = (torch.ones(width, dtype=loader.dtype, device=loader.device) for width in (rank, size))
            self._norms = [rms_norm(weight, mamba.norm_eps) for weight in ones]
        self._size = size
        rates = loader.floats(f"{name}.A_log", channels, size).exp().neg().t().contiguous()
        bias, skip = (loader.floats(f"{name}.{part}", channels) for part in ("dt_proj.bias", "D"))
        self._scan = build_channel_scan(loader, number, ScanSteps(rates, bias, skip))
        self._output_gate = build_head_gate(loader, 1, channels, channels, HeadNorm(None, spec.norm_eps))
        self._out = RowLinear(loader, f"{name}.out_proj", channels, every, spec.hidden_size, bias=mamba.bias)
        self.untraceable = untraceable_reason((self._convolution, self._scan, self._output_gate, self._out))
        self.host_bound = self._convolution.host_bound or self._scan.host_bound

    def __call__(self, x: Tensor, context: StepContext) -> Tensor:
        wide = self._input(x, context)
        convolved = self._convolution(wide, context)
        narrow, pairs = self._narrow_steps(convolved), self._pairs(convolved)
        if self._norms is not None:
            of_steps, of_pairs = self._norms
            narrow = of_steps(narrow)
            for first in (0, self._size):
                of_pairs.norm_part(pairs, first)
        read = self._scan(convolved, pairs, self._steps(narrow), context)
        return self._out(self._output_gate(read, wide), context)


class StateChannelScan:
    """x and steps [N, channels], and pairs [N, 2 * size], B and then C -> [N, channels], of the layer that keeps the
    `number`th state of this rank."""

    def __init__(self, number: int, scan: "ChannelScan | TorchChannelScan") -> None:
        self._number = number
        self._scan = scan
        self.untraceable = scan.untraceable
        self.host_bound = isinstance(scan, TorchChannelScan)

    def __call__(self, x: Tensor, pairs: Tensor, steps: Tensor, context: StepContext) -> Tensor:
        states = context.states
        if isinstance(self._scan, ChannelScan):
            return self._scan(x, pairs, steps, self._number, states.kernel)
        return self._scan(x, pairs, steps, states.layers[self._number].matrices, states)


def build_channel_scan(loader: WeightLoader, number: int, steps: ScanSteps) -> StateChannelScan:
    """For each token dt = softplus(step + bias), S *= exp(rate * dt), S += B (dt x), and the result is C^T S + skip x:
    rates are [size, channels]."""
    if library.supports(loader.dtype, loader.device) and len(steps.rates) <= MAX_KEY_SIZE:
        return StateChannelScan(number, ChannelScan(steps, loader.dtype))
    return StateChannelScan(number, TorchChannelScan(steps))


class TorchChannelScan:
    """The same as `ChannelScan` by torch."""

    untraceable: str | None = "its recurrence is torch's"

    def __init__(self, steps: ScanSteps) -> None:
        self._steps = steps

    def __call__(self, x: Tensor, pairs: Tensor, steps: Tensor, matrices: Tensor, states: StepSlotStates) -> Tensor:
        rates, bias, skip, *_ = self._steps
        assert skip is not None, "what goes past the state is multiplied with something"
        wide = x.float()
        dt = F.softplus(steps.float() + bias)
        keys, queries = pairs.float().unsqueeze(-1).chunk(2, 1)
        added = (dt * wide).unsqueeze(1)
        out = skip * wide
        for tokens, state in states.scan(matrices):
            own = state[:, 0]
            own *= (rates * dt[tokens].unsqueeze(1)).exp_()
            own += keys[tokens] * added[tokens]
            out[tokens] += (own * queries[tokens]).sum(1)
        return out.to(x.dtype)
