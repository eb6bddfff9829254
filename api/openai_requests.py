"""OpenAI's request bodies: decoded, checked, and turned into generate requests.

A field is supported, harmless, neutral at the value given, or refused by name: nothing is silently ignored.
Knows nothing of HTTP.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar
from uuid import uuid4

import msgspec
import orjson

from ..core.errors import InvalidArgument
from ..core.request import (
    MAX_LOGPROBS,
    Conversation,
    GenerateRequest,
    Guide,
    GuideKind,
    Message,
    Prompt,
    SamplingParams,
)
from .openai_formats import ResponseFormat, guide_of

HARMLESS = frozenset({"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier"})
"""Fields that change nothing about the answer."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "length_penalty": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Fields of OpenAI and vLLM that are not supported, and the values besides null that ask for nothing."""

_MESSAGE_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "refusal": (),
    "audio": (),
    "annotations": ([],),
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
    "reasoning_content": (),
}
_MESSAGE_FIELDS = frozenset({"role", "content", "name"})
_MAX_CHOICES = 128
_MAX_ANSWERS = 1024
"""Prompts times choices of one body: each costs the frontend 70 microseconds before it can be refused."""
_ROLES = ("system", "developer", "user", "assistant")


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


_Words: TypeAlias = str | tuple[str, ...] | None
"""One string, or several."""


