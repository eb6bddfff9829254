"""Rotary positions of transformers' models, which may depend on the longest sequence of a batch: ours are packed from
many sequences, whose keys stay in the cache while they grow. Longrope's two sets of frequencies are decided by the most
positions that a sequence may have, as in our own layers.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from torch import nn

from ..checkpoint.model_spec import CheckpointError

_LONGROPE, _DYNAMIC = "longrope", "dynamic"


def refuse_rope(config: Any) -> None:
    """Raises `CheckpointError` for a configuration whose positions transformers does not know, or that depend on the
    other sequences of a batch."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    ropes = _ropes(config)
    nested: list[Mapping[str, Any]] = [rope for rope in ropes.values() if isinstance(rope, dict)]
    kinds = [_kind(rope) for rope in nested or [ropes]]
    if wrong := [kind for kind in kinds if not isinstance(kind, str | None)]:
        raise CheckpointError(f"rope type {wrong[0]!r} must be a name")
    if strange := {kind for kind in kinds if kind} - {"default", *ROPE_INIT_FUNCTIONS}:
        raise CheckpointError(f"transformers knows no rope type {', '.join(map(repr, sorted(strange)))}")
    depending = {_LONGROPE, _DYNAMIC}.intersection(kinds)
    fixed = not nested and (depending == {_LONGROPE} or (ropes.get("alpha") and _stretches_once(config)))
    if depending and not fixed:
        raise CheckpointError(f"rope type {', '.join(depending)} depends on the other sequences of a batch")


def original_length(config: Any, longest: int) -> int:
    """The length up to which longrope takes its frequencies for short texts; of other models the `longest`."""
    ropes = _ropes(config)
    original = ropes.get("original_max_position_embeddings")
    return min(int(original), longest) if _kind(ropes) == _LONGROPE and original else longest


def fix_longrope(model: nn.Module, positions: int) -> None:
    """Make longrope's frequencies those for sequences of up to so many positions, whatever a batch has. Raises
    `CheckpointError` if a model does not compute them as transformers' models do."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config: Any = model.config
    if _kind(_ropes(config.get_text_config())) != _LONGROPE:
        return
    ropes: list[Any] = [module for module in model.modules() if getattr(module, "rope_type", None) == _LONGROPE]
    if not ropes:
        raise CheckpointError("its longrope depends on the other sequences of a batch")
    for rope in ropes:
        stated = rope.config.rope_parameters
        long = positions > stated["original_max_position_embeddings"]
        length = positions if long else None
        frequencies, factor = ROPE_INIT_FUNCTIONS[_LONGROPE](rope.config, rope.inv_freq.device, seq_len=length)
        factor = stated.get("long_mscale" if long else "short_mscale", factor)
        rope.inv_freq.copy_(frequencies)
        rope.attention_scaling = factor
        rope.rope_type = "default"
        if hasattr(rope, "rope_init_fn"):  # PhiMoE asks it, and its configuration, in every step
            rope.rope_init_fn = _Known(frequencies, factor)
            rope.config = SimpleNamespace(rope_parameters=stated | {"rope_type": "default"})


class _Known:
    """Frequencies that were computed, as a function of a configuration."""

    def __init__(self, frequencies: Any, factor: float) -> None:
        self._known = frequencies, factor

    def __call__(self, config: Any) -> tuple[Any, float]:
        return self._known


def _ropes(config: Any) -> Mapping[str, Any]:
    return getattr(config, "rope_parameters", None) or {}


def _kind(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", "default")


def _stretches_once(config: Any) -> bool:
    """Whether transformers makes of `dynamic` with an `alpha` frequencies that stay as they are."""
    return str(config.model_type).startswith("hunyuan")
