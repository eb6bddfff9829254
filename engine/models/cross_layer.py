"""The layer of decoders that attend to an encoder's output between their own tokens and the MLP."""

from typing import NamedTuple

from torch import Tensor

from ..layers.cross_attention import CrossAttention
from ..layers.mlp import FeedForward
from ..layers.norm import WholeNorm
from ..layers.step_context import StepContext
from .pre_norm_layer import Mixer


class CrossParts(NamedTuple):
    """What such a layer adds to the residual stream, in order."""

    mixer: Mixer
    cross: CrossAttention
    mlp: FeedForward

    @property
    def untraceable(self) -> str | None:
        return self.mixer.untraceable or self.cross.untraceable or self.mlp.untraceable


class CrossLayer:
    """A `DecoderLayer` of three parts, each behind a norm."""

    host_bound = True
    """No recorded step of a GPU knows how long an encoder's output is."""

    def __init__(
        self, parts: CrossParts, before_mixer: WholeNorm, before_cross: WholeNorm, before_mlp: WholeNorm
    ) -> None:
        self._parts = parts
        self._before_mixer = before_mixer
        self._before_cross = before_cross
        self._before_mlp = before_mlp
        self.untraceable = parts.untraceable

    def __call__(self, x: Tensor, delta: Tensor, context: StepContext) -> Tensor:
        mixer, cross, mlp = self._parts
        mixed = mixer(self._before_mixer.add_and_norm(x, delta), context)
        crossed = cross(self._before_cross.add_and_norm(x, mixed), context)
        return mlp(self._before_mlp.add_and_norm(x, crossed), context)


class PostNormCrossLayer:
    """A `DecoderLayer` of the same parts, each behind which a norm stands, and the residual stream is what it gives.
    The norm behind the last part is that of the next layer, `before` all else, or of the decoder's output."""

    host_bound = True
    """As of `CrossLayer`."""

    def __init__(
        self, parts: CrossParts, before: WholeNorm | None, after_mixer: WholeNorm, after_cross: WholeNorm
    ) -> None:
        self._parts = parts
        self._before = before
        self._after_mixer = after_mixer
        self._after_cross = after_cross
        self.untraceable = parts.untraceable

    def __call__(self, x: Tensor, delta: Tensor, context: StepContext) -> Tensor:
        mixer, cross, mlp = self._parts
        states = x.add_(delta) if self._before is None else self._before.add_and_norm(x, delta)
        states = self._after_mixer.add_and_norm(states, mixer(states, context))
        states = self._after_cross.add_and_norm(states, cross(states, context))
        x.copy_(states)
        return mlp(states, context)
