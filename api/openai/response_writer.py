"""OpenAI's response bodies, whole and streamed.

Knows the two shapes and nothing of where the text comes from.
"""

import time
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Any, Protocol

import msgspec
import orjson

from ...core.model import ModelConfig
from ...core.request import GenerateChunk, Usage
from ..http.connection import sse_event
from .logprobs_json import JsonObject, chat_logprobs, completion_logprobs, prompt_logprobs, select_best
from .request_parsing import ResponseSpec

_PLAIN = GenerateChunk(text="\0text\0", token_ids=(), usage=Usage(0, 0))
"""Stands for a chunk whose text is not known yet; no model has this text for a name."""
_TEXT = orjson.dumps(_PLAIN.text)
"""That text as it stands in the JSON of an event."""


class ApiFormat(Protocol):
    """What completions and chat do differently."""

    object: str
    chunk_object: str

    def choice(self, index: int, chunk: GenerateChunk, logprobs: JsonObject | None) -> JsonObject: ...

    def first_delta(self, index: int) -> JsonObject | None:
        """A choice that goes out before the first text."""

    def delta(self, index: int, chunk: GenerateChunk, logprobs: JsonObject | None) -> JsonObject: ...

    def logprobs(self, chunk: GenerateChunk, offset: int, reply: ResponseSpec) -> JsonObject:
        """`offset`: characters that the tokens before wrote."""

    def show_prompts(self, body: JsonObject, name: str, prompts: Sequence[Any]) -> None:
        """Put what is told of the choices' prompts under a `name` where it belongs."""


class CompletionFormat:
    object = "text_completion"
    chunk_object = "text_completion"

    def choice(self, index: int, chunk: GenerateChunk, logprobs: JsonObject | None) -> JsonObject:
        return {"text": chunk.text, "index": index, "logprobs": logprobs, **_end(chunk)}

    def first_delta(self, index: int) -> JsonObject | None:
        return None

    delta = choice

    def logprobs(self, chunk: GenerateChunk, offset: int, reply: ResponseSpec) -> JsonObject:
        prompt = chunk.prompt_logprobs if reply.echo else ()
        return completion_logprobs(prompt, chunk.logprobs, offset, reply.logprobs or 0)

    def show_prompts(self, body: JsonObject, name: str, prompts: Sequence[Any]) -> None:
        for choice, prompt in zip(body["choices"], prompts, strict=True):
            choice[name] = prompt


class ChatFormat:
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, index: int, chunk: GenerateChunk, logprobs: JsonObject | None) -> JsonObject:
        message = {"role": "assistant", "content": chunk.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, **_end(chunk)}

    def first_delta(self, index: int) -> JsonObject | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, index: int, chunk: GenerateChunk, logprobs: JsonObject | None) -> JsonObject:
        delta = {"content": chunk.text} if chunk.text else {}
        return {"index": index, "delta": delta, "logprobs": logprobs, **_end(chunk)}

    def logprobs(self, chunk: GenerateChunk, offset: int, reply: ResponseSpec) -> JsonObject:
        return chat_logprobs(chunk.logprobs)

    def show_prompts(self, body: JsonObject, name: str, prompts: Sequence[Any]) -> None:
        body[name] = prompts[0]


def _end(chunk: GenerateChunk) -> JsonObject:
    """Why the answer ended, if it did; by vLLM's `stop_reason`, at what."""
    return {"finish_reason": chunk.finish_reason, "stop_reason": chunk.stop_reason}


