"""The layer of decoders that attend to an encoder's output between their own tokens and the MLP."""

from torch import Tensor

from ..layers.cross_attention import CrossAttention
from ..layers.mlp import FeedForward
from ..layers.norm import WholeNorm
from ..layers.step_context import StepContext
from .pre_norm_layer import Mixer


class CrossLayer:
    """A `DecoderLayer` of three parts, each behind a norm."""

    host_bound = True
    """No recorded step of a GPU knows how long an encoder's output is."""

    def __init__(
        self,
        before_mixer: WholeNorm,
        mixer: Mixer,
        before_cross: WholeNorm,
        cross: CrossAttention,
        before_mlp: WholeNorm,
        mlp: FeedForward,
    ) -> None:
        self._before_mixer = before_mixer
        self._mixer = mixer
        self._before_cross = before_cross
        self._cross = cross
        self._before_mlp = before_mlp
        self._mlp = mlp
        self.untraceable = mixer.untraceable or cross.untraceable or mlp.untraceable

    def __call__(self, x: Tensor, delta: Tensor, context: StepContext) -> Tensor:
        mixed = self._mixer(self._before_mixer.add_and_norm(x, delta), context)
        crossed = self._cross(self._before_cross.add_and_norm(x, mixed), context)
        return self._mlp(self._before_mlp.add_and_norm(x, crossed), context)
