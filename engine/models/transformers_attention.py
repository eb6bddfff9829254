"""Our attention inside a transformers model, and what its layers ask of theirs.

`register_attention` gives transformers a function without state: the one that stores keys and values travels from the
model's call through its layers as a keyword argument, `attend`. What a cache of one key and one value per layer and
token can't express is found beforehand.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..attention.torch_attention import reference_attention
from ..checkpoint.model_spec import CheckpointError, LayerAttention

ATTENTION_NAME = "charonia"
"""The name that the function is registered by; transformers makes no masks for a name without a mask function."""

_IGNORED_TENSORS = {"position_ids", "position_embeddings", "cache_position", "input_ids"}
"""Tensors that some modules hand on and that say nothing about attention."""


def attention_choice(config: Any, name: str) -> str | dict[str, str]:
    """The attention of that name as a model of this configuration is told of it: of its texts alone, if it takes more
    than those."""
    return name if config.get_text_config() is config else {"text_config": name}


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
        layer = getattr(call.module, "layer_idx", None)
        others = call.others
        if layer is None or layer in self.layers:
            raise CheckpointError(f"it attends more than once in a layer, or not by layer ({layer})")
        tensors = [name for name, value in others.items() if isinstance(value, Tensor) and name not in _IGNORED_TENSORS]
        if tensors:
            raise CheckpointError(f"its attention takes {', '.join(tensors)}, which ours does not know")
        if call.mask is not None:
            raise CheckpointError("its attention takes a mask of its own")
        causal = others.get("is_causal")
        if not (getattr(call.module, "is_causal", True) if causal is None else causal):
            raise CheckpointError(
                "its attention is not causal: it sees later tokens (of some, is_decoder in config.json decides)"
            )
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
    with refuse_failures("with another attention in place of its own"):
        model(input_ids=tokens, position_ids=tokens - 1, use_cache=False, attend=probe)
    config = model.config.get_text_config()
    count = int(config.num_hidden_layers)
    attending = sorted(probe.layers)
    if attending != list(range(count)):
        raise CheckpointError(f"of its {count} layers {attending} attend; all must, and nothing else is cached")
    layers = [probe.layers[number] for number in range(count)]
    kv_heads = max(layer.kv_heads for layer in layers)
    head_dim = max(layer.head_dim for layer in layers)
    if len({layer.heads for layer in layers}) > 1 or any(kv_heads % layer.kv_heads for layer in layers):
        raise CheckpointError("its layers have heads of different numbers, which one cache can't hold")
    # The windows of config.json and of the layers' calls: the few tokens of a check would fill no window.
    if getattr(config, "sliding_window", None):
        types = getattr(config, "layer_types", None)
        slide = [layer.attention.window is not None for layer in layers]
        if slide != [kind == "sliding_attention" for kind in types] if types else not any(slide):
            raise CheckpointError("its config.json has a sliding window that its layers do not hand to their attention")
    return [layer._replace(kv_heads=kv_heads, head_dim=head_dim) for layer in layers]


@contextmanager
def refuse_failures(what: str) -> Iterator[None]:
    """Turn an exception of transformers' modules into a CheckpointError that says at `what` they fail."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError, LookupError, AttributeError, AssertionError) as error:
        reason = f"{type(error).__name__}: {_cut(str(error))}"
        raise CheckpointError(f"transformers' own code for it fails {what} ({reason})") from error


def _cut(text: str) -> str:
    """The first line, as far as a person reads it."""
    line = text.partition("\n")[0]
    return line if len(line) <= 200 else f"{line[:200]}..."
