"""Responses of /v1/completions and /v1/chat/completions, as one JSON body or as server-sent events.

Knows the formats of OpenAI's API, with vLLM's extra fields; nothing of where the text comes from.
"""

import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from itertools import accumulate
from typing import Any, TypeAlias

import msgspec
import orjson

from ...core.drafts import DraftSummary
from ...core.logprobs import PromptToken, TokenLogprob
from ...core.model import ModelConfig
from ...core.request import FinishReason, GenerateChunk, ToolCallDelta, Usage
from ..http.connection import sse_event
from .custom_tools import CustomInput, whole_input
from .request_parsing import ResponseSpec

JsonObject = dict[str, Any]

_PLACEHOLDER = "\0text\0"
"""Stands for a text that is not known yet; no model has it for a name."""
_PLAIN = GenerateChunk(text=_PLACEHOLDER, token_ids=(), usage=Usage(0, 0))
_PLAIN_REASONING = msgspec.structs.replace(_PLAIN, text="", reasoning=_PLACEHOLDER)
_END = msgspec.structs.replace(_PLAIN, text="")
_TEXT = orjson.dumps(_PLACEHOLDER)


class CompletionFormat:
    """The parts of a response that completions and chat write differently, as completions do."""

    endpoint = "completions"
    object = "text_completion"
    chunk_object = "text_completion"

    def choice(
        self, index: int, chunk: GenerateChunk, logprobs: JsonObject | None, calls: Sequence[JsonObject] = ()
    ) -> JsonObject:
        return {"text": chunk.text, "index": index, "logprobs": logprobs, **_end(chunk)}

    def first_delta(self, index: int) -> JsonObject | None:
        """The choice of an event that goes out before the first text, if the format has one."""
        return None

    delta = choice

    def logprobs(self, chunk: GenerateChunk, offset: int, spec: ResponseSpec) -> JsonObject:
        """Columns over the tokens of an echoed prompt, if any, and those generated. `offset`: characters that the
        tokens before wrote."""
        prompt = chunk.prompt_logprobs if spec.echo else ()
        tokens: list[PromptToken | TokenLogprob] = [*prompt, *chunk.logprobs]
        logprobs = [*(token.given for token in prompt), *chunk.logprobs]
        lengths = map(_width, tokens)
        return {
            "tokens": [_name(token, spec.tokens_as_ids) for token in tokens],
            "token_logprobs": [None if token is None else token.logprob for token in logprobs],
            "top_logprobs": [None if token is None else _by_name(token, spec) for token in logprobs],
            "text_offset": list(accumulate(lengths, initial=offset))[:-1],
        }

    def no_logprobs(self, spec: ResponseSpec) -> JsonObject | None:
        """The logprobs of the event that only says why a text has ended: columns without rows, for readers of every
        event."""
        return None if spec.logprobs is None else self.logprobs(_END, 0, spec)

    def show_prompts(self, body: JsonObject, name: str, prompts: Sequence[Any]) -> None:
        """Add to a response `body` what it says of its choices' prompts: `prompts[i]` of choice i, as `name`."""
        for choice, prompt in zip(body["choices"], prompts, strict=True):
            choice[name] = prompt


class ChatFormat:
    """The parts of a response as chat writes them."""

    endpoint = "chat"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(
        self, index: int, chunk: GenerateChunk, logprobs: JsonObject | None, calls: Sequence[JsonObject] = ()
    ) -> JsonObject:
        content = None if chunk.tool_calls and not chunk.text else chunk.text
        message = {"role": "assistant", "content": content, "refusal": None, **_reasoning(chunk)}
        if calls:
            message["tool_calls"] = calls
        return {"index": index, "message": message, "logprobs": logprobs, **_end(chunk)}

    def first_delta(self, index: int) -> JsonObject | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(
        self, index: int, chunk: GenerateChunk, logprobs: JsonObject | None, calls: Sequence[JsonObject] = ()
    ) -> JsonObject:
        delta = _reasoning(chunk)
        if chunk.text:
            delta["content"] = chunk.text
        if calls:
            numbered = zip(chunk.tool_calls, calls, strict=True)
            delta["tool_calls"] = [{"index": call.index, **written} for call, written in numbered]
        return {"index": index, "delta": delta, "logprobs": logprobs, **_end(chunk)}

    def logprobs(self, chunk: GenerateChunk, offset: int, spec: ResponseSpec) -> JsonObject:
        """An entry for each token."""
        return {"content": token_entries(chunk.logprobs, spec.tokens_as_ids), "refusal": None}

    def no_logprobs(self, spec: ResponseSpec) -> JsonObject | None:
        """Nothing, as OpenAI has it."""
        return None

    def show_prompts(self, body: JsonObject, name: str, prompts: Sequence[Any]) -> None:
        body[name] = prompts[0]


