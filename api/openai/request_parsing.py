"""OpenAI's requests: their bodies turned into generate requests. Knows nothing of HTTP."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ...core.errors import InvalidArgument
from ...core.request import GenerateRequest, Prompt, SamplingParams
from .chat_messages import parse_messages
from .json_body import JsonBody, decode_body, shortened
from .schemas import (
    CHAT_NO_OP_VALUES,
    COMPLETION_NO_OP_VALUES,
    ChatBody,
    CompletionBody,
    GenerationBody,
    StreamOptions,
    StringOrList,
)

_MAX_CHOICES = 128
_MAX_ANSWERS = 1024
"""Prompts times choices of one body: each costs the frontend 70 microseconds before it can be refused."""


class ResponseSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How to answer: with `choices` for each prompt, of which the best `kept` are shown.

    `logprobs`: how many of the likeliest tokens stand beside each one of the text, which is the prompt's too with
    `echo`; `prompt_logprobs`: beside those of the prompt in a list of their own. None shows no logprob. `token_ids`:
    those of prompt and answer are shown. `include_usage`: a stream ends with it; `running_usage`: its chunks have it,
    too.
    """

    id: str
    model: str
    best_of: int = 1
    n: int = 1
    echo: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    include_usage: bool = False
    continuous_usage: bool = False


class ParsedCompletion(msgspec.Struct, frozen=True):
    """One request of the door: what goes to the gateway, and how to answer."""

    requests: tuple[GenerateRequest, ...]
    stream: bool
    response: ResponseSpec


def parse_completion(body: JsonBody, name: str) -> ParsedCompletion:
    """`name`: what the request's id ends with. Raises `InvalidArgument`, whose `field` names the culprit."""
    fields = decode_body(body, CompletionBody, COMPLETION_NO_OP_VALUES)
    max_tokens = 16 if fields.max_tokens is None else fields.max_tokens
    reply = msgspec.structs.replace(
        _response_spec(f"cmpl-{name}", fields), best_of=_best_of(fields), echo=bool(fields.echo)
    )
    return _parsed(reply, fields, _prompts(fields.prompt), max_tokens)


def parse_chat(body: JsonBody, name: str) -> ParsedCompletion:
    """`name`: what the request's id ends with. Raises `InvalidArgument`, whose `field` names the culprit."""
    fields = decode_body(body, ChatBody, CHAT_NO_OP_VALUES)
    conversation = parse_messages(fields.messages, fields)
    try:
        return _parsed(_response_spec(f"chatcmpl-{name}", fields), fields, [conversation], _chat_limit(fields))
    except InvalidArgument as error:
        raise _as_said(error, fields) from None


def _as_said(error: InvalidArgument, fields: ChatBody) -> InvalidArgument:
    """By the name that the limit came by."""
    if error.field != "max_tokens" or fields.max_completion_tokens is None:
        return error
    field = "max_completion_tokens"
    return InvalidArgument(error.message.replace(error.field, field, 1), field=field)


def _response_spec(request_id: str, fields: GenerationBody) -> ResponseSpec:
    options, choices = fields.stream_options or StreamOptions(), _choices(fields.n)
    return ResponseSpec(
        id=request_id,
        model=fields.model,
        best_of=choices,
        n=choices,
        logprobs=fields.num_logprobs,
        prompt_logprobs=fields.prompt_logprobs,
        return_token_ids=bool(fields.return_token_ids),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
    )


def _prompts(prompt: Any) -> list[Prompt]:
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        kinds = set(map(type, prompt))
        if kinds == {int}:
            return [_ids(prompt)]
        _check_count(len(prompt), 1)
        if kinds == {str}:
            return prompt
        if kinds == {list} and all(set(map(type, ids)) <= {int} for ids in prompt):
            return [_ids(ids) for ids in prompt]
    message = "prompt must be a string, a list of token ids, or a list of either, and not empty"
    raise InvalidArgument(message, field="prompt")


def _ids(tokens: list[int]) -> tuple[int, ...]:
    if tokens and (min(tokens) < 0 or max(tokens) >= 2**31):
        raise InvalidArgument("prompt: token ids must be numbers of at least 0", field="prompt")
    return tuple(tokens)


def _chat_limit(fields: ChatBody) -> int | None:
    """By OpenAI's newer name, or by the one that it replaces."""
    return fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens


