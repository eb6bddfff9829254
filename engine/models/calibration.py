"""The short calibration before a model goes to four bits: which inputs of a matrix matter, and which matrices most.

The model writes the text itself (arXiv 2305.17888). Then each matrix in turn is made as noisy as four bits would, and
what that does to the model's predictions is the cost of quantising it.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..attention.backend import CacheSpec
from ..attention.selector import create_backend
from ..checkpoint.build_context import BuildContext, Int4Plan
from ..layers.int4 import dequantize_int4, quantize_int4
from ..layers.product_matrix import serves_int8
from ..layers.recurrent_state import StateSlots
from ..layers.step_context import StepContext
from ..step_batch import StepBatch
from .interfaces import BuiltDecoder, CheckpointBuilder

HIGHER_SHARE = 0.1
"""The share of the numbers in layers that may stay at eight bits: a tenth makes the weights read a twelfth larger."""

_EXPERT = re.compile(r"\.experts\.\d+\.")


class _Watched(NamedTuple):
    """A matrix: some of its rows, the numbers in all of them, and the sum of squares of each of its inputs."""

    sample: Tensor
    numbers: int
    squares: Tensor


class Calibration:
    """Adds up the squares of what every product is given while the model computes, and makes some noisy: as noisy as
    four bits would. A `ProductObserver`."""

    def __init__(self) -> None:
        self._watched: dict[str, _Watched] = {}
        self._noise: dict[str, float] = {}
        self._generator: torch.Generator | None = None

    def watch(
        self, label: str, product: Callable[[Tensor], Tensor], outputs: int, sample: Tensor
    ) -> Callable[[Tensor], Tensor]:
        squares = torch.zeros(sample.shape[1], device=sample.device)
        self._watched[label] = _Watched(sample, outputs * sample.shape[1], squares)

        def observed(x: Tensor) -> Tensor:
            out = product(x)
            if label in self._noise:
                noise = torch.randn(out.shape, generator=self._generator).to(out)
                return out + noise * (out.float().square().mean() * self._noise[label]).sqrt().to(out.dtype)
            squares.add_(x.float().square().sum(0))
            return out

        return observed

    @property
    def units(self) -> Mapping[str, list[str]]:
        """The labels of matrices that are judged together: one each, but all experts of a layer."""
        units = defaultdict(list)
        for label in self._watched:
            units[_EXPERT.sub(".experts.", label)].append(label)
        return units

    def make_noisy(self, unit: str) -> None:
        """Until the next call, what the matrices of `unit` return has the noise of four bits."""
        self._noise = {label: _noise_share(self._watched[label]) for label in self.units[unit]}
        self._generator = torch.Generator().manual_seed(0)

    def plan(self, costs: Mapping[str, float]) -> Int4Plan:
        """`costs`: what the noise of each unit does to the model. Those that cost most for their size stay higher, as
        many as HIGHER_SHARE allows."""
        sizes = {unit: sum(self._watched[label].numbers for label in labels) for unit, labels in self.units.items()}
        left = HIGHER_SHARE * sum(sizes.values())
        higher = []
        for unit in sorted(costs, key=lambda unit: -costs[unit] / sizes[unit]):
            if sizes[unit] <= left:
                higher += self.units[unit]
                left -= sizes[unit]
        squares = {label: _mean_squares(matrix) for label, matrix in self._watched.items()}
        return Int4Plan(squares, frozenset(higher))


def _mean_squares(matrix: _Watched) -> Tensor:
    """The mean squares of a matrix's inputs, scaled to a mean of one, and none at zero: an input that was silent for a
    few tokens need not stay so. Where nothing came, to an expert that no token chose, all are alike."""
    mean = matrix.squares.mean()
    return torch.ones_like(matrix.squares) if mean == 0 else (matrix.squares / mean).clamp_(min=1e-2)


def _noise_share(matrix: _Watched) -> float:
    """The part of its outputs' square that four bits turn into noise, if inputs do not depend on each other."""
    squares = _mean_squares(matrix)
    noise = dequantize_int4(quantize_int4(matrix.sample, squares)) - matrix.sample
    return float((noise.square() @ squares).sum() / (matrix.sample.square() @ squares).sum().clamp(min=1e-30))