def _reasoning(chunk: GenerateChunk) -> JsonObject:
    """The reasoning, under vLLM's name for it and under DeepSeek's, which clients of SGLang and llama.cpp know."""
    return {"reasoning": chunk.reasoning, "reasoning_content": chunk.reasoning} if chunk.reasoning else {}


class ToolCallWriter:
    """Writes the calls of tools, or further pieces of them. `custom`: the names of tools whose input is a text."""

    def __init__(self, custom: frozenset[str]) -> None:
        self._custom = custom
        self._inputs: dict[tuple[int, int], CustomInput] = {}

    def whole(self, call: ToolCallDelta) -> JsonObject:
        if call.name not in self._custom:
            return _function_call(call)
        return _custom_call(call, whole_input(call.arguments))

    def piece(self, choice: int, call: ToolCallDelta) -> JsonObject:
        if call.id and call.name in self._custom:
            self._inputs[choice, call.index] = CustomInput()
        reader = self._inputs.get((choice, call.index))
        return _function_call(call) if reader is None else _custom_call(call, reader.push(call.arguments))


def _function_call(call: ToolCallDelta) -> JsonObject:
    """A call of a tool or, without an id, a further piece of one."""
    if not call.id:
        return {"function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _custom_call(call: ToolCallDelta, text: str) -> JsonObject:
    if not call.id:
        return {"custom": {"input": text}}
    return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": text}}


ApiFormat: TypeAlias = CompletionFormat | ChatFormat


def _end(chunk: GenerateChunk) -> JsonObject:
    """The fields of a choice that tell why the text ended, if it did, and vLLM's that tells at which stop."""
    return {"finish_reason": chunk.finish_reason, "stop_reason": chunk.stop_reason}


class OpenAIResponseWriter:
    """Writes the response to one request. Choices are numbered in the order of the prompts, and count their usage.

    Either `full_response` is called once, or `chunk_event` for each chunk and then `usage_event`.
    """

    def __init__(self, api_format: ApiFormat, spec: ResponseSpec, fingerprint: str) -> None:
        self._format = api_format
        self._spec = spec
        head = {"id": spec.id, "created": int(time.time()), "model": spec.model}
        self._head = head | {"system_fingerprint": fingerprint}
        self._details = spec.return_token_ids or spec.continuous_usage
        """Whether even an event of text alone has other fields that change."""
        self._usage: dict[int, Usage] = {}
        self._drafts: list[DraftSummary] = []
        self._offsets: dict[int, int] = {}
        self._around: dict[tuple[int, bool], list[bytes]] = {}
        self._calls = ToolCallWriter(spec.custom_tools)
        self._calling: set[int] = set()
        """Choices that have called a tool."""

    def full_response(self, answers: Sequence[GenerateChunk]) -> JsonObject:
        """The body of a response that is not streamed; `answers[i]` is everything that choice i generated."""
        self._usage = {index: answer.usage for index, answer in enumerate(answers)}
        firsts = [answers[index - index % self._spec.best_of] for index in range(len(answers))]
        complete = [  # the first choice of a prompt alone was told of the prompt's tokens
            answer if answer is first else msgspec.structs.replace(answer, prompt_logprobs=first.prompt_logprobs)
            for answer, first in zip(answers, firsts, strict=True)
        ]
        shown = _select_best(complete, self._spec.best_of, self._spec.n)
        choices = [
            self._with_details(
                self._format.choice(
                    index,
                    self._whole(answer),
                    self._logprobs(index, answer),
                    [self._calls.whole(call) for call in answer.tool_calls],
                ),
                answer,
                bool(answer.tool_calls),
            )
            for index, answer in enumerate(shown)
        ]
        self._drafts = [answer.drafts for answer in answers if answer.drafts is not None]
        usage = {"usage": self._total(), **self._metrics()}
        body = {**self._head, "object": self._format.object, "choices": choices, **usage}
        if (most := self._spec.prompt_logprobs) is not None:
            self._format.show_prompts(
                body, "prompt_logprobs", [_prompt_logprobs(answer.prompt_logprobs, most) for answer in shown]
            )
        if self._spec.return_token_ids:
            self._format.show_prompts(body, "prompt_token_ids", [answer.prompt_ids for answer in shown])
        return body

    def chunk_event(self, index: int, chunk: GenerateChunk) -> bytes:
        """The event, or two, for a chunk of choice `index`; empty while a character of the text is incomplete."""
        if index in self._usage and chunk.is_text and not self._details:
            self._usage[index] = chunk.usage
            return self._plain(index, chunk) if chunk.text else b""
        begin, prompt_ids = b"", chunk.prompt_ids
        if index not in self._usage and (opening := self._format.first_delta(index)) is not None:
            self._usage[index] = msgspec.structs.replace(chunk.usage, completion_tokens=0)
            begin, prompt_ids = self._event([opening], prompt_ids), ()
            if self._spec.prefix:
                begin += self._plain(index, msgspec.structs.replace(_PLAIN, text=self._spec.prefix))
        self._usage[index] = chunk.usage
        if chunk.drafts is not None:
            self._drafts.append(chunk.drafts)
        if chunk.tool_calls:
            self._calling.add(index)
        chunk = self._shown(chunk)
        changes = self._details and (chunk.text or chunk.token_ids)
        several = chunk.tool_calls or (chunk.reasoning and chunk.text)
        end = b""
        if chunk.finish_reason:  # in an event of its own: there are clients that look at nothing else of that one
            last = msgspec.structs.replace(_END, finish_reason=chunk.finish_reason, stop_reason=chunk.stop_reason)
            ending = self._format.delta(index, last, self._format.no_logprobs(self._spec))
            end = self._event([self._with_details(ending, last, index in self._calling)])
            chunk = msgspec.structs.replace(chunk, finish_reason=None, stop_reason=None)
        if several or chunk.logprobs or chunk.prompt_logprobs or prompt_ids or changes:
            return begin + self._detailed_event(index, chunk, prompt_ids) + end
        return begin + (self._plain(index, chunk) if chunk.text or chunk.reasoning else b"") + end

    @property
    def text_event(self) -> Callable[[str], bytes] | None:
        """Makes the event of a chunk of the only choice that is nothing but text, behind its first; None where that has
        other fields that change."""
        if self._details:
            return None
        # Most events are of text alone: the JSON around it is encoded once for all of them.
        before, after = self._around_text(0, _PLAIN)
        encode = orjson.dumps
        return lambda text: before + encode(text) + after

    def _detailed_event(self, index: int, chunk: GenerateChunk, prompt_ids: Sequence[int] = ()) -> bytes:
        calls = [self._calls.piece(index, call) for call in chunk.tool_calls]
        choice = self._format.delta(index, chunk, self._logprobs(index, chunk), calls)
        return self._event([self._with_details(choice, chunk, index in self._calling)], prompt_ids)

    def usage_event(self) -> bytes:
        """The last event of a stream, with the usage of all choices, if the client asked for it."""
        return self._event([]) if self._spec.include_usage else b""

    def _whole(self, answer: GenerateChunk) -> GenerateChunk:
        """An answer as it is shown where it comes at once."""
        shown, prefix = self._shown(answer), self._spec.prefix
        return msgspec.structs.replace(shown, text=prefix + shown.text) if prefix else shown

    def _shown(self, chunk: GenerateChunk) -> GenerateChunk:
        return chunk if self._spec.reasoning or not chunk.reasoning else msgspec.structs.replace(chunk, reasoning="")

    def _plain(self, index: int, chunk: GenerateChunk) -> bytes:
        return orjson.dumps(chunk.reasoning or chunk.text).join(self._around_text(index, chunk))

    def _around_text(self, index: int, chunk: GenerateChunk) -> list[bytes]:
        key = index, bool(chunk.reasoning)
        around = self._around.get(key)
        if around is None:
            event = self._event([self._format.delta(index, _PLAIN_REASONING if chunk.reasoning else _PLAIN, None)])
            around = self._around[key] = event.split(_TEXT)
        return around

    def _event(self, choices: list[JsonObject], prompt_ids: Sequence[int] = ()) -> bytes:
        chunk: JsonObject = {**self._head, "object": self._format.chunk_object, "choices": choices}
        if prompt_ids:
            self._format.show_prompts(chunk, "prompt_token_ids", [prompt_ids])
        if self._spec.include_usage:
            chunk["usage"] = self._total() if self._spec.continuous_usage or not choices else None
            chunk |= {} if choices else self._metrics()
        return sse_event(orjson.dumps(chunk))

    def _with_details(self, choice: JsonObject, chunk: GenerateChunk, called: bool) -> JsonObject:
        if called and chunk.finish_reason is FinishReason.STOP:
            choice["finish_reason"] = "tool_calls"
        return choice | {"token_ids": chunk.token_ids} if self._spec.return_token_ids else choice

    def _logprobs(self, index: int, chunk: GenerateChunk) -> JsonObject | None:
        if self._spec.logprobs is None or not (chunk.logprobs or chunk.prompt_logprobs):
            return None
        offset = self._offsets.get(index, 0)
        written = sum(map(_width, chunk.prompt_logprobs)) + sum(map(_width, chunk.logprobs))
        self._offsets[index] = offset + written
        return self._format.logprobs(chunk, offset, self._spec)

    def _total(self) -> JsonObject:
        # A prompt counts once, however many choices it has.
        prompts = [usage for index, usage in self._usage.items() if index % self._spec.best_of == 0]
        prompt = sum(usage.prompt_tokens for usage in prompts)
        completion = sum(usage.completion_tokens for usage in self._usage.values())
        reasoning = sum(usage.reasoning_tokens for usage in self._usage.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in prompts)},
            "completion_tokens_details": {"reasoning_tokens": reasoning, **self._predicted()},
        }

    def _metrics(self) -> JsonObject:
        """vLLM's `metrics` where the model reports drafts: those of one answer, for several there is no sum."""
        if not self._drafts:
            return {}
        single = msgspec.to_builtins(self._drafts[0]) if len(self._usage) == 1 else None
        return {"metrics": {"speculative_decoding": single}}

    def _predicted(self) -> dict[str, int]:
        """The tokens of predictions that ended answers accepted and rejected, if there were predictions."""
        predicted = [usage for usage in self._usage.values() if usage.accepted_prediction_tokens is not None]
        names = ("accepted_prediction_tokens", "rejected_prediction_tokens")
        return {name: sum(getattr(usage, name) for usage in predicted) for name in names} if predicted else {}


