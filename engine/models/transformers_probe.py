"""Whether a module of transformers really does over our cache what it does alone: heard and tried, not assumed.

What a cache of one key and one value per layer and token can't express (state of other kinds, biases in masks,
attention to what comes later) shows here as a refusal, before anything is served.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..attention.backend import CacheSpec
from ..attention.reference import ReferenceAttention, reference_attention
from ..checkpoint.model_spec import CheckpointError, LayerAttention
from ..step_batch import StepBatch
from .interfaces import Decoder
from .transformers_attention import ATTENTION_NAME, AttentionCall

_BLOCK = 4
_FIRST, _SECOND = (4, 4), (3,)
"""Tokens of two sequences in the trial's first step, and of the first of them in the second."""
_IGNORED_TENSORS = {"position_ids", "position_embeddings", "cache_position", "input_ids"}
"""Tensors that say nothing about attention, which some modules hand on."""
_TOLERANCE = {torch.float32: 2e-3, torch.float16: 0.05, torch.bfloat16: 0.15}
"""Of the logits' spread. Two right ways to round differ less; forgetting something differs more."""


class ProbedLayer(NamedTuple):
    """What a layer said of itself: how it attends, and with which heads; `head_dim` is the size of its keys or of its
    values, whichever is larger."""

    attention: LayerAttention
    heads: int
    kv_heads: int
    head_dim: int