TOKENS = 256
PASSES = 4

JUDGED = 32
"""Tokens that are computed once for each matrix; the predictions of the later half are compared."""

_BLOCK = 16
_SEED = 20261123
_PIECE = 64
"""Places whose logits are there at a time."""


@torch.inference_mode()
def calibrate(builder: CheckpointBuilder, context: BuildContext) -> Int4Plan:
    """Build the model as `context` says, but in eight bits (where there are no such products, as it is stored), and
    watch it."""
    calibration = Calibration()
    quantization = "int8" if serves_int8(context.dtype, context.device) else "none"
    built = builder.build(context._replace(quantization=quantization, cache=None, observer=calibration))
    reader = _Reader(built, context)
    tokens = reader.own_text(min(TOKENS, context.max_positions), built.shape.vocab_size)[:JUDGED]
    later = range(len(tokens) // 2, len(tokens))
    right = torch.cat([piece.log_softmax(-1) for piece in reader.logits(tokens, later)])
    probabilities = right.exp()
    costs = {}
    for unit in calibration.units:
        calibration.make_noisy(unit)
        noisy = torch.cat([piece.log_softmax(-1) for piece in reader.logits(tokens, later)])
        costs[unit] = float((probabilities * (right - noisy)).sum(-1).mean())  # Kullback and Leibler's divergence
    built.decoder.close()
    return calibration.plan(costs)


class _Reader:
    """A model and a cache for one text."""

    def __init__(self, built: BuiltDecoder, context: BuildContext) -> None:
        shape = built.shape
        sizes = shape.heads, shape.kv_heads, shape.head_dim, _BLOCK
        spec = CacheSpec(shape.cached_attention, *sizes, context.dtype, context.device)
        # torch's: a decoder whose attention is the kernels' is one program, which calls no product.
        self._attention = create_backend("cpu" if context.device.type == "cpu" else "auto", spec)
        self._blocks = torch.arange(-(-TOKENS // _BLOCK), device=context.device).unsqueeze(0)
        self._attention.allocate(self._blocks.shape[1])
        self._states = StateSlots(shape.states, 1, context.dtype, context.device)
        self._states.allocate(0)
        self._decoder = built.decoder
        self._device = context.device

    def logits(self, tokens: Tensor, places: range) -> Iterator[Tensor]:
        """The logits of what follows the tokens at `places`, float32 [n, vocabulary], piece by piece."""
        step = StepBatch.from_tokens(tokens.to(self._device), [0], [len(tokens)], self._blocks, _BLOCK)
        context = StepContext(step, self._attention.begin_step(step), states=self._states.begin_step(step))
        some = slice(places.start, places.stop)
        logits = self._decoder.compute_logits(context, torch.split(step.positions[some], _PIECE))
        assert logits is not None, "one rank is the last stage too"
        return (piece.float() for piece in logits)

    def own_text(self, length: int, vocabulary: int) -> Tensor:
        """Token ids int64 [length] on the CPU. From random tokens each pass draws the next token of all places at once,
        and the next pass goes on from those: after a few passes each stretch of text follows from what stands before
        it."""
        generator = torch.Generator().manual_seed(_SEED)
        tokens = torch.randint(0, vocabulary, (length,), generator=generator)
        for _ in range(PASSES):
            drawn = [_draw(piece, generator) for piece in self.logits(tokens, range(length - 1))]
            tokens = torch.cat((tokens[:1], *drawn))
        return tokens


def _draw(logits: Tensor, generator: torch.Generator) -> Tensor:
    """A token of each row [n, vocabulary], on the CPU; torch.multinomial draws a number for every token there is."""
    sums = logits.softmax(-1).cumsum(-1)
    drawn = torch.rand(len(logits), 1, generator=generator).to(logits.device) * sums[:, -1:]
    return torch.searchsorted(sums, drawn).squeeze(1).clamp_(max=logits.shape[1] - 1).cpu()
