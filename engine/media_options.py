"""What the options say of images and sounds."""

import re
from collections.abc import Mapping, Set
from typing import Any

import msgspec

from ..core.errors import InvalidArgument
from ..core.media import MediaKind
from ..core.media_models import MediaConfig, MediaServices

MEDIA_FIELDS = {
    "limit_mm_per_prompt": "per_prompt",
    "mm_processor_kwargs": "processor_settings",
    "media_path": "path",
    "media_domains": "domains",
    "media_max_bytes": "max_bytes",
    "media_max_pixels": "max_pixels",
    "media_max_seconds": "max_seconds",
    "media_processes": "processes",
    "media_cache_bytes": "cache_bytes",
    "share_media_cache": "share_cache",
}
"""By option, the field of `MediaConfig`."""
_OF_ONE_KIND: Mapping[str, Set[MediaKind]] = {
    "mm_processor_kwargs": {"image"},
    "media_max_pixels": {"image"},
    "media_max_seconds": {"audio"},
}
"""By option, the kind of media that it alone is about."""
_OF_ENCODERS = ("media_cache_bytes", "share_media_cache")
"""Options that encoders of texts go by, too."""
_COUNT = re.compile(r"\s*(\w+)\s*=\s*(\d{1,6})\s*")
_KINDS = ("image", "video", "audio")
"""Kinds that vLLM's option names; of those that are not served none may come anyway."""


class _Count(msgspec.Struct):
    """vLLM's form of a limit with what it is measured by at a start, which counts for nothing here."""

    count: int | None = None


def read_media_config(settings: Mapping[str, Any]) -> MediaConfig:
    """The configuration of options by fields of `MediaConfig`. Raises `InvalidArgument` for a wrong limit, and for
    settings of a processor that are no object."""
    given = dict(settings)
    if "per_prompt" in given:
        counts = _counts(given["per_prompt"])
        given["per_prompt"] = {kind: counts.get(kind, most) for kind, most in MediaConfig().per_prompt.items()}
    if "domains" in given:
        given["domains"] = tuple(filter(None, (name.strip() for name in given["domains"].split(","))))
    if "processor_settings" in given:
        given["processor_settings"] = _json_object(given["processor_settings"], "mm_processor_kwargs")
    return MediaConfig(**given)


def options_without_effect(config: MediaConfig, services: MediaServices | None) -> list[str]:
    """The options that say something which a model with these services, or none, has no use for."""
    kinds: Set[MediaKind] = frozenset() if services is None else frozenset(services.kinds)
    usual = MediaConfig()
    unused = []
    for option, field in MEDIA_FIELDS.items():
        used_by = kinds & _OF_ONE_KIND.get(option, kinds)
        if option == "limit_mm_per_prompt":
            # Where none may come, none does.
            limited = {kind for kind, most in config.per_prompt.items() if most not in (0, usual.per_prompt[kind])}
            given, used_by = bool(limited), kinds & limited
        else:
            given = getattr(config, field) != getattr(usual, field)
        if given and not used_by and (services is None or option not in _OF_ENCODERS):
            unused.append(option)
    return unused


def _json_object(written: str, field: str) -> str:
    """The same object in few characters; nothing for an empty one."""
    try:
        settings = msgspec.json.decode(written, type=dict[str, Any])
    except ValueError:
        raise InvalidArgument(f"{field} must be a JSON object, got {written!r}", field=field) from None
    return msgspec.json.encode(settings, order="sorted").decode() if settings else ""


def _counts(written: str) -> dict[str, int]:
    """Numbers by kind, as in `image=4`, `{"image": 4}` or `{"image": {"count": 4}}`."""
    field = "limit_mm_per_prompt"
    try:
        if written.lstrip().startswith("{"):
            decoded = msgspec.json.decode(written, type=dict[str, int | _Count])
            given = {kind: most.count if isinstance(most, _Count) else most for kind, most in decoded.items()}
            counts = {kind: most for kind, most in given.items() if most is not None}
        else:
            matches = [_COUNT.fullmatch(part) for part in written.split(",")]
            counts = {match[1]: int(match[2]) for match in matches if match is not None}
            if len(counts) < len(matches):
                raise ValueError
    except ValueError:
        message = f"{field} must be as image=4, or a JSON object of numbers, got {written!r}"
        raise InvalidArgument(message, field=field) from None
    if stray := next((kind for kind in counts if kind not in _KINDS), ""):
        raise InvalidArgument(f"{field}: {stray} is not one of {', '.join(_KINDS)}", field=field)
    if min(counts.values(), default=0) < 0:
        raise InvalidArgument(f"{field} must be at least 0, got {written!r}", field=field)
    return counts
