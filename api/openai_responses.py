"""OpenAI's response bodies, whole and streamed.

Knows the two shapes and nothing of where the text comes from.
"""

import time
from collections.abc import Iterable
from typing import Any, Protocol

from ..core.model import ModelConfig
from ..core.request import FinishReason, GenerateChunk, Usage


class Shape(Protocol):
    """What completions and chat do differently."""

    object: str
    chunk_object: str

    def choice(self, index: int, text: str, reason: FinishReason | None) -> dict[str, Any]: ...

    def opening(self, index: int) -> dict[str, Any] | None:
        """A choice that goes out before the first text."""

    def delta(self, index: int, text: str, reason: FinishReason | None) -> dict[str, Any]: ...


class CompletionShape:
    object = "text_completion"
    chunk_object = "text_completion"

    def choice(self, index: int, text: str, reason: FinishReason | None) -> dict[str, Any]:
        return {"text": text, "index": index, "logprobs": None, "finish_reason": reason}

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    delta = choice


class ChatShape:
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, index: int, text: str, reason: FinishReason | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": reason}

    def opening(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, index: int, text: str, reason: FinishReason | None) -> dict[str, Any]:
        delta = {"content": text} if text else {}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


class Writer:
    """Writes one answer: the members that all its objects share, and the usage counted so far."""

    def __init__(self, shape: Shape, request_id: str, model: str, include_usage: bool) -> None:
        self._shape = shape
        self._head = {"id": request_id, "created": int(time.time()), "model": model}
        self._include_usage = include_usage
        self._usage: dict[int, Usage] = {}

    def whole(self, texts: list[str], reasons: list[FinishReason | None]) -> dict[str, Any]:
        pairs = enumerate(zip(texts, reasons, strict=True))
        choices = [self._shape.choice(index, text, reason) for index, (text, reason) in pairs]
        return {**self._head, "object": self._shape.object, "choices": choices, "usage": _total(self._usage.values())}

    def count(self, index: int, chunk: GenerateChunk) -> bool:
        """Note the usage; whether this was the choice's first chunk."""
        first = index not in self._usage
        self._usage[index] = chunk.usage
        return first

    def chunks(self, index: int, chunk: GenerateChunk) -> Iterable[dict[str, Any]]:
        """The objects to send for one chunk: none while a character is incomplete."""
        opening = self._shape.opening(index) if self.count(index, chunk) else None
        if opening is not None:
            yield self._chunk([opening])
        if chunk.text or chunk.finish_reason:
            yield self._chunk([self._shape.delta(index, chunk.text, chunk.finish_reason)])

    def closing(self) -> dict[str, Any] | None:
        """The usage of a stream, if it was asked for."""
        if not self._include_usage:
            return None
        return self._chunk([]) | {"usage": _total(self._usage.values())}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "object": self._shape.chunk_object, "choices": choices}
        return {**chunk, "usage": None} if self._include_usage else chunk


def model_object(config: ModelConfig) -> dict[str, Any]:
    return {"id": config.name, "object": "model", "created": config.created, "owned_by": "charonia"}


def _total(usages: Iterable[Usage]) -> dict[str, Any]:
    counted = list(usages)
    prompt = sum(usage.prompt_tokens for usage in counted)
    completion = sum(usage.completion_tokens for usage in counted)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in counted)},
    }