class _Common(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: tuple[int, ...] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    timeout: float | None = None
    n: int | None = None
    stop: _Words = None
    include_stop_str_in_output: bool | None = None
    bad_words: _Words = None
    min_tokens: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    lora_name: str | None = None
    response_format: ResponseFormat | None = None
    guided_decoding_guide_type: GuideKind | None = None
    guided_decoding_guide: str | None = None

    @property
    def guide(self) -> Guide | None:
        """What the text must be. Raises `InvalidArgument` where that contradicts itself."""
        return guide_of(
            self.response_format, Guide.of(self.guided_decoding_guide_type, self.guided_decoding_guide or "")
        )

    @property
    def wanted_logprobs(self) -> int | None:
        """How many of the likeliest tokens to name beside each chosen one; None names none and no logprob at all."""
        raise NotImplementedError


class CompletionBody(_Common, frozen=True, kw_only=True):
    prompt: Any
    logprobs: int | None = None

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs


class ChatBody(_Common, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def wanted_logprobs(self) -> int | None:
        top = self.top_logprobs or 0
        if not 0 <= top <= MAX_LOGPROBS:
            raise InvalidArgument(f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {top}", field="top_logprobs")
        if top and not self.logprobs:
            raise InvalidArgument("top_logprobs needs logprobs to be true", field="top_logprobs")
        return top if self.logprobs else None


class _Text(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: str
    text: str


_Body = TypeVar("_Body", bound=msgspec.Struct)


class Asked(msgspec.Struct, frozen=True):
    """One request of the door: what goes to the gateway, `choices` for each prompt, and how to answer."""

    id: str
    model: str
    requests: tuple[GenerateRequest, ...]
    choices: int
    stream: bool
    include_usage: bool


def parse_completion(body: bytes) -> Asked:
    """Raises `InvalidArgument`, whose `field` names the culprit."""
    fields = decode(body, CompletionBody, NEUTRAL)
    max_tokens = 16 if fields.max_tokens is None else fields.max_tokens
    return _asked(f"cmpl-{uuid4().hex}", fields, _prompts(fields.prompt), max_tokens)


def parse_chat(body: bytes) -> Asked:
    """Raises `InvalidArgument`, whose `field` names the culprit."""
    fields = decode(body, ChatBody, NEUTRAL)
    return _asked(f"chatcmpl-{uuid4().hex}", fields, [read_messages(fields.messages)], _chat_limit(fields))


def read_messages(messages: list[dict[str, Any]]) -> Conversation:
    """Raises `InvalidArgument`, whose `field` names the culprit."""
    if not messages:
        raise InvalidArgument("messages must not be empty", field="messages")
    return Conversation(tuple(_message(f"messages[{index}]", message) for index, message in enumerate(messages)))


def decode(body: bytes, kind: type[_Body], neutral: Mapping[str, tuple[Any, ...]]) -> _Body:
    """A JSON object with the fields of `kind`, harmless ones, and those of `neutral` at a value that asks for nothing.

    Raises:
        InvalidArgument: it is not; `field` names the culprit.
    """
    try:
        members = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidArgument(f"the body is not valid JSON: {error.msg} at {error.pos}") from None
    if not isinstance(members, dict):
        raise InvalidArgument("the body must be a JSON object")
    names = _names(kind)
    _refuse_others(members, names | HARMLESS, neutral, "")
    supported = {key: value for key, value in members.items() if key in names}
    return _convert(supported, kind)


@lru_cache
def _names(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(kind.__struct_fields__)


def _refuse_others(
    members: Mapping[str, Any], known: frozenset[str], neutral: Mapping[str, tuple[Any, ...]], where: str
) -> None:
    for key, value in members.items():
        if key in known:
            continue
        if key not in neutral:
            raise InvalidArgument(f"unknown field: {where}{key}", field=f"{where}{key}")
        if value is not None and value not in neutral[key]:
            raise InvalidArgument(f"{where}{key} is not supported yet, got {_short(value)}", field=f"{where}{key}")


def _short(value: Any) -> str:
    try:
        text = orjson.dumps(value).decode()
    except orjson.JSONEncodeError:
        return "something nested too deeply to show"  # it reads deeper than it writes
    return text if len(text) <= 60 else f"{text[:57]}..."


_Any = TypeVar("_Any")


def _convert(members: Any, kind: type[_Any], where: str = "") -> _Any:
    try:
        return msgspec.convert(members, kind)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$")
        if reason.startswith("Object missing required field"):
            path = f"{path.rstrip('`')}.{reason.split('`')[1]}"
        field = f"{where}{path.rstrip('`')}".lstrip(".")
        raise InvalidArgument(f"{field}: {reason}" if field else reason, field=field or None) from None


def _prompts(prompt: Any) -> list[Prompt]:
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(type(token) is int for token in prompt):
            return [_ids(prompt)]
        if all(isinstance(text, str) for text in prompt):
            return list(prompt)
        if all(isinstance(ids, list) and all(type(token) is int for token in ids) for ids in prompt):
            return [_ids(ids) for ids in prompt]
    message = "prompt must be a string, a list of token ids, or a list of either, and not empty"
    raise InvalidArgument(message, field="prompt")


def _ids(tokens: list[int]) -> tuple[int, ...]:
    if not all(0 <= token < 2**31 for token in tokens):
        raise InvalidArgument("prompt: token ids must be numbers of at least 0", field="prompt")
    return tuple(tokens)


def _message(where: str, members: Mapping[str, Any]) -> Message:
    _refuse_others(members, _MESSAGE_FIELDS, _MESSAGE_NEUTRAL, f"{where}.")
    role = members.get("role")
    if role not in _ROLES:
        raise InvalidArgument(f"{where}.role must be one of {', '.join(_ROLES)}", field=f"{where}.role")
    name = members.get("name")
    if not isinstance(name, str | None):
        raise InvalidArgument(f"{where}.name must be a string", field=f"{where}.name")
    # Templates know "system"; "developer" is OpenAI's newer word for it.
    role = "system" if role == "developer" else role
    return Message(role, _content(f"{where}.content", members.get("content")), name or "")


def _content(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidArgument(f"{where} must be a string or a list of text parts", field=where)
    return "".join(_part(f"{where}[{index}]", part) for index, part in enumerate(content))


def _part(where: str, part: Any) -> str:
    if isinstance(part, dict) and part.get("type") not in (None, "text"):
        raise InvalidArgument(f"{where}.type must be 'text', got {_short(part['type'])}", field=f"{where}.type")
    return _convert(part, _Text, where).text


def _chat_limit(fields: ChatBody) -> int | None:
    limits = {limit for limit in (fields.max_tokens, fields.max_completion_tokens) if limit is not None}
    if len(limits) > 1:
        raise InvalidArgument("max_tokens and max_completion_tokens differ", field="max_completion_tokens")
    return limits.pop() if limits else None


def _asked(request_id: str, fields: _Common, prompts: list[Prompt], max_tokens: int | None) -> Asked:
    options = fields.stream_options
    if options is not None and not fields.stream:
        raise InvalidArgument("stream_options needs stream to be true", field="stream_options")
    timeout = fields.timeout or 0.0
    if timeout < 0:
        raise InvalidArgument(f"timeout must be a number of seconds of at least 0, got {timeout}", field="timeout")
    sampling = _sampling(fields, max_tokens)
    salt, adapter, guide = fields.cache_salt or "", fields.lora_name or "", fields.guide
    choices = _choices(fields.n)
    if len(prompts) * choices > _MAX_ANSWERS:
        message = f"{len(prompts)} prompts with n {choices} ask for more than {_MAX_ANSWERS} answers at once"
        raise InvalidArgument(message, field="prompt")
    requests = tuple(
        GenerateRequest(
            id=request_id,
            prompt=prompt,
            sampling=sampling,
            priority=fields.priority or 0,
            cache_salt=salt,
            timeout=timeout,
            choice=choice,
            choices=choices,
            prompts=len(prompts),
            adapter=adapter,
            guide=guide,
        )
        for prompt in prompts
        for choice in range(choices)
    )
    include_usage = options is not None and bool(options.include_usage)
    return Asked(request_id, fields.model, requests, choices, bool(fields.stream), include_usage)


def _choices(n: int | None) -> int:
    if n is not None and not 1 <= n <= _MAX_CHOICES:
        raise InvalidArgument(f"n must be between 1 and {_MAX_CHOICES}, got {n}", field="n")
    return n or 1


def _sampling(fields: _Common, max_tokens: int | None) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=fields.temperature,
        top_k=fields.top_k,
        top_p=fields.top_p,
        seed=fields.seed,
        stop_token_ids=fields.stop_token_ids or (),
        ignore_eos=bool(fields.ignore_eos),
        min_p=fields.min_p,
        repetition_penalty=fields.repetition_penalty,
        presence_penalty=fields.presence_penalty or 0,
        frequency_penalty=fields.frequency_penalty or 0,
        logit_bias=_bias(fields.logit_bias or {}),
        bad_words=_words(fields.bad_words),
        min_tokens=fields.min_tokens or 0,
        stop=_words(fields.stop),
        include_stop_str_in_output=bool(fields.include_stop_str_in_output),
        logprobs=fields.wanted_logprobs,
    )


def _words(words: _Words) -> tuple[str, ...]:
    if isinstance(words, str):
        return (words,) if words else ()
    return words or ()


def _bias(bias: Mapping[str, float]) -> dict[int, float]:
    for token in bias:
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise InvalidArgument(f"logit_bias must name tokens by their ids, got {_short(token)}", field="logit_bias")
    return {int(token): value for token, value in bias.items()}
