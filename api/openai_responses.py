"""OpenAI's response bodies, whole and streamed.

Knows the two shapes and nothing of where the text comes from.
"""

import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

import orjson

from ..core.model import ModelConfig
from ..core.request import FinishReason, GenerateChunk, TokenLogprob, Usage
from .connection import event

Object = dict[str, Any]
"""A JSON object."""

_TEXT = "\0text\0"
"""Stands for a text that is not known yet; no model is called so."""


class Shape(Protocol):
    """What completions and chat do differently."""

    object: str
    chunk_object: str

    def choice(self, index: int, text: str, reason: FinishReason | None, logprobs: Object | None) -> Object: ...

    def opening(self, index: int) -> Object | None:
        """A choice that goes out before the first text."""

    def delta(self, index: int, text: str, reason: FinishReason | None, logprobs: Object | None) -> Object: ...

    def logprobs(self, tokens: Sequence[TokenLogprob], offset: int) -> Object:
        """`offset`: characters that the tokens before wrote."""


class CompletionShape:
    object = "text_completion"
    chunk_object = "text_completion"

    def choice(self, index: int, text: str, reason: FinishReason | None, logprobs: Object | None) -> Object:
        return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": reason}

    def opening(self, index: int) -> Object | None:
        return None

    delta = choice

    def logprobs(self, tokens: Sequence[TokenLogprob], offset: int) -> Object:
        ends = accumulate((len(each.text) for each in tokens), initial=offset)
        return {
            "tokens": [each.text for each in tokens],
            "token_logprobs": [each.logprob for each in tokens],
            "top_logprobs": [_by_text(each) for each in tokens],
            "text_offset": list(ends)[:-1],
        }


class ChatShape:
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, index: int, text: str, reason: FinishReason | None, logprobs: Object | None) -> Object:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def opening(self, index: int) -> Object | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, index: int, text: str, reason: FinishReason | None, logprobs: Object | None) -> Object:
        delta = {"content": text} if text else {}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def logprobs(self, tokens: Sequence[TokenLogprob], offset: int) -> Object:
        content = [_entry(each) | {"top_logprobs": [_entry(other) for other in each.top]} for each in tokens]
        return {"content": content, "refusal": None}


def _entry(token: TokenLogprob) -> Object:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.data)}


def _by_text(token: TokenLogprob) -> dict[str, float]:
    """The likeliest tokens and the chosen one; of several that read the same, the likeliest."""
    named: dict[str, float] = {}
    for each in (*token.top, token):
        named.setdefault(each.text, each.logprob)
    return named


class Writer:
    """Writes one answer, whole or as server-sent events: the members that all its objects share, and what was counted.

    Choices stand in the order of the prompts, `choices` for each.
    """

    def __init__(self, shape: Shape, request_id: str, model: str, include_usage: bool, choices: int = 1) -> None:
        self._shape = shape
        self._head = {"id": request_id, "created": int(time.time()), "model": model}
        self._include_usage = include_usage
        self._choices = choices
        self._usage: dict[int, Usage] = {}
        self._offsets: dict[int, int] = {}
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def whole(self, answers: Sequence[GenerateChunk]) -> Object:
        """All in one; `answers[i]` is everything that choice i says."""
        self._usage = {index: answer.usage for index, answer in enumerate(answers)}
        choices = [
            self._shape.choice(index, answer.text, answer.finish_reason, self._logprobs(index, answer))
            for index, answer in enumerate(answers)
        ]
        return {**self._head, "object": self._shape.object, "choices": choices, "usage": self._total()}

    def event(self, index: int, chunk: GenerateChunk) -> bytes:
        """What to send for one chunk: nothing while a character is incomplete."""
        opening = None if index in self._usage else self._shape.opening(index)
        self._usage[index] = chunk.usage
        begin = b"" if opening is None else self._event([opening])
        if chunk.finish_reason or chunk.logprobs:
            logprobs = self._logprobs(index, chunk)
            return begin + self._event([self._shape.delta(index, chunk.text, chunk.finish_reason, logprobs)])
        return begin + self._plain(index, chunk.text) if chunk.text else begin

    def closing(self) -> bytes:
        """The usage of a stream, if it was asked for."""
        return self._event([], self._total()) if self._include_usage else b""

    def _plain(self, index: int, text: str) -> bytes:
        """An event of text alone. Most are: all but the text is written once for all of them."""
        around = self._around.get(index)
        if around is None:
            before, _, after = self._event([self._shape.delta(index, _TEXT, None, None)]).partition(orjson.dumps(_TEXT))
            around = self._around[index] = before, after
        return around[0] + orjson.dumps(text) + around[1]

    def _event(self, choices: list[Object], usage: Object | None = None) -> bytes:
        chunk: Object = {**self._head, "object": self._shape.chunk_object, "choices": choices}
        return event(orjson.dumps({**chunk, "usage": usage} if self._include_usage else chunk))

    def _logprobs(self, index: int, chunk: GenerateChunk) -> Object | None:
        if not chunk.logprobs:
            return None
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + sum(len(each.text) for each in chunk.logprobs)
        return self._shape.logprobs(chunk.logprobs, offset)

    def _total(self) -> Object:
        """A prompt counts once, however many choices it has."""
        prompts = [usage for index, usage in self._usage.items() if index % self._choices == 0]
        prompt = sum(usage.prompt_tokens for usage in prompts)
        completion = sum(usage.completion_tokens for usage in self._usage.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in prompts)},
        }


def model_object(config: ModelConfig) -> dict[str, Any]:
    return {"id": config.name, "object": "model", "created": config.created, "owned_by": "charonia"}
