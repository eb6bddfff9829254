"""The check of a decoder that transformers computes: before anything is served, its logits over a small cache are
compared with those of transformers alone."""

from typing import Any

import torch
from torch import Tensor

from ..attention.backend import CacheSpec
from ..attention.torch_attention import ReferenceAttention
from ..checkpoint.model_spec import CheckpointError, DecoderShape
from ..layers.recurrent_state import StateSlots
from ..layers.step_context import StepContext
from ..step_batch import StepBatch
from .interfaces import Decoder
from .transformers_attention import ATTENTION_NAME, attention_choice, refuse_failures

_BLOCK_SIZE = 4
_FIRST_STEP = (4, 4)
"""Tokens of two sequences in the check's first step."""

_SECOND_STEP = (3,)
"""Tokens of the first of them in its second step."""

_TOLERANCE = {torch.float32: 2e-3, torch.float16: 0.05, torch.bfloat16: 0.15}
"""The tolerated error relative to the spread of logits. Correct roundings differ less; forgetting something, more."""


@torch.inference_mode()
def verify_decoder(model: Any, decoder: Decoder, shape: DecoderShape, dtype: torch.dtype) -> None:
    """Compare two sequences over a paged cache, packed and in two steps, their logits in pieces, with transformers' own
    attention over each alone.

    Raises:
        CheckpointError: logits differ by more than rounding; the message is the reason alone.
    """
    high = min(int(model.config.get_text_config().vocab_size), 1000)
    first = torch.arange(7, 7 + 11 * (_FIRST_STEP[0] + _SECOND_STEP[0]), 11, device=model.device) % high
    second = torch.arange(5, 5 + 17 * _FIRST_STEP[1], 17, device=model.device) % high
    with refuse_failures("by itself, so its config.json may contradict itself"):
        right = _logits_of_transformers(model, first), _logits_of_transformers(model, second)
    memory = _CheckMemory(shape, dtype, model.device)
    packed = torch.cat((first[: _FIRST_STEP[0]], second))
    with refuse_failures("over a cache that holds several sequences in blocks"):
        parts = [
            *torch.split(memory.compute_logits(decoder, packed, (0, 0), _FIRST_STEP), list(_FIRST_STEP)),
            memory.compute_logits(decoder, first[_FIRST_STEP[0] :], (_FIRST_STEP[0],), _SECOND_STEP),
        ]
        expected = right[0][: _FIRST_STEP[0]], right[1], right[0][_FIRST_STEP[0] :]
        worst = max(_relative_error(part, right_part) for part, right_part in zip(parts, expected, strict=True))
    if not worst < _TOLERANCE[dtype]:
        differ = f"differ from its own by {worst:.1%} of their spread"
        raise CheckpointError(f"over a cache of keys and values its logits {differ}")


def _logits_of_transformers(model: Any, tokens: Tensor) -> Tensor:
    exchanged = model.config.get_text_config()._attn_implementation == ATTENTION_NAME
    if exchanged:
        model.set_attn_implementation(attention_choice(model.config, "eager"))
    try:
        logits: Tensor = model(input_ids=tokens.unsqueeze(0), use_cache=False).logits[0]
        return logits
    finally:
        if exchanged:
            model.set_attn_implementation(attention_choice(model.config, ATTENTION_NAME))


class _CheckMemory:
    """A cache and slots for two sequences: row r has blocks 2r and 2r + 1."""

    def __init__(self, shape: DecoderShape, dtype: torch.dtype, device: torch.device) -> None:
        heads = shape.heads, shape.kv_heads, shape.head_dim
        self._cache = ReferenceAttention(CacheSpec(shape.cached_attention, *heads, _BLOCK_SIZE, dtype, device))
        self._cache.allocate(4)
        self._states = StateSlots(shape.states, 2, dtype, device) if any(shape.states) else None
        if self._states is not None:
            self._states.allocate(0)

    def compute_logits(
        self, decoder: Decoder, tokens: Tensor, starts: tuple[int, ...], counts: tuple[int, ...]
    ) -> Tensor:
        """Logits of `tokens`, rows one after the other."""
        tables = torch.arange(2 * len(counts), device=tokens.device).view(-1, 2)
        batch = StepBatch.from_tokens(tokens, starts, counts, tables, _BLOCK_SIZE)
        pieces = torch.split(torch.arange(len(tokens), device=tokens.device), 2)
        states = None if self._states is None else self._states.begin_step(batch)
        context = StepContext(batch, self._cache.begin_step(batch), states=states)
        logits = decoder.compute_logits(context, pieces)
        assert logits is not None, "transformers computes the whole model"
        return torch.cat(list(logits))


def _relative_error(logits: Tensor, right: Tensor) -> float:
    """The median error of a token's logits relative to their spread; not the mean, for a rounding may send one token to
    another expert."""
    error = (logits.float() - right.float()).pow(2).mean(-1).sqrt()
    return float((error / right.float().std(-1)).median())