def _parsed(
    reply: ResponseSpec, fields: GenerationBody, prompts: list[Prompt], max_tokens: int | None
) -> ParsedCompletion:
    _check_stream(fields)
    _check_count(len(prompts), reply.best_of)
    sampling = _sampling(fields, max_tokens)
    if reply.n < reply.best_of and sampling.logprobs is None:
        sampling = msgspec.structs.replace(sampling, logprobs=0)  # the best are found by their logprobs
    one = GenerateRequest(
        id=reply.id,
        prompt=prompts[0],
        sampling=sampling,
        priority=fields.priority or 0,
        cache_salt=fields.cache_salt or "",
        timeout=_timeout(fields.timeout),
        adapter=fields.lora_name or "",
        guided_decoding=fields.guide,
        choice_count=reply.best_of,
        prompt_count=len(prompts),
        echo=reply.echo,
        return_prompt_ids=reply.return_token_ids,
    )
    stream = bool(fields.stream)
    answers = [one, *_further(one, scored=stream)]
    requests = (msgspec.structs.replace(answer, prompt=prompt) for prompt in prompts for answer in answers)
    return ParsedCompletion(tuple(requests), stream, reply)


def _further(first: GenerateRequest, scored: bool) -> Iterator[GenerateRequest]:
    """The other answers to the same prompt. Unless they are to be `scored`, too, as in a stream, where none waits for
    another, the first alone tells of the prompt's tokens."""
    sampling = first.sampling if scored else msgspec.structs.replace(first.sampling, prompt_logprobs=None)
    for choice in range(1, first.choice_count):
        yield msgspec.structs.replace(first, choice=choice, sampling=sampling)


def _timeout(timeout: float | None) -> float:
    if timeout is not None and timeout < 0:
        raise InvalidArgument(f"timeout must be a number of seconds of at least 0, got {timeout}", field="timeout")
    return timeout or 0.0


def _check_count(prompts: int, choices: int) -> None:
    if prompts * choices > _MAX_ANSWERS:
        message = f"{prompts} prompts with {choices} choices ask for more than {_MAX_ANSWERS} answers at once"
        raise InvalidArgument(message, field="prompt")


def _check_stream(fields: GenerationBody) -> None:
    if fields.stream_options is not None and not fields.stream:
        raise InvalidArgument("stream_options needs stream to be true", field="stream_options")
    if fields.stream and fields.prompt_logprobs is not None:
        raise InvalidArgument("prompt_logprobs can't be streamed", field="prompt_logprobs")


def _choices(n: int | None) -> int:
    if n is not None and not 1 <= n <= _MAX_CHOICES:
        raise InvalidArgument(f"n must be between 1 and {_MAX_CHOICES}, got {n}", field="n")
    return n or 1


def _best_of(fields: CompletionBody) -> int:
    kept, best_of = _choices(fields.n), fields.best_of
    if best_of is None:
        return kept
    if not kept <= best_of <= _MAX_CHOICES:
        message = f"best_of must be between n, which is {kept}, and {_MAX_CHOICES}, got {best_of}"
        raise InvalidArgument(message, field="best_of")
    if fields.stream and best_of > kept:
        raise InvalidArgument("best_of can't be streamed: the best are known when all have ended", field="best_of")
    return best_of


def _sampling(fields: GenerationBody, max_tokens: int | None) -> SamplingParams:
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
        allowed_token_ids=fields.allowed_token_ids,
        truncate_prompt_tokens=fields.truncate_prompt_tokens,
        skip_special_tokens=fields.skip_special_tokens is not False,
        spaces_between_special_tokens=fields.spaces_between_special_tokens is not False,
        logprobs=fields.num_logprobs,
        prompt_logprobs=fields.num_prompt_logprobs,
    )


def _words(words: StringOrList) -> tuple[str, ...]:
    """Those that are there: clients send empty strings for none."""
    return tuple(filter(None, (words,) if isinstance(words, str) else words or ()))


def _bias(bias: Mapping[str, float]) -> dict[int, float]:
    for token in bias:
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise InvalidArgument(
                f"logit_bias must name tokens by their ids, got {shortened(token)}", field="logit_bias"
            )
    return {int(token): value for token, value in bias.items()}