class AttentionProbe:
    """Notes what each layer says, and answers by the formula; one sequence from its start."""

    def __init__(self) -> None:
        self.layers: dict[int, ProbedLayer] = {}

    def __call__(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layer = getattr(call.module, "layer_idx", None)
        if layer is None or layer in self.layers:
            raise CheckpointError(f"it attends more than once in a layer, or not by layer ({layer})")
        _check_call(call)
        if k.shape[:2] != v.shape[:2]:
            raise CheckpointError(f"layer {layer} has {k.shape[1]} heads of keys and {v.shape[1]} of values")
        self.layers[layer] = ProbedLayer(call.attention, q.shape[1], k.shape[1], max(k.shape[2], v.shape[2]))
        return reference_attention(q, k, v, 0, call.attention, call.sinks)


def _check_call(call: AttentionCall) -> None:
    """What a module may ask of an attention function beside what a View says."""
    tensors = [
        name for name, value in call.others.items() if isinstance(value, Tensor) and name not in _IGNORED_TENSORS
    ]
    if tensors:
        raise CheckpointError(f"its attention takes {', '.join(tensors)}, which ours does not know")
    if call.mask is not None:
        raise CheckpointError("its attention takes a mask of its own")
    causal = call.others.get("is_causal")
    if not (getattr(call.module, "is_causal", True) if causal is None else causal):
        raise CheckpointError("its attention is not causal")


@torch.inference_mode()
def probe_layers(model: Any) -> list[ProbedLayer]:
    """What the layers of a transformers model say of how they attend, all with the heads of a cache that holds each's.

    Raises:
        CheckpointError: something that our attention does not do; the message is the reason alone.
    """
    ear = AttentionProbe()
    tokens = torch.arange(1, 4, device=model.device).unsqueeze(0)
    with _failures_refused("another attention"):
        model(input_ids=tokens, position_ids=tokens - 1, use_cache=False, attend=ear)
    layers = int(model.config.num_hidden_layers)
    if sorted(ear.layers) != list(range(layers)):
        raise CheckpointError(
            f"of its {layers} layers {sorted(ear.layers)} attend; all must, and nothing else is cached"
        )
    heard = [ear.layers[layer] for layer in range(layers)]
    kv_heads, head_dim = max(each.kv_heads for each in heard), max(each.head_dim for each in heard)
    if len({each.heads for each in heard}) > 1 or any(kv_heads % each.kv_heads for each in heard):
        raise CheckpointError("its layers have heads of different numbers, which one cache can't hold")
    _check_windows(model.config, [each.attention for each in heard])
    return [each._replace(kv_heads=kv_heads, head_dim=head_dim) for each in heard]


@contextmanager
def _failures_refused(new: str) -> Iterator[None]:
    """What fails in transformers' modules fails for what is `new` to them."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise CheckpointError(f"its modules fail over {new} ({error})") from error


def _check_windows(config: Any, views: list[LayerAttention]) -> None:
    """A trial of a few tokens fills no window: what config.json and the layers say must be the same."""
    if not getattr(config, "sliding_window", None):
        return
    types = getattr(config, "layer_types", None)
    slide = [view.window is not None for view in views]
    if slide != [each == "sliding_attention" for each in types] if types else not any(slide):
        raise CheckpointError("its config.json has a sliding window that its layers do not hand to their attention")


@torch.inference_mode()
def verify_decoder(model: Any, decoder: Decoder, heard: list[ProbedLayer], dtype: torch.dtype) -> None:
    """Two sequences, packed and in pieces, their logits in pieces too, against transformers' own attention on each
    alone.

    Raises:
        CheckpointError: they differ by more than rounding; the message is the reason alone.
    """
    high = min(int(model.config.vocab_size), 1000)
    first = torch.arange(7, 7 + 11 * (_FIRST[0] + _SECOND[0]), 11, device=model.device) % high
    second = torch.arange(5, 5 + 17 * _FIRST[1], 17, device=model.device) % high
    right = _logits_of_transformers(model, first), _logits_of_transformers(model, second)
    cache = ReferenceAttention(_cache(heard, dtype, model.device))
    cache.allocate(4)
    packed = torch.cat((first[: _FIRST[0]], second))
    with _failures_refused("our cache"):
        parts = [
            *torch.split(_logits_over_cache(decoder, cache, packed, (0, 0), _FIRST), list(_FIRST)),
            _logits_over_cache(decoder, cache, first[_FIRST[0] :], (_FIRST[0],), _SECOND),
        ]
        expected = right[0][: _FIRST[0]], right[1], right[0][_FIRST[0] :]
        worst = max(_relative_error(found, wanted) for found, wanted in zip(parts, expected, strict=True))
    if not worst < _TOLERANCE[dtype]:
        raise CheckpointError(
            f"over a cache of keys and values its logits differ from its own by {worst:.1%} of their spread"
        )


def _logits_of_transformers(model: Any, tokens: Tensor) -> Tensor:
    model.set_attn_implementation("eager")
    try:
        logits: Tensor = model(input_ids=tokens.unsqueeze(0), use_cache=False).logits[0]
        return logits
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


def _logits_over_cache(
    decoder: Decoder, cache: ReferenceAttention, tokens: Tensor, starts: tuple[int, ...], counts: tuple[int, ...]
) -> Tensor:
    """Logits of `tokens`, rows one after the other; row r has blocks 2r and 2r + 1."""
    rows = len(counts)
    tables = torch.arange(2 * rows, device=tokens.device).view(rows, 2)
    batch = StepBatch.from_tokens(tokens, starts, counts, tables, _BLOCK)
    pieces = torch.split(torch.arange(len(tokens), device=tokens.device), 2)
    logits = decoder.compute_logits(batch, cache.begin_step(batch), pieces)
    assert logits is not None, "what transformers computes is the whole model"
    return torch.cat(list(logits))


def _relative_error(found: Tensor, right: Tensor) -> float:
    """Of the middle token, relative to how far logits lie apart: a rounding may send one to another expert."""
    off = (found.float() - right.float()).pow(2).mean(-1).sqrt()
    return float((off / right.float().std(-1)).median())


def _cache(heard: list[ProbedLayer], dtype: torch.dtype, device: torch.device) -> CacheSpec:
    layer, views = heard[0], tuple(each.attention for each in heard)
    return CacheSpec(views, layer.heads, layer.kv_heads, layer.head_dim, _BLOCK, dtype, device)
