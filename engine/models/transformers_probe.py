"""Our attention under transformers' modules, and the check that a module over our cache computes what it computes
alone.

`register_attention` gives transformers a function to call in place of its own attention. It holds no state: the
function that stores keys and values travels as a keyword argument, `attend`, from the call of the model through its
layers. Everything that a cache of one key and one value per layer and token can't express (state of other kinds, biases
in masks, attention to later tokens) is found here and refused before anything is served.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..attention.backend import CacheSpec
from ..attention.reference import ReferenceAttention, reference_attention
from ..checkpoint.model_spec import CheckpointError, LayerAttention
from ..layers.step_context import StepContext
from ..step_batch import StepBatch
from .interfaces import Decoder

ATTENTION_NAME = "charonia"
"""The name that the function is registered by; transformers makes no masks for a name without a mask function."""

_BLOCK_SIZE = 4
_FIRST_STEP, _SECOND_STEP = (4, 4), (3,)
"""Tokens of two sequences in the check's first step, and of the first of them in its second step."""
_IGNORED_TENSORS = {"position_ids", "position_embeddings", "cache_position", "input_ids"}
"""Tensors that some modules hand on and that say nothing about attention."""
_TOLERANCE = {torch.float32: 2e-3, torch.float16: 0.05, torch.bfloat16: 0.15}
"""The tolerated error relative to the spread of logits. Correct roundings differ less; forgetting something, more."""


class AttentionCall(NamedTuple):
    """One attention of a module: how it attends, and the other arguments that it gave."""

    module: Any
    attention: LayerAttention
    sinks: Tensor | None
    mask: Tensor | None
    others: Mapping[str, Any]


AttentionHandler: TypeAlias = Callable[[AttentionCall, Tensor, Tensor, Tensor], Tensor]
"""(call, queries and keys [N, heads or kv_heads, d], values [N, kv_heads, e]) -> [N, heads * e]."""


def register_attention() -> None:
    """Register the function with transformers; to do so again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, _attention)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    attend: AttentionHandler | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The signature of transformers' AttentionInterface: query and key [1, heads, N, d], value [1, heads, N, e] ->
    [1, N, heads, e], and no attention weights."""
    if attend is None:
        raise CheckpointError("its modules do not hand keyword arguments down to their attention")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attention = LayerAttention(sliding_window or None, scale, softcap or None, s_aux is not None)
    call = AttentionCall(module, attention, None if s_aux is None else s_aux.float(), attention_mask, others)
    mixed = attend(call, *(packed[0].transpose(0, 1) for packed in (query, key, value)))
    return mixed.view(1, mixed.shape[0], query.shape[1], -1), None


class ProbedLayer(NamedTuple):
    """A layer of a transformers model: how it attends and with which heads; `head_dim` is the size of its keys or of
    its values, whichever is larger."""

    attention: LayerAttention
    heads: int
    kv_heads: int
    head_dim: int


