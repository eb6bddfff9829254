"""OpenAI's request bodies: decoded, checked, and turned into generate requests.

A field is supported, harmless, neutral at the value given, or refused by name: nothing is silently ignored.
Knows nothing of HTTP.
"""

from collections.abc import Mapping
from typing import Any, TypeVar
from uuid import uuid4

import msgspec
import orjson

from ..core.errors import InvalidArgument
from ..core.request import Conversation, GenerateRequest, Message, Prompt, SamplingParams

HARMLESS = frozenset({"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier"})
"""Fields that change nothing about the answer."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stop": ([], ""),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "length_penalty": (1,),
    "bad_words": ([],),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Fields of OpenAI and vLLM that are not supported, and the values besides null that ask for nothing."""

_MESSAGE_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "name": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
    "reasoning_content": (),
}
_MESSAGE_FIELDS = frozenset({"role", "content"})
_ROLES = ("system", "developer", "user", "assistant")


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


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


class CompletionBody(_Common, frozen=True, kw_only=True):
    prompt: Any


class ChatBody(_Common, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None


_SUPPORTED: Mapping[type[_Common], frozenset[str]] = {
    kind: frozenset(field.name for field in msgspec.structs.fields(kind)) for kind in (CompletionBody, ChatBody)
}


class _Text(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: str
    text: str


_Body = TypeVar("_Body", CompletionBody, ChatBody)


class Asked(msgspec.Struct, frozen=True):
    """One request of the door: what goes to the gateway, one per prompt, and how to answer."""

    id: str
    model: str
    requests: tuple[GenerateRequest, ...]
    stream: bool
    include_usage: bool


def parse_completion(body: bytes) -> Asked:
    """Raises `InvalidArgument`, whose `field` names the culprit."""
    fields = _decode(body, CompletionBody)
    max_tokens = 16 if fields.max_tokens is None else fields.max_tokens
    return _asked(f"cmpl-{uuid4().hex}", fields, _prompts(fields.prompt), max_tokens)


def parse_chat(body: bytes) -> Asked:
    """Raises `InvalidArgument`, whose `field` names the culprit."""
    fields = _decode(body, ChatBody)
    if not fields.messages:
        raise InvalidArgument("messages must not be empty", field="messages")
    messages = tuple(_message(f"messages[{index}]", message) for index, message in enumerate(fields.messages))
    return _asked(f"chatcmpl-{uuid4().hex}", fields, [Conversation(messages)], _chat_limit(fields))


def _decode(body: bytes, kind: type[_Body]) -> _Body:
    try:
        members = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidArgument(f"the body is not valid JSON: {error.msg} at {error.pos}") from None
    if not isinstance(members, dict):
        raise InvalidArgument("the body must be a JSON object")
    names = _SUPPORTED[kind]
    _refuse_others(members, names | HARMLESS, NEUTRAL, "")
    supported = {key: value for key, value in members.items() if key in names}
    return _convert(supported, kind)


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
    text = orjson.dumps(value).decode()
    return text if len(text) <= 60 else f"{text[:57]}..."


_Any = TypeVar("_Any")


def _convert(members: Any, kind: type[_Any], where: str = "") -> _Any:
    try:
        return msgspec.convert(members, kind)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$")
        if reason.startswith("Object missing required field"):
            path = f".{reason.split('`')[1]}`"
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
    # Templates know "system"; "developer" is OpenAI's newer word for it.
    return Message("system" if role == "developer" else role, _content(f"{where}.content", members.get("content")))


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
    priority = fields.priority or 0
    if not 0 <= priority < 2**31:
        raise InvalidArgument(f"priority must be a number of at least 0, got {priority}", field="priority")
    timeout = fields.timeout or 0.0
    if timeout < 0:
        raise InvalidArgument(f"timeout must be a number of seconds of at least 0, got {timeout}", field="timeout")
    sampling = _sampling(fields, max_tokens)
    salt = fields.cache_salt or ""
    requests = tuple(
        GenerateRequest(
            id=request_id, prompt=prompt, sampling=sampling, priority=priority, cache_salt=salt, timeout=timeout
        )
        for prompt in prompts
    )
    include_usage = options is not None and bool(options.include_usage)
    return Asked(request_id, fields.model, requests, bool(fields.stream), include_usage)


def _sampling(fields: _Common, max_tokens: int | None) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=fields.temperature,
        top_k=fields.top_k,
        top_p=fields.top_p,
        seed=fields.seed,
        stop_token_ids=fields.stop_token_ids or (),
        ignore_eos=bool(fields.ignore_eos),
    )
