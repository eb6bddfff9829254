"""The messages between a worker and the hub about sequences in the engines of language models."""

from typing import Any

import msgspec

from ..core.errors import SentError
from ..core.logprobs import Logprobs, PromptLogprobs
from ..engine.core.messages import AddRequest
from .tensors import SentTensor

# From a worker


class LoraTaskMessage(msgspec.Struct, array_like=True, frozen=True):
    """A `core.adapter.LoraTask`."""

    number: int
    weights: SentTensor | None
    config: SentTensor | None


class SubmitSequence(msgspec.Struct, array_like=True, tag="submit", frozen=True):
    """A sequence for the engine of the model that a request has acquired."""

    key: int

    request: int
    """The key of the request."""

    add: AddRequest
    """The sequence for the engine; its adapter goes by its name."""

    opened: float
    """When the worker began with it."""

    tokens_wanted: bool
    """Whether it is not for its prompt alone."""

    choice: int
    """A field of `GenerateRequest`, as the rest are."""

    choice_count: int
    prompt_count: int
    lora_task: LoraTaskMessage | None = None


class AbortSequence(msgspec.Struct, array_like=True, tag="abort", frozen=True):
    """The reader of a sequence left."""

    key: int


class CancelRequests(msgspec.Struct, array_like=True, tag="cancel_id", frozen=True):
    """A client ends all generations of a model with its own request id, whichever worker has them. Goes both ways."""

    model: int
    request_id: str


# From the hub


class SequenceSteps(msgspec.Struct, array_like=True, tag="steps", frozen=True):
    """The progress of sequences since the last such message."""

    at: float
    """When the message was made."""

    keys: list[int] = []

    counts: list[int] = []
    """The number of `tokens` that each of `keys` got, one after the other."""

    tokens: list[int] = []

    started: list[tuple[int, int, float]] = []
    """(key, prompt tokens found in the prefix cache, when)"""

    finished: list[tuple[int, str]] = []
    """(key, reason)"""

    logprobs: list[Logprobs | None] = []
    """Of each of `tokens`, if any has them"""

    prompt_logprobs: list[tuple[int, list[PromptLogprobs]]] = []
    """(key, those of the prompt's next tokens)"""

    drafts: list[tuple[int, list[tuple[int, int]]]] = []
    """(key, tokens drafted and accepted of each step)"""

    failed: list[tuple[int, SentError]] = []

    held: list[tuple[int, dict[str, Any]]] = []
    """(key, how another server finds what it computed)"""
