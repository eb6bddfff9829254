"""What goes into a model and what streams out of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

import msgspec

from .errors import InvalidArgument
from .tensor import Tensor

Scalar: TypeAlias = str | int | float | bool


@dataclass(frozen=True, slots=True)
class InferRequest:
    """One v2 inference request. `outputs` names the wanted outputs; None means all of them. `tenant` and `weight` are
    as in `GenerateRequest`."""

    id: str = ""
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    outputs: tuple[str, ...] | None = None
    parameters: Mapping[str, Scalar] = field(default_factory=dict)
    tenant: str = ""
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class InferResponse:
    """One response of the stream that answers an `InferRequest`.

    `final` says that it is the last one; a stream may also end without having said so.
    """

    outputs: tuple[Tensor, ...]
    parameters: Mapping[str, Scalar] = field(default_factory=dict)
    final: bool = False


class FinishReason(StrEnum):
    """Why a generation ended: an end or stop token; a length limit; its time; the client; a fault of ours."""

    STOP = "stop"
    LENGTH = "length"
    TIMEOUT = "timeout"
    ABORT = "abort"
    ERROR = "error"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to choose tokens. None leaves the choice to the model's generation_config.

    `temperature` 0 is greedy; `top_k` 0 or -1 and `top_p` 1 are off. `max_tokens` None means up to the
    model's length. Without a `seed` the engine draws one.

    Raises:
        InvalidArgument: a value is out of range; `field` names it.
    """

    max_tokens: int | None = 16
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check("max_tokens", self.max_tokens, "at least 1", lambda v: v >= 1)
        _check("temperature", self.temperature, "a finite number of at least 0", lambda v: 0 <= v < float("inf"))
        _check("top_k", self.top_k, "-1, 0 (both off) or a positive number", lambda v: v >= -1)
        _check("top_p", self.top_p, "above 0 and at most 1", lambda v: 0 < v <= 1)
        _check("seed", self.seed, "between -2**63 and 2**64 - 1", lambda v: -(2**63) <= v < 2**64)
        for token in self.stop_token_ids:
            _check("stop_token_ids", token, "made of numbers of at least 0", lambda v: v >= 0)


def _check(name: str, value: Any, must_be: str, holds: Any) -> None:
    if value is not None and not holds(value):
        raise InvalidArgument(f"{name} must be {must_be}, got {value!r}", field=name)


class Message(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: str
    content: str


class Conversation(msgspec.Struct, frozen=True):
    """A prompt that the model's chat template still has to render."""

    messages: tuple[Message, ...]


class Logprobs(NamedTuple):
    """What the model itself gave one token, before penalties and temperature: natural logarithms of probabilities.

    `chosen` is the token's own; `ids` are the likeliest tokens, the likeliest first, and `values` theirs.
    """

    chosen: float
    ids: list[int]
    values: list[float]


Prompt: TypeAlias = str | tuple[int, ...] | Conversation
"""Text to tokenize, token ids as they are, or a conversation to render."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One text generation. `priority` 0 is the most urgent class; `tenant` and `cache_salt` part the prefix cache.

    `weight`: the tenant's share beside the other tenants of a class. `timeout`: seconds it may take, from its arrival
    to its last token; 0 leaves it to the model.
    """

    id: str
    prompt: Prompt
    sampling: SamplingParams = SamplingParams()
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    weight: float = 1.0
    timeout: float = 0.0


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt to turn into token ids exactly as `generate` would."""

    prompt: Prompt


class Usage(msgspec.Struct, frozen=True):
    """Tokens counted so far; `cached_tokens` of the prompt came out of the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class GenerateChunk(msgspec.Struct, frozen=True, kw_only=True):
    """What was generated since the last chunk: unread tokens of a slow reader arrive merged.

    `text` may be empty while a character is incomplete. The last chunk, and only it, has a `finish_reason`.
    """

    text: str
    token_ids: tuple[int, ...]
    usage: Usage
    finish_reason: FinishReason | None = None
