"""Our attention under transformers' modules: the function they call in place of their own.

It holds no state. Where keys and values go, and what is done with what a module says, travels as a keyword argument
from the call of the model through its layers: `attend`, a `AttentionHandler`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from ..checkpoint.model_spec import CheckpointError, LayerAttention

ATTENTION_NAME = "charonia"
"""What the function is registered as; transformers makes no masks for a name it has none for."""


class AttentionCall(NamedTuple):
    """What a module says when it attends: how, and whatever else it hands to an attention function."""

    module: Any
    attention: LayerAttention
    sinks: Tensor | None
    mask: Tensor | None
    others: Mapping[str, Any]


AttentionHandler: TypeAlias = Callable[[AttentionCall, Tensor, Tensor, Tensor], Tensor]
"""(call, queries and keys [N, heads or kv_heads, d], values [N, kv_heads, e]) -> [N, heads * e]."""


def register_attention() -> None:
    """Tell transformers of the function; doing so again changes nothing."""
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
    """As transformers wants it: query and key [1, heads, N, d], value [1, heads, N, e] -> [1, N, heads, e], and no
    weights."""
    if attend is None:
        raise CheckpointError("its modules do not hand keyword arguments down to their attention")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    view = LayerAttention(sliding_window or None, scale, softcap or None, s_aux is not None)
    call = AttentionCall(module, view, None if s_aux is None else s_aux.float(), attention_mask, others)
    mixed = attend(call, *(packed[0].transpose(0, 1) for packed in (query, key, value)))
    return mixed.view(1, mixed.shape[0], query.shape[1], -1), None
