"""Bodies of completions, chat and /tokenize become requests. Knows nothing of HTTP."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ...core.errors import InvalidArgument
from ...core.kv_transfer import parse_kv_transfer
from ...core.request import GenerateRequest, Prompt, TokenizeRequest, ToolUse
from ...core.retention import parse_retention
from ...core.sampling import SamplingParams
from .chat_messages import MESSAGE_SHAPE, content_text, parse_messages
from .chat_tools import TOOL_SHAPE, parse_tool_use, parse_tools, unenforced_grammars
from .json_body import BodyFormat, body_shape, convert_fields, field_error, shortened, supported_members
from .known_fields import Shape, ShapeByType, shape_of
from .media_parts import unused_options
from .schemas import (
    BUDGET_NAMES,
    CHAT_NO_OP_VALUES,
    COMPLETION_NO_OP_VALUES,
    TOKENIZE_NO_OP_VALUES,
    ChatBody,
    CompletionBody,
    GenerationBody,
    ReasoningOptions,
    SamplingFields,
    StreamOptions,
    StringOrList,
    ThinkingSwitch,
    TokenizeBody,
)
from .text_constraints import RESPONSE_FORMAT_SHAPE

_MAX_CHOICES = 128
_MAX_ANSWERS = 1024
"""Prompts times choices of one body: each costs the frontend 70 microseconds before it can be refused."""

_COMPLETION_MAX_TOKENS = 16
_COMPLETION_FIELDS = frozenset((*CompletionBody.__struct_fields__, *SamplingFields.__struct_fields__))
_NO_OPTIONS: Mapping[str, Any] = {}
CHAT_FIELDS = frozenset((*ChatBody.__struct_fields__, *SamplingFields.__struct_fields__))

THINKING_NOTES = {
    "enable_thinking": "taken for chat_template_kwargs.enable_thinking",
    "thinking": "taken for chat_template_kwargs.enable_thinking and thinking_token_budget",
    "reasoning": "taken for reasoning_effort, chat_template_kwargs.enable_thinking, thinking_token_budget and "
    "include_reasoning",
}
_OF_BOTH: Mapping[str, Shape | ShapeByType] = {
    "stream_options": shape_of(StreamOptions),
    "response_format": RESPONSE_FORMAT_SHAPE,
}
COMPLETION_SHAPE = body_shape(
    _COMPLETION_FIELDS | CHAT_FIELDS - THINKING_NOTES.keys() - set(BUDGET_NAMES), COMPLETION_NO_OP_VALUES, _OF_BOTH
)
CHAT_SHAPE = body_shape(
    _COMPLETION_FIELDS | CHAT_FIELDS,
    CHAT_NO_OP_VALUES,
    {
        **_OF_BOTH,
        "messages": MESSAGE_SHAPE,
        "tools": TOOL_SHAPE,
        "thinking": shape_of(ThinkingSwitch),
        "reasoning": shape_of(ReasoningOptions),
    },
    THINKING_NOTES,
)
TOKENIZE_FORMAT = BodyFormat(TokenizeBody, TOKENIZE_NO_OP_VALUES, {"messages": MESSAGE_SHAPE, "tools": TOOL_SHAPE})


class ResponseSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The form of the response to a body."""

    id: str
    model: str
    """As the body names it; empty for the only one that there is."""
    best_of: int
    """Choices that are generated for each prompt."""
    n: int
    """Choices of those that are shown, the best."""
    echo: bool
    """Whether the text begins with the prompt."""
    logprobs: int | None
    """How many of the likeliest tokens stand beside each one of the text; None shows no logprob."""
    prompt_logprobs: int | None
    """The same for the tokens of the prompt, in a list of their own."""
    return_token_ids: bool
    """Whether those of prompt and answer are shown."""
    include_usage: bool
    """Whether a stream ends with the usage."""
    continuous_usage: bool
    """Whether its chunks have it, too."""
    reasoning: bool
    """Whether reasoning is shown."""
    tokens_as_ids: bool = False
    """Whether logprobs name tokens by their ids, not by their text."""
    prefix: str = ""
    """The text that each choice begins with, of a message that is echoed."""
    custom_tools: frozenset[str] = frozenset()
    """The names of custom tools."""


class ParsedCompletion(msgspec.Struct, frozen=True):
    """A parsed body: `requests`, one for each choice of each prompt, and how to respond. `fields`: those that the body
    has, null ones left out. `warnings`: for the client."""

    requests: tuple[GenerateRequest, ...]
    stream: bool
    response: ResponseSpec
    fields: Mapping[str, Any]
    warnings: tuple[str, ...] = ()


