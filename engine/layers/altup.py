"""Alternating updates (AltUp, arXiv 2301.13310) as Gemma 3n has them: a token has several streams of hidden states,
side by side in [N, streams * hidden]. A layer computes with one of them, and predicts and corrects the others by it."""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..checkpoint.model_spec import AltUpSpec, ModelSpec
from ..checkpoint.weights import TensorSlice, WeightLoader
from ..step_batch import StepBatch
from .embed_and_head import DecoderEnds, DecoderInput, DecoderOutput
from .norm import divided_rms_norm
from .product_matrix import ROUTER, build_matmul

_LEAST_SQUARE = 1e-5
"""What the mean square of a stream that is scaled is at least."""


class AltUp:
    """The prediction of a layer's streams, and their correction by what the layer made of one."""

    untraceable: str | None = "its streams are mixed by torch"

    def __init__(self, loader: WeightLoader, spec: ModelSpec, altup: AltUpSpec, name: str) -> None:
        count = altup.streams
        self.active = altup.active
        """The number of the stream that layers compute with."""
        weight = loader.vector(f"{name}.router_norm.weight", spec.hidden_size)
        self._norm = divided_rms_norm(weight, spec.norm_eps, spec.hidden_size)
        router = TensorSlice(f"{name}.modality_router.weight", (count, spec.hidden_size))
        self._router = build_matmul(loader, [router], use=ROUTER)
        self._prediction = loader.floats(f"{name}.prediction_coefs.weight", count * count, count)
        self._correction = loader.floats(f"{name}.correction_coefs.weight", count, count)

    def predict(self, streams: Tensor) -> Tensor:
        """[N, streams, hidden] -> float32 of the same shape."""
        modalities = self._modalities(streams[:, self.active].contiguous())
        count = streams.shape[1]
        mixing = (modalities.unsqueeze(1) * self._prediction).sum(-1).view(-1, count, count, 1)
        wide = streams.float()
        predicted = wide.clone()
        for other in range(count):
            for source in range(count):
                predicted[:, other].addcmul_(mixing[:, other, source], wide[:, source])
        return predicted

    def correct(self, predicted: Tensor, activated: Tensor) -> Tensor:
        """`predicted` float32 [N, streams, hidden] in place, by what the layer made of the active one, [N, hidden]."""
        modalities = self._modalities(activated)
        weights = (modalities.unsqueeze(1) * self._correction).sum(-1).add_(1.0).unsqueeze(-1)
        innovation = (activated.float() - predicted[:, self.active]).unsqueeze(1)
        return predicted.addcmul_(innovation, weights)

    def _modalities(self, x: Tensor) -> Tensor:
        """Float32 [N, streams]."""
        return self._router(self._norm(x)).float().tanh_()


class StreamsInput:
    """A step's embeddings and projections of them that are as large -> streams [N, streams * hidden]."""

    untraceable: str | None = AltUp.untraceable

    def __init__(self, loader: WeightLoader, spec: ModelSpec, altup: AltUpSpec, embedding: DecoderInput) -> None:
        self._embedding = embedding
        self._projections = _projections(loader, spec, altup, "altup_projections")

    def __call__(self, batch: StepBatch) -> Tensor:
        x = self._embedding(batch)
        size = _size(x)
        return torch.cat([x, *(_scaled(project(x), size) for project in self._projections)], -1)


class StreamsOutput:
    """Streams -> logits of the mean of the first and the others' projections that are as large."""

    untraceable: str | None = AltUp.untraceable

    def __init__(self, loader: WeightLoader, spec: ModelSpec, altup: AltUpSpec, output: DecoderOutput) -> None:
        self._output = output
        self._hidden = spec.hidden_size
        self._projections = _projections(loader, spec, altup, "altup_unembed_projections")

    def __call__(self, x: Tensor, delta: Tensor, selections: Sequence[Tensor]) -> Iterator[Tensor] | None:
        return (logits for places in selections for logits in self._logits(x[places] + delta[places]))

    def _logits(self, x: Tensor) -> Iterator[Tensor]:
        first, *others = (stream.contiguous() for stream in torch.split(x, self._hidden, -1))
        size = _size(first)
        whole = first.float()
        for project, stream in zip(self._projections, others, strict=True):
            whole = whole + _scaled(project(stream), size).float()
        mean = (whole / (1 + len(others))).to(x.dtype)
        every = torch.arange(len(mean), device=mean.device)
        logits = self._output(mean, torch.zeros_like(mean), [every])
        assert logits is not None, "a model of one stage has a head"
        return logits


def build_streams(loader: WeightLoader, spec: ModelSpec, altup: AltUpSpec, ends: DecoderEnds) -> DecoderEnds:
    """The ends of a decoder whose layers have streams, around those of one that has one."""
    return DecoderEnds(
        StreamsInput(loader, spec, altup, ends.input),
        StreamsOutput(loader, spec, altup, ends.output),
        altup.streams * spec.hidden_size,
    )


def _projections(
    loader: WeightLoader, spec: ModelSpec, altup: AltUpSpec, name: str
) -> list[Callable[[Tensor], Tensor]]:
    shape = spec.hidden_size, spec.hidden_size
    slices = [TensorSlice(f"model.{name}.{number}.weight", shape) for number in range(altup.streams - 1)]
    return [build_matmul(loader, [piece]) for piece in slices]


def _size(x: Tensor) -> Tensor:
    """The root of each line's mean square, float32 [N, 1]."""
    size: Tensor = torch.linalg.vector_norm(x.float(), dim=-1, keepdim=True).mul_(x.shape[-1] ** -0.5)
    return size


def _scaled(x: Tensor, size: Tensor) -> Tensor:
    return (x.float() * (size / _size(x).clamp_(min=math.sqrt(_LEAST_SQUARE)))).to(x.dtype)
