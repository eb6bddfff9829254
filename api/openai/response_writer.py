"""Responses of /v1/completions and /v1/chat/completions, as one JSON body or as server-sent events.

Knows the formats of OpenAI's API, with vLLM's extra fields; nothing of where the text comes from.
"""

import time
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import orjson

from ...core.drafts import DraftSummary
from ...core.logprobs import PromptToken, TokenLogprob
from ...core.request import FinishReason, GenerateChunk, ToolCallDelta, Usage
from ..http.connection import sse_event
from ..http.response_parts import TextEvent
from .custom_tools import CustomInput, whole_input
from .request_parsing import ResponseSpec
from .token_logprobs import JsonObject, logprob_columns, one_column, prompt_entries, token_entries, token_entry

_HOLES: dict[str, Any] = {name: f"\0{name}\0" for name in ("text", "logprobs", "token_ids", "usage")}
"""What stands in a template for values that are not known yet; no model has one for a name."""
_STAND_INS = {name.encode(): orjson.dumps(stand_in) for name, stand_in in _HOLES.items()}
_USAGE = (
    b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d},'
    b'"completion_tokens_details":{"reasoning_tokens":%d}}'
)
_END = GenerateChunk(text="", token_ids=(), usage=Usage(0, 0))


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

    def logprobs(
        self, prompt: Sequence[PromptToken], tokens: Sequence[TokenLogprob], offset: int, spec: ResponseSpec
    ) -> tuple[JsonObject, int]:
        """Columns over the tokens of an echoed prompt, if any, and those generated, and the offset behind them.
        `offset`: characters that the tokens before wrote."""
        return logprob_columns(prompt if spec.echo else (), tokens, offset, spec.logprobs or 0, spec.tokens_as_ids)

    def token_logprobs(self, token: TokenLogprob, offset: int, spec: ResponseSpec) -> tuple[bytes, int]:
        """As `logprobs`, for a single token: the JSON."""
        columns = one_column(token, offset, spec.logprobs or 0, spec.tokens_as_ids)
        return columns, offset + (len(token.text) if token.width is None else token.width)

    def no_logprobs(self, spec: ResponseSpec) -> JsonObject | None:
        """The logprobs of the event that only says why a text has ended: columns without rows, for readers of every
        event."""
        return None if spec.logprobs is None else self.logprobs((), (), 0, spec)[0]

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

    def logprobs(
        self, prompt: Sequence[PromptToken], tokens: Sequence[TokenLogprob], offset: int, spec: ResponseSpec
    ) -> tuple[JsonObject, int]:
        """An entry for each token that was generated, whatever the offset."""
        return {"content": token_entries(tokens, spec.tokens_as_ids), "refusal": None}, offset

    def token_logprobs(self, token: TokenLogprob, offset: int, spec: ResponseSpec) -> tuple[bytes, int]:
        """As `logprobs`, for a single token: the JSON."""
        return b'{"content":[%b],"refusal":null}' % token_entry(token, spec.tokens_as_ids), offset

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
        self._templates: dict[tuple[int, bool, bool], bytes] = {}
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
        if answers and (held := answers[0].kv_transfer_params) is not None:
            body["kv_transfer_params"] = held
        if (most := self._spec.prompt_logprobs) is not None:
            self._format.show_prompts(
                body, "prompt_logprobs", [prompt_entries(answer.prompt_logprobs, most) for answer in shown]
            )
        if self._spec.return_token_ids:
            self._format.show_prompts(body, "prompt_token_ids", [answer.prompt_ids for answer in shown])
        return body

    def chunk_event(self, index: int, chunk: GenerateChunk) -> bytes:
        """The event, or several, for a chunk of choice `index`; empty while a character of the text is incomplete."""
        rare = chunk.finish_reason or chunk.tool_calls or chunk.prompt_logprobs or chunk.prompt_ids or chunk.drafts
        if index in self._usage and not rare:
            self._usage[index] = chunk.usage
            return self._text_event(index, chunk)
        begin, prompt_ids = b"", chunk.prompt_ids
        if index not in self._usage and (opening := self._format.first_delta(index)) is not None:
            self._usage[index] = msgspec.structs.replace(chunk.usage, completion_tokens=0)
            begin, prompt_ids = self._event([opening], prompt_ids), ()
            if self._spec.prefix:
                begin += self._text_event(index, msgspec.structs.replace(_END, text=self._spec.prefix))
        self._usage[index] = chunk.usage
        if chunk.drafts is not None:
            self._drafts.append(chunk.drafts)
        if chunk.tool_calls:
            self._calling.add(index)
        end = b""
        if chunk.finish_reason:  # in an event of its own: there are clients that look at nothing else of that one
            last = msgspec.structs.replace(_END, finish_reason=chunk.finish_reason, stop_reason=chunk.stop_reason)
            ending = self._format.delta(index, last, self._format.no_logprobs(self._spec))
            end = self._event([self._with_details(ending, last, index in self._calling)])
            chunk = msgspec.structs.replace(chunk, finish_reason=None, stop_reason=None)
        if chunk.tool_calls or chunk.prompt_logprobs or prompt_ids:
            return begin + self._detailed_event(index, self._shown(chunk), prompt_ids) + end
        return begin + self._text_event(index, chunk) + end

    @property
    def text_event(self) -> TextEvent | None:
        """The event of the only choice's chunk of nothing but text, behind its first; None where it shows ids."""
        spec = self._spec
        if spec.return_token_ids:
            return None
        # Most events are of text alone: the JSON around it is encoded once for all of them.
        around = self._template(0, True, False) % _STAND_INS
        before, rest = around.split(_STAND_INS[b"text"])
        between, after = rest.split(_STAND_INS[b"logprobs"])
        scored = spec.logprobs is not None
        if not (scored or spec.continuous_usage):
            return TextEvent(before, between + b"null" + after)
        constant = after if scored else between + b"null" + after
        behind = constant.replace(b"%", b"%%").replace(_STAND_INS[b"usage"], _USAGE)
        token_logprobs, offsets, usages = self._format.token_logprobs, self._offsets, self._usage

        def counts(tokens: int, logprob: TokenLogprob | None) -> bytes:
            usage = usages[0]
            prompt = usage.prompt_tokens
            return behind % (prompt, tokens, prompt + tokens, usage.cached_tokens, usage.reasoning_tokens)

        def scores(tokens: int, logprob: TokenLogprob | None) -> bytes:
            assert logprob is not None, "a text of scored tokens comes with the logprob of one, or as a chunk"
            shown, offsets[0] = token_logprobs(logprob, offsets.get(0, 0), spec)
            return between + shown + (counts(tokens, None) if spec.continuous_usage else after)

        return TextEvent(before, tail=scores if scored else counts)

    def _text_event(self, index: int, chunk: GenerateChunk) -> bytes:
        """The event of a chunk with text or reasoning, and what goes with its tokens."""
        text, reasoning = chunk.text, chunk.reasoning if self._spec.reasoning else ""
        if text and reasoning:
            return self._detailed_event(index, chunk)
        logprobs = self._logprobs(index, chunk)
        if not (text or reasoning or logprobs or (self._details and chunk.token_ids)):
            return b""
        holes = {
            b"text": orjson.dumps(text or reasoning),
            b"logprobs": b"null" if logprobs is None else orjson.dumps(logprobs),
        }
        if self._details:
            holes[b"token_ids"] = orjson.dumps(chunk.token_ids)
            holes[b"usage"] = orjson.dumps(self._total())
        return self._template(index, bool(text), bool(reasoning)) % holes

    def _template(self, index: int, has_text: bool, has_reasoning: bool) -> bytes:
        """The events of choice `index` with text, or reasoning, or neither, as a format of bytes with `_HOLES`."""
        key = index, has_text, has_reasoning
        template = self._templates.get(key)
        if template is None:
            hole = _HOLES["text"]
            chunk = msgspec.structs.replace(
                _END,
                text=hole if has_text else "",
                reasoning=hole if has_reasoning else "",
                token_ids=_HOLES["token_ids"],
            )
            choice = self._with_details(self._format.delta(index, chunk, _HOLES["logprobs"]), chunk, False)
            template = self._event([choice], usage=_HOLES["usage"]).replace(b"%", b"%%")
            for name, stand_in in _STAND_INS.items():
                template = template.replace(stand_in, b"%%(%b)b" % name)
            self._templates[key] = template
        return template

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

    def _event(
        self, choices: list[JsonObject], prompt_ids: Sequence[int] = (), usage: JsonObject | None = None
    ) -> bytes:
        """An event; `usage`: what it tells in place of the tokens so far."""
        chunk: JsonObject = {**self._head, "object": self._format.chunk_object, "choices": choices}
        if prompt_ids:
            self._format.show_prompts(chunk, "prompt_token_ids", [prompt_ids])
        if self._spec.include_usage:
            shows_usage = self._spec.continuous_usage or not choices
            chunk["usage"] = (usage or self._total()) if shows_usage else None
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
        shown, self._offsets[index] = self._format.logprobs(chunk.prompt_logprobs, chunk.logprobs, offset, self._spec)
        return shown

    def _total(self) -> JsonObject:
        prompt = completion = cached = reasoning = 0
        for index, usage in self._usage.items():
            if index % self._spec.best_of == 0:  # a prompt counts once, however many choices it has
                prompt += usage.prompt_tokens
                cached += usage.cached_tokens
            completion += usage.completion_tokens
            reasoning += usage.reasoning_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
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