def parse_completion(body: Mapping[str, Any], request_id: str) -> ParsedCompletion:
    """Parse a body of /v1/completions; the response's id is `cmpl-` and `request_id`.

    Raises `InvalidArgument` for a field that is unknown, unsupported or wrong; `field` names it.
    """
    members = supported_members(body, _COMPLETION_FIELDS, COMPLETION_NO_OP_VALUES)
    fields = convert_fields(members, CompletionBody)
    n, best_of = _choices(fields.n), fields.best_of
    if best_of is not None and not n <= best_of <= _MAX_CHOICES:
        raise field_error("best_of", f"must be between n, which is {n}, and {_MAX_CHOICES}, got {best_of}")
    if fields.stream and best_of is not None and best_of > n:
        raise field_error("best_of", "can't be streamed: the best are known when all have ended")
    max_tokens = _COMPLETION_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    spec = _response_spec(f"cmpl-{request_id}", fields, best_of or n, bool(fields.echo))
    return _parsed(spec, members, fields, _prompts(fields.prompt), _sampling(members, fields, spec, max_tokens))


def parse_chat(body: Mapping[str, Any], request_id: str) -> ParsedCompletion:
    """Parse a body of /v1/chat/completions; the response's id is `chatcmpl-` and `request_id`.

    Raises `InvalidArgument` for a field that is unknown, unsupported or wrong; `field` names it.
    """
    members = supported_members(body, CHAT_FIELDS, CHAT_NO_OP_VALUES)
    fields = convert_fields(members, ChatBody)
    tools = parse_tools(fields.tools) if fields.tools else ()
    conversation = parse_messages(fields.messages, fields, tools)
    chooses = tools or fields.tool_choice is not None
    use = parse_tool_use(tools, fields.tool_choice, fields.parallel_tool_calls) if chooses else None
    answer = _answer_options(fields, use)
    spec = _response_spec(f"chatcmpl-{request_id}", fields, _choices(fields.n))
    if fields.echo and conversation.messages[-1].role == "assistant":
        spec = msgspec.structs.replace(spec, prefix=conversation.messages[-1].content)
    if custom := frozenset(tool.name for tool in tools if tool.custom):
        spec = msgspec.structs.replace(spec, custom_tools=custom)
    limit = "max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens"
    try:
        sampling = _sampling(members, fields, spec, getattr(fields, limit))
        parsed = _parsed(spec, members, fields, [conversation], sampling, answer)
        warnings = (
            *fields.budget_warnings,
            *unenforced_grammars(fields.tools),
            *unused_options(fields.mm_processor_kwargs, conversation),
        )
        return msgspec.structs.replace(parsed, warnings=warnings) if warnings else parsed
    except InvalidArgument as error:
        if error.field != "max_tokens":
            raise
        raise InvalidArgument(error.message.replace("max_tokens", limit, 1), field=limit) from None


def _answer_options(fields: ChatBody, tools: ToolUse | None) -> dict[str, Any]:
    """The fields of a `GenerateRequest` that say how a chat's answer is read."""
    reads = fields.separate_reasoning is not False
    if tools is not None and not reads:
        raise field_error(
            "separate_reasoning", "can't be false with tools: calls are told apart from the text with the reasoning"
        )
    budget = fields.reasoning_budget
    predicted = "" if fields.prediction is None else content_text("prediction", fields.prediction.content, "")
    return {
        "reads_answer": reads,
        "tools": tools,
        "thinking_budget": budget,
        "thinking_budget_optional": budget is not None and fields.thinking_token_budget is None,
        "prediction": predicted,
    }


def tokenize_request(body: TokenizeBody) -> TokenizeRequest:
    """Raises `InvalidArgument` unless there is either a prompt or messages, with the fields that go with it."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidArgument("give either prompt or messages", field="prompt")
    strings = body.return_token_strs is True
    if body.messages is None:
        for name in ("chat_template", "chat_template_kwargs", "continue_final_message", "tools", "mm_processor_kwargs"):
            if getattr(body, name):
                raise field_error(name, "needs messages")
        special = body.add_special_tokens is not False
        return TokenizeRequest(prompt=body.prompt or "", add_special_tokens=special, with_strings=strings)
    if body.add_special_tokens:
        raise field_error("add_special_tokens", "is not supported with messages: their template writes its own")
    conversation = parse_messages(body.messages, body, parse_tools(body.tools))
    return TokenizeRequest(prompt=conversation, with_strings=strings)


def _response_spec(
    response_id: str, fields: CompletionBody | ChatBody, best_of: int, echo: bool = False
) -> ResponseSpec:
    options = fields.stream_options or StreamOptions()
    return ResponseSpec(
        id=response_id,
        model=fields.model or "",
        best_of=best_of,
        n=_choices(fields.n),
        echo=echo,
        logprobs=fields.num_logprobs,
        prompt_logprobs=fields.prompt_logprobs,
        tokens_as_ids=bool(fields.return_tokens_as_token_ids),
        return_token_ids=bool(fields.return_token_ids),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
        reasoning=not isinstance(fields, ChatBody) or fields.shows_reasoning,
    )


def _choices(n: int | None) -> int:
    if n is not None and not 1 <= n <= _MAX_CHOICES:
        raise field_error("n", f"must be between 1 and {_MAX_CHOICES}, got {n}")
    return n or 1


def _prompts(prompt: Any) -> list[Prompt]:
    """One prompt, or several: each a text or a list of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        kinds = set(map(type, prompt))
        if kinds == {int}:
            return [_token_ids(prompt)]
        _check_answers(len(prompt), 1)
        if kinds == {str}:
            return prompt
        if kinds == {list} and all(set(map(type, ids)) <= {int} for ids in prompt):
            return [_token_ids(ids) for ids in prompt]
    raise field_error("prompt", "must be a string, a list of token ids, or a list of either, and not empty")


