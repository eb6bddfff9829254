"""What a language model answers to a program, in the shapes that vLLM's offline users know."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.logprobs import PromptToken, TokenLogprob
from ..core.request import GenerateChunk


@dataclass(slots=True)
class Logprob:
    """The log-probability of one token in its place."""

    logprob: float
    rank: int | None = None
    """1 is the likeliest; None where it is not known."""
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One answer to a prompt, or in a stream what is new of it."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    """The sum of `logprobs` of its tokens; None without them."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each token, itself and the likeliest, by id."""
    finish_reason: str | None = None
    """stop, length, timeout or abort; None while it goes on."""
    stop_reason: str | int | None = None
    """The stop string or token that ended it."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The answers to one prompt."""

    request_id: str
    prompt: str | None
    """The text that was given; None of token ids and of messages."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    """For each token of the prompt, None for the first."""
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    """Tokens of the prompt that came from the prefix cache."""
    lora_request: Any = None
    """What was given as such."""
    metrics: None = None
    """As vLLM's without statistics: `LLM.server` has them."""


@dataclass(slots=True)
class PoolingOutput:
    """What an encoder made of a prompt."""

    data: NDArray[np.float32]
    """[dimensions], or [tokens, dimensions] of a task by tokens."""


@dataclass(slots=True)
class PoolingRequestOutput:
    """What an encoder made of one prompt, as it is."""

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int] | None = None
    """As they were given; None of texts, which the encoder's process tokenizes."""
    finished: bool = True


@dataclass(slots=True)
class EmbeddingOutput:
    """A vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """The vector of one prompt."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int] | None = None
    """As they were given; None of texts, which the encoder's process tokenizes."""
    finished: bool = True


@dataclass(slots=True)
class ClassificationOutput:
    """How likely each class of a model is."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ClassificationRequestOutput:
    """The classes of one prompt."""

    request_id: str
    outputs: ClassificationOutput
    prompt_token_ids: list[int] | None = None
    """As they were given; None of texts, which the encoder's process tokenizes."""
    finished: bool = True


@dataclass(slots=True)
class ScoringOutput:
    """How well two texts go together."""

    score: float


@dataclass(slots=True)
class ScoringRequestOutput:
    """The score of one pair of texts."""

    request_id: str
    outputs: ScoringOutput
    finished: bool = True


def completion(index: int, chunk: GenerateChunk, with_logprobs: bool) -> CompletionOutput:
    """The chunk as an answer, or a part of one."""
    logprobs = [_of_token(token) for token in chunk.logprobs] if with_logprobs else None
    return CompletionOutput(
        index,
        chunk.text,
        list(chunk.token_ids),
        sum(token.logprob for token in chunk.logprobs) if with_logprobs else None,
        logprobs,
        None if chunk.finish_reason is None else chunk.finish_reason.value,
        chunk.stop_reason,
    )


def prompt_logprobs(tokens: Sequence[PromptToken]) -> list[dict[int, Logprob] | None] | None:
    """None where they were not asked for."""
    return [None if token.given is None else _of_token(token.given, token.rank) for token in tokens] or None


def _of_token(token: TokenLogprob, rank: int = 0) -> dict[int, Logprob]:
    return {int(name): Logprob(**scored) for name, scored in token.by_id(rank).items()}


def all_finished(outputs: Iterable[CompletionOutput]) -> bool:
    return all(output.finished() for output in outputs)
