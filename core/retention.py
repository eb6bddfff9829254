"""What a request asks to keep of its cache for those that follow in its session."""

from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
import orjson

from .errors import InvalidArgument, describe_validation_error

USUAL_PRIORITY = 35
"""Of what nothing is said, as TensorRT-LLM has it: more is retained, less makes room first."""

SESSION_PRIORITY = 50
"""Of all of a sequence, where a request names a scope and says nothing else."""

LONGEST_SCOPE = 256
"""Characters of a scope's name."""

_MOST_RANGES = 64

_Token: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Priority: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=100)]
_Duration: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
T = TypeVar("T")


class RetentionRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"seconds": "duration"}):
    """How tokens `start` up to but not including `end` of a sequence are to be kept; None: up to its end. Clients send
    it as one of `retention_directives`, as they were proposed to vLLM."""

    start: _Token = 0
    end: _Token | None = None
    priority: _Priority = USUAL_PRIORITY
    seconds: _Duration | None = None
    """How long after the sequence's end; None: as long as the server allows."""


class Retention(msgspec.Struct, frozen=True, array_like=True):
    """What is to be kept of a sequence for its `scope`: of ranges that overlap the first counts."""

    scope: str
    ranges: tuple[RetentionRange, ...] = ()
    generated: RetentionRange | None = None
    """Of generated tokens, in place of the ranges; its `start` and `end` mean nothing."""

    def at(self, position: int, prompt: int) -> RetentionRange | None:
        """What is asked for the token at a position, of a sequence with a prompt of so many tokens."""
        if self.generated is not None and position >= prompt:
            return self.generated
        covering = (
            part for part in self.ranges if part.start <= position and (part.end is None or position < part.end)
        )
        return next(covering, None)


class TokenRangeRetention(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """TensorRT-LLM's `TokenRangeRetentionConfig`."""

    token_start: _Token = 0
    token_end: _Token | None = None
    priority: _Priority = USUAL_PRIORITY
    duration_ms: _Duration | None = None


class RetentionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """TensorRT-LLM's `KvCacheRetentionConfig`; where it would copy blocks to is the server's business."""

    token_range_retention_configs: Annotated[list[TokenRangeRetention], msgspec.Meta(max_length=_MOST_RANGES)] = []
    decode_retention_priority: _Priority = USUAL_PRIORITY
    decode_duration_ms: _Duration | None = None
    transfer_mode: str | None = None
    directory: str | None = None


def parse_retention(directives: Any, scope: Any, config: Any) -> Retention | None:
    """What a request asks for by `retention_directives`, `retention_scope` and `kv_cache_retention_config`, each of
    which may be JSON's text. A scope alone asks to keep all. None where it asks for nothing.

    Raises:
        InvalidArgument: one is malformed, or both ways are taken; `field` names it.
    """
    name = _scope_name(scope)
    if directives and config:
        message = "give retention_directives or kv_cache_retention_config, not both"
        raise InvalidArgument(message, field="kv_cache_retention_config")
    if config:
        wish = _convert(config, RetentionConfig, "kv_cache_retention_config")
        ranges = [
            RetentionRange(part.token_start, part.token_end, part.priority, _seconds(part.duration_ms))
            for part in wish.token_range_retention_configs
        ]
        generated = RetentionRange(0, None, wish.decode_retention_priority, _seconds(wish.decode_duration_ms))
        return Retention(name, _ordered(ranges, "kv_cache_retention_config"), generated)
    if directives:
        kind = Annotated[list[RetentionRange], msgspec.Meta(max_length=_MOST_RANGES)]
        return Retention(name, _ordered(_convert(directives, kind, "retention_directives"), "retention_directives"))
    return Retention(name, (RetentionRange(priority=SESSION_PRIORITY),)) if name else None


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _scope_name(scope: Any) -> str:
    if scope is None or scope == "":
        return ""
    if not isinstance(scope, str) or len(scope) > LONGEST_SCOPE or not scope.isprintable():
        message = f"retention_scope must be a string of at most {LONGEST_SCOPE} printable characters"
        raise InvalidArgument(message, field="retention_scope")
    return scope


def _convert(value: Any, kind: type[T], parameter: str) -> T:
    try:
        return msgspec.convert(orjson.loads(value) if isinstance(value, str) else value, kind)
    except orjson.JSONDecodeError as error:
        raise InvalidArgument(f"{parameter} is not JSON: {error}", field=parameter) from None
    except msgspec.ValidationError as error:
        mismatch = describe_validation_error(error)
        raise InvalidArgument(f"{parameter}: {mismatch.path} {mismatch}", field=parameter) from None


def _ordered(ranges: Sequence[RetentionRange], parameter: str) -> tuple[RetentionRange, ...]:
    for part in ranges:
        if part.end is not None and part.end < part.start:
            message = f"{parameter}: a range ends at {part.end}, before it starts, at {part.start}"
            raise InvalidArgument(message, field=parameter)
    return tuple(ranges)