def _token_ids(tokens: list[int]) -> tuple[int, ...]:
    if tokens and (min(tokens) < 0 or max(tokens) >= 2**31):
        raise field_error("prompt", ": token ids must be numbers of at least 0")
    return tuple(tokens)


def _check_answers(prompts: int, choices: int) -> None:
    if prompts * choices > _MAX_ANSWERS:
        message = f"{prompts} prompts with {choices} choices ask for more than {_MAX_ANSWERS} answers at once"
        raise InvalidArgument(message, field="prompt")


def _parsed(
    spec: ResponseSpec,
    members: Mapping[str, Any],
    fields: GenerationBody,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    answer: Mapping[str, Any] = _NO_OPTIONS,
) -> ParsedCompletion:
    stream, timeout = bool(fields.stream), fields.timeout or 0.0
    if fields.stream_options is not None and not stream:
        raise field_error("stream_options", "needs stream to be true")
    if stream and fields.prompt_logprobs is not None:
        raise field_error("prompt_logprobs", "can't be streamed")
    if timeout < 0:
        raise field_error("timeout", f"must be a number of seconds of at least 0, got {timeout}")
    _check_answers(len(prompts), spec.best_of)
    # The prompt's logprobs are told by its first choice alone; but in a stream no choice waits for another.
    further = sampling if stream else msgspec.structs.replace(sampling, prompt_logprobs=None)
    guided_decoding, drafts = fields.constraint(), fields.drafts
    retained = fields.retention_directives, fields.retention_scope, fields.kv_cache_retention_config
    retention = parse_retention(*retained) if any(retained) else None
    transfer = parse_kv_transfer(fields.kv_transfer_params) if fields.kv_transfer_params else None
    if transfer is not None and transfer.do_remote_decode and stream:
        raise field_error("kv_transfer_params", ": do_remote_decode is for an answer that is not streamed")
    if transfer is not None and len(prompts) > 1:
        raise field_error("kv_transfer_params", "is for one prompt")
    requests = tuple(
        GenerateRequest(
            id=spec.id,
            prompt=prompt,
            sampling=further if choice else sampling,
            priority=fields.priority or 0,
            cache_salt=fields.cache_salt or "",
            cache_hit_threshold=fields.cache_hit_threshold,
            timeout=timeout,
            target_ttft_ms=fields.target_ttft_ms or 0.0,
            target_itl_ms=fields.target_itl_ms or 0.0,
            adapter=fields.lora_name or "",
            guided_decoding=guided_decoding,
            drafts=drafts,
            retention=retention,
            kv_transfer=transfer,
            choice=choice,
            choice_count=spec.best_of,
            prompt_count=len(prompts),
            echo=spec.echo,
            return_prompt_ids=spec.return_token_ids,
            **answer,
        )
        for prompt in prompts
        for choice in range(spec.best_of)
    )
    set_fields = {name: value for name, value in members.items() if value is not None}
    return ParsedCompletion(requests, stream, spec, set_fields)


def _sampling(
    members: Mapping[str, Any], fields: CompletionBody | ChatBody, spec: ResponseSpec, max_tokens: int | None
) -> SamplingParams:
    named = msgspec.structs.asdict(convert_fields(members, SamplingFields))
    ranked = spec.logprobs is None and spec.best_of > spec.n  # the best are found by their logprobs
    return SamplingParams(
        **{name: value for name, value in named.items() if value is not None},
        max_tokens=max_tokens,
        stop=_non_empty(fields.stop),
        bad_words=_non_empty(fields.bad_words),
        logit_bias=_logit_bias(fields.logit_bias or {}),
        logprobs=0 if ranked else spec.logprobs,
        prompt_logprobs=fields.num_prompt_logprobs,
    )


def _non_empty(strings: StringOrList) -> tuple[str, ...]:
    # Clients send empty strings for none.
    return tuple(filter(None, (strings,) if isinstance(strings, str) else strings or ()))


def _logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    for token in bias:
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise field_error("logit_bias", f"must name tokens by their ids, got {shortened(token)}")
    return {int(token): value for token, value in bias.items()}