class AttentionProbe:
    """An `AttentionHandler` that notes each layer's call, refuses all that a `LayerAttention` does not express, and
    attends by the formula; for one sequence from its start."""

    def __init__(self) -> None:
        self.layers: dict[int, ProbedLayer] = {}

    def __call__(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layer, others = getattr(call.module, "layer_idx", None), call.others
        if layer is None or layer in self.layers:
            raise CheckpointError(f"it attends more than once in a layer, or not by layer ({layer})")
        tensors = [name for name, value in others.items() if isinstance(value, Tensor) and name not in _IGNORED_TENSORS]
        if tensors:
            raise CheckpointError(f"its attention takes {', '.join(tensors)}, which ours does not know")
        if call.mask is not None:
            raise CheckpointError("its attention takes a mask of its own")
        causal = others.get("is_causal")
        if not (getattr(call.module, "is_causal", True) if causal is None else causal):
            raise CheckpointError("its attention is not causal")
        if k.shape[:2] != v.shape[:2]:
            raise CheckpointError(f"layer {layer} has {k.shape[1]} heads of keys and {v.shape[1]} of values")
        self.layers[layer] = ProbedLayer(call.attention, q.shape[1], k.shape[1], max(k.shape[2], v.shape[2]))
        return reference_attention(q, k, v, 0, call.attention, call.sinks)


@torch.inference_mode()
def probe_layers(model: Any) -> list[ProbedLayer]:
    """The layers of a transformers model, found by calling it once; all are given the heads of one cache for all.

    Raises:
        CheckpointError: a layer attends in a way that our attention does not; the message is the reason alone.
    """
    probe = AttentionProbe()
    tokens = torch.arange(1, 4, device=model.device).unsqueeze(0)
    with _failures_refused("another attention"):
        model(input_ids=tokens, position_ids=tokens - 1, use_cache=False, attend=probe)
    count = int(model.config.num_hidden_layers)
    if (found := sorted(probe.layers)) != list(range(count)):
        raise CheckpointError(f"of its {count} layers {found} attend; all must, and nothing else is cached")
    layers = [probe.layers[number] for number in range(count)]
    kv_heads, head_dim = max(each.kv_heads for each in layers), max(each.head_dim for each in layers)
    if len({each.heads for each in layers}) > 1 or any(kv_heads % each.kv_heads for each in layers):
        raise CheckpointError("its layers have heads of different numbers, which one cache can't hold")
    # The windows of config.json and of the layers' calls: the few tokens of a check would fill no window.
    if getattr(model.config, "sliding_window", None):
        types = getattr(model.config, "layer_types", None)
        slide = [each.attention.window is not None for each in layers]
        if slide != [each == "sliding_attention" for each in types] if types else not any(slide):
            raise CheckpointError("its config.json has a sliding window that its layers do not hand to their attention")
    return [each._replace(kv_heads=kv_heads, head_dim=head_dim) for each in layers]


@contextmanager
def _failures_refused(new: str) -> Iterator[None]:
    """Turn an exception of transformers' modules into a CheckpointError that names what is `new` to them."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise CheckpointError(f"its modules fail over {new} ({error})") from error


@torch.inference_mode()
def verify_decoder(model: Any, decoder: Decoder, layers: list[ProbedLayer], dtype: torch.dtype) -> None:
    """Compare two sequences over a paged cache, packed and in two steps, their logits in pieces, with transformers' own
    attention over each alone.

    Raises:
        CheckpointError: logits differ by more than rounding; the message is the reason alone.
    """
    high = min(int(model.config.vocab_size), 1000)
    first = torch.arange(7, 7 + 11 * (_FIRST_STEP[0] + _SECOND_STEP[0]), 11, device=model.device) % high
    second = torch.arange(5, 5 + 17 * _FIRST_STEP[1], 17, device=model.device) % high
    right = _logits_of_transformers(model, first), _logits_of_transformers(model, second)
    heads, attention = layers[0][1:], tuple(each.attention for each in layers)
    cache = ReferenceAttention(CacheSpec(attention, *heads, _BLOCK_SIZE, dtype, model.device))
    cache.allocate(4)
    packed = torch.cat((first[: _FIRST_STEP[0]], second))
    with _failures_refused("our cache"):
        parts = [
            *torch.split(_logits_over_cache(decoder, cache, packed, (0, 0), _FIRST_STEP), list(_FIRST_STEP)),
            _logits_over_cache(decoder, cache, first[_FIRST_STEP[0] :], (_FIRST_STEP[0],), _SECOND_STEP),
        ]
        expected = right[0][: _FIRST_STEP[0]], right[1], right[0][_FIRST_STEP[0] :]
        worst = max(_relative_error(found, wanted) for found, wanted in zip(parts, expected, strict=True))
    if not worst < _TOLERANCE[dtype]:
        differ = f"differ from its own by {worst:.1%} of their spread"
        raise CheckpointError(f"over a cache of keys and values its logits {differ}")


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
    tables = torch.arange(2 * len(counts), device=tokens.device).view(-1, 2)
    batch = StepBatch.from_tokens(tokens, starts, counts, tables, _BLOCK_SIZE)
    pieces = torch.split(torch.arange(len(tokens), device=tokens.device), 2)
    logits = decoder.compute_logits(StepContext(batch, cache.begin_step(batch)), pieces)
    assert logits is not None, "transformers computes the whole model"
    return torch.cat(list(logits))


def _relative_error(found: Tensor, right: Tensor) -> float:
    """The median error of a token's logits relative to their spread; not the mean, for a rounding may send one token to
    another expert."""
    error = (found.float() - right.float()).pow(2).mean(-1).sqrt()
    return float((error / right.float().std(-1)).median())