class OpenAIResponseWriter:
    """Writes one answer, whole or as server-sent events: the members that all its objects share, and what was counted.

    Choices stand in the order of the prompts.
    """

    def __init__(self, shape: ApiFormat, reply: ResponseSpec, fingerprint: str) -> None:
        self._shape = shape
        self._reply = reply
        head = {"id": reply.id, "created": int(time.time()), "model": reply.model}
        self._head = head | {"system_fingerprint": fingerprint}
        self._details = reply.return_token_ids or reply.continuous_usage
        """An event has more than its text."""
        self._usage: dict[int, Usage] = {}
        self._offsets: dict[int, int] = {}
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def full_response(self, answers: Sequence[GenerateChunk]) -> JsonObject:
        """All in one; `answers[i]` is everything that was said as choice i, of its prompt by the first of them."""
        self._usage = {index: answer.usage for index, answer in enumerate(answers)}
        shown = select_best(list(self._with_prompts(answers)), self._reply.best_of, self._reply.n)
        choices = [
            self._with_ids(self._shape.choice(index, answer, self._logprobs(index, answer)), answer)
            for index, answer in enumerate(shown)
        ]
        body = {**self._head, "object": self._shape.object, "choices": choices, "usage": self._total()}
        if (most := self._reply.prompt_logprobs) is not None:
            self._shape.show_prompts(
                body, "prompt_logprobs", [prompt_logprobs(answer.prompt_logprobs, most) for answer in shown]
            )
        if self._reply.return_token_ids:
            self._shape.show_prompts(body, "prompt_token_ids", [answer.prompt_ids for answer in shown])
        return body

    def _with_prompts(self, answers: Sequence[GenerateChunk]) -> Iterator[GenerateChunk]:
        """Each with what the first one to its prompt says of that."""
        for index, answer in enumerate(answers):
            first = answers[index - index % self._reply.best_of]
            yield answer if answer is first else msgspec.structs.replace(answer, prompt_logprobs=first.prompt_logprobs)

    def chunk_event(self, index: int, chunk: GenerateChunk) -> bytes:
        """What to send for one chunk: nothing while a character is incomplete."""
        begin, prompt_ids = b"", chunk.prompt_ids
        if index not in self._usage and (opening := self._shape.first_delta(index)) is not None:
            self._usage[index] = msgspec.structs.replace(chunk.usage, completion_tokens=0)
            begin, prompt_ids = self._event([opening], prompt_ids), ()
        self._usage[index] = chunk.usage
        if (
            chunk.finish_reason
            or chunk.logprobs
            or chunk.prompt_logprobs
            or (self._details and (chunk.text or chunk.token_ids))
        ):
            choice = self._shape.delta(index, chunk, self._logprobs(index, chunk))
            return begin + self._event([self._with_ids(choice, chunk)], prompt_ids)
        return begin + self._plain(index, chunk.text) if chunk.text else begin

    def usage_event(self) -> bytes:
        """The usage of a stream, if it was asked for."""
        return self._event([]) if self._reply.include_usage else b""

    def _plain(self, index: int, text: str) -> bytes:
        """An event of text alone. Most are: all but the text is written once for all of them."""
        around = self._around.get(index)
        if around is None:
            before, _, after = self._event([self._shape.delta(index, _PLAIN, None)]).partition(_TEXT)
            around = self._around[index] = before, after
        return around[0] + orjson.dumps(text) + around[1]

    def _event(self, choices: list[JsonObject], prompt_ids: Sequence[int] = ()) -> bytes:
        """With the usage, at the end or all along, if it was asked for."""
        chunk: JsonObject = {**self._head, "object": self._shape.chunk_object, "choices": choices}
        if prompt_ids:
            self._shape.show_prompts(chunk, "prompt_token_ids", [prompt_ids])
        if self._reply.include_usage:
            chunk["usage"] = self._total() if self._reply.continuous_usage or not choices else None
        return sse_event(orjson.dumps(chunk))

    def _with_ids(self, choice: JsonObject, chunk: GenerateChunk) -> JsonObject:
        return choice | {"token_ids": chunk.token_ids} if self._reply.return_token_ids else choice

    def _logprobs(self, index: int, chunk: GenerateChunk) -> JsonObject | None:
        if self._reply.logprobs is None or not (chunk.logprobs or chunk.prompt_logprobs):
            return None
        offset = self._offsets.get(index, 0)
        written = sum(len(each.text) for each in chunk.prompt_logprobs) + sum(len(each.text) for each in chunk.logprobs)
        self._offsets[index] = offset + written
        return self._shape.logprobs(chunk, offset, self._reply)

    def _total(self) -> JsonObject:
        """A prompt counts once, however many choices it has."""
        prompts = [usage for index, usage in self._usage.items() if index % self._reply.best_of == 0]
        prompt = sum(usage.prompt_tokens for usage in prompts)
        completion = sum(usage.completion_tokens for usage in self._usage.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in prompts)},
        }


def system_fingerprint(config: ModelConfig, software: str) -> str:
    """The same as long as the model's files, its settings and the `software`'s version are."""
    settings = config.document.get("parameters"), config.parameters
    known = orjson.dumps((software, config.backend, config.fingerprint, settings), option=orjson.OPT_SORT_KEYS)
    return f"fp_{sha256(known).hexdigest()[:10]}"


def model_card(config: ModelConfig) -> dict[str, Any]:
    return {"id": config.name, "object": "model", "created": config.created, "owned_by": "charonia"}