def _prompt_logprobs(prompt: Sequence[PromptToken], most: int) -> list[JsonObject | None]:
    """vLLM's `prompt_logprobs`: for each token an object by token id, the prompt's own token first, then the `most`
    likeliest; None for the first token of all."""
    return [None if token.given is None else _by_id(token.given, token.rank, most) for token in prompt]


def _select_best(answers: Sequence[GenerateChunk], choices: int, kept: int) -> list[GenerateChunk]:
    """The `kept` answers with the highest mean logprob of each prompt's `choices` answers, the highest first.

    Where all are kept they stay in their order.
    """

    def mean_logprob(answer: GenerateChunk) -> float:
        return sum(token.logprob for token in answer.logprobs) / max(len(answer.logprobs), 1)

    if kept == choices:
        return list(answers)
    groups = (answers[at : at + choices] for at in range(0, len(answers), choices))
    return [answer for group in groups for answer in sorted(group, key=mean_logprob, reverse=True)[:kept]]


def token_entries(tokens: Sequence[TokenLogprob], as_ids: bool = False) -> list[JsonObject]:
    """The logprobs of tokens as chat and responses show them; `as_ids`: with their ids in place of their text."""
    return [
        _entry(token, as_ids) | {"top_logprobs": [_entry(likely, as_ids) for likely in token.top]} for token in tokens
    ]


