"""The option that says who is told what the cache holds: JSON by vLLM's keys."""

import msgspec

from ..core.errors import InvalidArgument, describe_validation_error
from .config import KVEventsConfig


def read_kv_events_config(written: str, prefix_caching: bool) -> KVEventsConfig | None:
    """What `kv_events_config` says; None where it enables nothing.

    Raises:
        InvalidArgument: it is no JSON object, a key or its value means nothing, or nothing would ever be told.
    """
    field = "kv_events_config"
    try:
        config = msgspec.json.decode(written, type=KVEventsConfig)
    except msgspec.ValidationError as error:
        path, reason, *_ = describe_validation_error(error)
        raise InvalidArgument(f"{field}: {path or 'it'} {reason}", field=field) from None
    except msgspec.DecodeError as error:
        raise InvalidArgument(f"{field} must be a JSON object: {error}", field=field) from None
    if not config.publishes:
        return None
    if not prefix_caching:
        raise InvalidArgument(f"{field}: events tell of the prefix cache, and prefix_caching is off", field=field)
    return config
