"""Sequences that could never run, whatever else does."""

from ..core.errors import InvalidArgument
from ..kvcache.manager import KVCacheManager
from .sequence import SequenceRequest


def check_can_ever_run(request: SequenceRequest, max_model_len: int, cache: KVCacheManager) -> None:
    """Raises `InvalidArgument` for a sequence that model or cache is too small for; `field` names the culprit."""
    prompt, new = len(request.prompt), request.max_tokens
    if prompt < 1:
        raise InvalidArgument("the prompt is empty", field="prompt")
    if new < 0:
        raise InvalidArgument(f"max_tokens must be at least 0, got {new}", field="max_tokens")
    if prompt + new > max_model_len:
        raise InvalidArgument(
            f"{prompt} prompt tokens and {new} new ones exceed the model's {max_model_len}",
            field="max_tokens" if prompt < max_model_len else "prompt",
        )
    if cache.blocks_for(prompt + max(new, 1) - 1) > cache.blocks:
        raise InvalidArgument(
            f"{prompt} prompt tokens and {new} new ones exceed the cache's {cache.blocks * cache.block_size}",
            field="max_tokens" if cache.blocks_for(prompt) <= cache.blocks else "prompt",
        )
