"""A causal convolution of each channel by itself, over a sequence that comes in pieces: what it reads of earlier pieces
is kept in the row's slot."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoint.weights import WeightLoader
from ..cpu import library
from ..cpu.recurrent import CausalConvolution, ConvolutionColumns
from ..gpu import runtime
from .recurrent_state import StepSlotStates
from .step_context import StepContext

if TYPE_CHECKING:
    from ..gpu.convolution import TritonConvolution


class StateConvolution:
    """A causal convolution over a state of this rank, x [N, width] -> [N, channels]: output t is the sum of w[j] *
    input t - k + 1 + j, the bias added, then SiLU if `activated`. By the kernels bits do not depend on where a
    sequence is cut."""

    def __init__(
        self,
        loader: WeightLoader,
        name: str,
        number: int,
        columns: ConvolutionColumns,
        sizes: tuple[int, int],
        parts: Sequence[slice],
        *,
        bias: bool,
        activated: bool,
    ) -> None:
        """`name`: of the convolution in the checkpoint; `number`: of its state among this rank's; `columns` of x: its
        inputs, and what they and the results are multiplied with; `sizes`: its channels in the checkpoint, and the
        inputs that it reads of each; `parts`: the channels that this rank has, one part behind the other."""
        channels, kernel = sizes
        self._number = number
        weight = _select(loader.floats(f"{name}.weight", channels, 1, kernel).squeeze(1), parts)
        shift = _select(loader.floats(f"{name}.bias", channels), parts) if bias else None
        self._convolve = _fastest_convolution(loader, weight, shift, activated, columns)
        self.untraceable = self._convolve.untraceable
        self.host_bound = isinstance(self._convolve, TorchConvolution)

    def __call__(self, x: Tensor, context: StepContext) -> Tensor:
        states = context.states
        if isinstance(self._convolve, CausalConvolution):
            return self._convolve(x, self._number, states.kernel)
        windows = states.layers[self._number].windows
        if isinstance(self._convolve, TorchConvolution):
            return self._convolve(x, windows, states)
        return self._convolve(x, windows, states.on_device)


def _fastest_convolution(
    loader: WeightLoader, weight: Tensor, bias: Tensor | None, activated: bool, columns: ConvolutionColumns
) -> "CausalConvolution | TritonConvolution | TorchConvolution":
    if library.supports(loader.dtype, loader.device):
        return CausalConvolution(weight, bias, activated, columns, loader.dtype)
    if runtime.serves(loader.dtype, loader.device):
        from ..gpu.convolution import TritonConvolution

        return TritonConvolution(weight, bias, activated, columns)
    return TorchConvolution(weight, bias, activated, columns)


def _select(channels: Tensor, parts: Sequence[slice]) -> Tensor:
    return torch.cat([channels[part] for part in parts])


class TorchConvolution:
    """The same as `CausalConvolution` by torch."""

    untraceable: str | None = "its convolution is torch's"

    def __init__(self, weight: Tensor, bias: Tensor | None, activated: bool, columns: ConvolutionColumns) -> None:
        self._taps = weight.t().contiguous()  # [kernel, channels]
        self._bias = bias
        self._activated = activated
        self._columns = columns

    def __call__(self, x: Tensor, windows: Tensor, states: StepSlotStates) -> Tensor:
        kernel, channels = self._taps.shape
        places = states.places(kernel - 1)
        inputs, input_gates, output_gates = (
            None if first is None else x[:, first : first + channels] for first in self._columns
        )
        assert inputs is not None, "a convolution has inputs"
        stream = x.new_empty(len(x) + places.before.numel(), channels)  # each row's window before its tokens
        stream[places.before] = states.read(windows)
        stream[places.tokens] = inputs if input_gates is None else inputs * input_gates
        out = stream[places.tokens - (kernel - 1)] * self._taps[0]
        for tap in range(1, kernel):
            out += stream[places.tokens - (kernel - 1 - tap)] * self._taps[tap]
        if self._bias is not None:
            out += self._bias
        states.write(windows, stream[places.after], stream[places.saved])
        if self._activated:
            out = F.silu(out)
        return (out if output_gates is None else out * output_gates).to(x.dtype)
