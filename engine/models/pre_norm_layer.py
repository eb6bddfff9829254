"""The layer that most decoders have: tokens are mixed, then each goes through an MLP or experts; both behind a norm of
their own, and added to the residual stream. And its kin: layers with norms on the other side of both parts, or on both
sides, and those that do one of the two alone."""

from typing import Protocol

from torch import Tensor

from ..cpu.op_trace import Traceable
from ..layers.mlp import FeedForward
from ..layers.norm import Norm, WholeNorm, add_normed
from ..layers.step_context import StepContext


class Mixer(Traceable, Protocol):
    """Attention, or a recurrence in its place: x [N, hidden] -> [N, hidden]. `host_bound`: as of `DecoderLayer`."""

    @property
    def host_bound(self) -> bool: ...

    def __call__(self, x: Tensor, context: StepContext) -> Tensor: ...


class PreNormLayer:
    """A `DecoderLayer` of these parts. `mixer_scale` and `mlp_scale` multiply what each adds to the residual stream."""

    def __init__(
        self,
        before_mixer: WholeNorm,
        mixer: Mixer,
        before_mlp: WholeNorm,
        mlp: FeedForward,
        mixer_scale: float = 1.0,
        mlp_scale: float = 1.0,
    ) -> None:
        self._before_mixer = before_mixer
        self._mixer = mixer
        self._before_mlp = before_mlp
        self._mlp = mlp
        self._mixer_scale = mixer_scale
        self._mlp_scale = mlp_scale
        self.untraceable = mixer.untraceable or mlp.untraceable
        self.host_bound = mixer.host_bound or mlp.host_bound

    def __call__(self, x: Tensor, delta: Tensor, context: StepContext) -> Tensor:
        mixed = scaled(self._mixer(self._before_mixer.add_and_norm(x, delta), context), self._mixer_scale)
        return scaled(self._mlp(self._before_mlp.add_and_norm(x, mixed), context), self._mlp_scale)


class PostNormLayer:
    """A `DecoderLayer` whose norms stand behind its parts, which read the residual stream itself (arXiv 2501.00656)."""

    def __init__(self, mixer: Mixer, after_mixer: Norm, mlp: FeedForward, after_mlp: Norm) -> None:
        self._mixer = mixer
        self._after_mixer = after_mixer
        self._mlp = mlp
        self._after_mlp = after_mlp
        self.untraceable = mixer.untraceable or mlp.untraceable
        self.host_bound = mixer.host_bound or mlp.host_bound

    def __call__(self, x: Tensor, delta: Tensor, context: StepContext) -> Tensor:
        mixed = self._after_mixer(self._mixer(x.add_(delta), context))
        return self._after_mlp(self._mlp(x.add_(mixed), context))


class SandwichLayer:
    """A `DecoderLayer` with norms on both sides of each part."""

    def __init__(
        self, before_mixer: Norm, mixer: Mixer, after_mixer: Norm, before_mlp: Norm, mlp: FeedForward, after_mlp: Norm
    ) -> None:
        self._before_mixer = before_mixer
        self._mixer = mixer
        self._after_mixer = after_mixer
        self._before_mlp = before_mlp
        self._mlp = mlp
        self._after_mlp = after_mlp
        self.untraceable = mixer.untraceable or mlp.untraceable
        self.host_bound = mixer.host_bound or mlp.host_bound

    def __call__(self, x: Tensor, delta: Tensor, context: StepContext) -> Tensor:
        mixed = self._mixer(self._before_mixer.add_and_norm(x, delta), context)
        return self._after_mlp(self._mlp(add_normed(self._before_mlp, x, mixed, self._after_mixer), context))


class OnePartLayer:
    """A `DecoderLayer` of one part behind its norm, which mixes tokens or is an MLP or experts."""

    def __init__(self, norm: Norm, part: Mixer) -> None:
        self._norm = norm
        self._part = part
        self.untraceable = part.untraceable
        self.host_bound = part.host_bound

    def __call__(self, x: Tensor, delta: Tensor, context: StepContext) -> Tensor:
        return self._part(self._norm.add_and_norm(x, delta), context)


def scaled(branch: Tensor, scale: float) -> Tensor:
    """The branch times `scale`, in place."""
    return branch if scale == 1 else branch.mul_(scale)
