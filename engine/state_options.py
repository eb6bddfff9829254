"""The options that a model whose layers keep a recurrent state does not take."""

from ..core.errors import InvalidArgument
from .config import EngineConfig


def check_states_go_with(config: EngineConfig) -> None:
    """Called for a model with states, before its weights are read.

    Raises:
        InvalidArgument: the configuration has an option that these don't go with yet.
    """
    if config.cache.host_bytes:
        message = "a model whose layers keep a recurrent state has no blocks in the host's memory: leave this out"
        raise InvalidArgument(f"kv_cache_host_bytes: {message}", field="kv_cache_host_bytes")
