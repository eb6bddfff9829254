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


class PostNormCrossLayer:
    """A `DecoderLayer` of the same parts, each behind which a norm stands, and the residual stream is what it gives.
    The norm behind the last part is that of the next layer, `before` all else, or of the decoder's output."""

    host_bound = True
    """As of `CrossLayer`."""

    def __init__(
        self,
        before: WholeNorm | None,
        mixer: Mixer,
        after_mixer: WholeNorm,
        cross: CrossAttention,
        after_cross: WholeNorm,
        mlp: FeedForward,
    ) -> None:
        self._before = before
        self._mixer = mixer
        self._after_mixer = after_mixer
        self._cross = cross
        self._after_cross = after_cross
        self._mlp = mlp
        self.untraceable = mixer.untraceable or cross.untraceable or mlp.untraceable

    def __call__(self, x: Tensor, delta: Tensor, context: StepContext) -> Tensor:
        states = x.add_(delta) if self._before is None else self._before.add_and_norm(x, delta)
        states = self._after_mixer.add_and_norm(states, self._mixer(states, context))
        states = self._after_cross.add_and_norm(states, self._cross(states, context))
        x.copy_(states)
        return self._mlp(states, context)
