"""The layer that most decoders have: tokens are mixed, then each goes through an MLP or experts; both behind a norm of
their own, and added to the residual stream."""

from typing import Protocol

from torch import Tensor

from ..cpu.op_trace import Traceable
from ..layers.mlp import FeedForward
from ..layers.norm import Norm
from ..layers.step_context import StepContext


class Mixer(Traceable, Protocol):
    """Attention, or a recurrence in its place: x [N, hidden] -> [N, hidden]."""

    def __call__(self, x: Tensor, context: StepContext) -> Tensor: ...


class PreNormLayer:
    """A `DecoderLayer` of these parts. `scale` multiplies what both add to the residual stream."""

    def __init__(
        self, before_mixer: Norm, mixer: Mixer, before_mlp: Norm, mlp: FeedForward, scale: float = 1.0
    ) -> None:
        self._before_mixer = before_mixer
        self._mixer = mixer
        self._before_mlp = before_mlp
        self._mlp = mlp
        self._scale = scale
        self.untraceable = mixer.untraceable or mlp.untraceable
        self.host_bound = mlp.host_bound

    def __call__(self, x: Tensor, delta: Tensor, context: StepContext) -> Tensor:
        mixed = self._scaled(self._mixer(self._before_mixer.add_and_norm(x, delta), context))
        return self._scaled(self._mlp(self._before_mlp.add_and_norm(x, mixed), context))

    def _scaled(self, branch: Tensor) -> Tensor:
        return branch if self._scale == 1 else branch.mul_(self._scale)