def _entry(token: TokenLogprob, as_id: bool) -> JsonObject:
    return {"token": _name(token, as_id), "logprob": token.logprob, "bytes": list(token.data)}


def _name(token: TokenLogprob | PromptToken, as_id: bool) -> str:
    """A token's text, or, in vLLM's words, its id: not every token is a text of its own."""
    return f"token_id:{token.id}" if as_id else token.text


def _width(token: TokenLogprob | PromptToken) -> int:
    return len(token.text) if token.width is None else token.width


def _by_name(token: TokenLogprob, spec: ResponseSpec) -> dict[str, float]:
    # Of several tokens with the same text, the likeliest is named.
    named: dict[str, float] = {}
    for likely in (*token.top[: spec.logprobs or 0], token):
        named.setdefault(_name(likely, spec.tokens_as_ids), likely.logprob)
    return named


def _by_id(token: TokenLogprob, rank: int, most: int) -> JsonObject:
    ranked = [(token, rank), *((likely, place) for place, likely in enumerate(token.top[:most], start=1))]
    return {
        str(likely.id): {"logprob": likely.logprob, "rank": place, "decoded_token": likely.text}
        for likely, place in ranked
    }


def system_fingerprint(config: ModelConfig, software: str) -> str:
    """The `system_fingerprint` of a model: it changes with the model's files, settings and the `software` version."""
    settings = config.raw.get("parameters"), config.parameters
    known = orjson.dumps((software, config.backend, config.fingerprint, settings), option=orjson.OPT_SORT_KEYS)
    return f"fp_{sha256(known).hexdigest()[:10]}"
