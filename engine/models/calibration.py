"""The short calibration before a model goes to four bits: which inputs of a matrix matter, and which matrices most.

It needs no text: the model writes its own. From random tokens each pass predicts, and draws, the next token of each
place at once, and what one pass drew the next one is given; so after a few passes a stretch of text follows from what
stands before it. (The model's own text as data: arXiv 2305.17888.) Then each matrix in turn is made as noisy as four
bits would, and what that does to the model's predictions is the cost of quantising it.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..attention.backend import CacheSpec
from ..attention.selector import create_backend
from ..checkpoint.build_context import BuildContext, Int4Plan
from ..layers.calibration import Calibration
from ..layers.step_context import StepContext
from ..step_batch import StepBatch
from .interfaces import BuiltDecoder, CheckpointBuilder

TOKENS, PASSES = 256, 4
JUDGED = 32
"""Tokens that are computed once for each matrix; the predictions of the later half are compared."""

_BLOCK, _SEED = 16, 20261123
_PIECE = 64
"""Places whose logits are there at a time."""


@torch.inference_mode()
def calibrate(builder: CheckpointBuilder, context: BuildContext) -> Int4Plan:
    """Build the model as `context` says, but in eight bits (on a GPU as it is stored), and watch it."""
    calibration = Calibration()
    quantization = "int8" if context.device.type == "cpu" else "none"
    built = builder.build(context._replace(quantization=quantization, cache=None, observer=calibration))
    reader = _Reader(built, context)
    tokens = reader.own_text(min(TOKENS, context.max_positions), built.shape.vocab_size)[:JUDGED]
    later = range(len(tokens) // 2, len(tokens))
    right = torch.cat([each.log_softmax(-1) for each in reader.logits(tokens, later)])
    probabilities, costs = right.exp(), {}
    for unit in calibration.units:
        calibration.make_noisy(unit)
        noisy = torch.cat([each.log_softmax(-1) for each in reader.logits(tokens, later)])
        costs[unit] = float((probabilities * (right - noisy)).sum(-1).mean())  # Kullback and Leibler's divergence
    built.decoder.close()
    return calibration.plan(costs)


class _Reader:
    """A model and a cache for one text."""

    def __init__(self, built: BuiltDecoder, context: BuildContext) -> None:
        shape = built.shape
        sizes = shape.heads, shape.kv_heads, shape.head_dim, _BLOCK
        spec = CacheSpec(shape.attention, *sizes, context.dtype, context.device)
        # torch's: a decoder whose attention is the kernels' is one program, which calls no product.
        self._attention = create_backend("cpu" if context.device.type == "cpu" else "auto", spec)
        self._blocks = torch.arange(-(-TOKENS // _BLOCK), device=context.device).unsqueeze(0)
        self._attention.allocate(self._blocks.shape[1])
        self._decoder, self._device = built.decoder, context.device

    def logits(self, tokens: Tensor, places: range) -> Iterator[Tensor]:
        """Those of what follows the tokens at `places`, float32 [n, vocabulary], piece by piece."""
        step = StepBatch.from_tokens(tokens.to(self._device), [0], [len(tokens)], self._blocks, _BLOCK)
        context, some = StepContext(step, self._attention.begin_step(step)), slice(places.start, places.stop)
        logits = self._decoder.compute_logits(context, torch.split(step.positions[some], _PIECE))
        assert logits is not None, "one rank is the last stage too"
        return (each.float() for each in logits)

    def own_text(self, length: int, vocabulary: int) -> Tensor:
        """Token ids int64 [length] on the CPU."""
        generator = torch.Generator().manual_seed(_SEED)
        tokens = torch.randint(0, vocabulary, (length,), generator=generator)
        for _ in range(PASSES):
            drawn = [_draw(each, generator) for each in self.logits(tokens, range(length - 1))]
            tokens = torch.cat((tokens[:1], *drawn))
        return tokens


def _draw(logits: Tensor, generator: torch.Generator) -> Tensor:
    """A token of each row [n, vocabulary], on the CPU; torch.multinomial draws a number for every token there is."""
    sums = logits.softmax(-1).cumsum(-1)
    drawn = torch.rand(len(logits), 1, generator=generator).to(logits.device) * sums[:, -1:]
    return torch.searchsorted(sums, drawn).squeeze(1).clamp_(max=logits.shape[1] - 1).cpu()
