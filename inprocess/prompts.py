"""What programs give a language model to answer becomes requests: texts, token ids and conversations."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec

from ..api.openai.chat_messages import parse_messages
from ..api.openai.chat_tools import parse_tools
from ..api.openai.json_body import convert_fields
from ..api.openai.schemas import ChatBody
from ..core.errors import InvalidArgument
from ..core.request import GenerateRequest, Prompt
from .sampling_params import SamplingParams, asks_for_nothing

_FORMS = "must be a text, a list of token ids, or a dict with prompt or prompt_token_ids"


_TEMPLATE_FIELDS = frozenset(
    (
        "chat_template",
        "chat_template_kwargs",
        "chat_template_content_format",
        "add_generation_prompt",
        "continue_final_message",
        "mm_processor_kwargs",
        "reasoning_effort",
        "enable_thinking",
        "thinking",
        "reasoning",
    )
)
"""What a chat's rendering depends on; how contents are formatted is the template's own here."""


class GivenPrompt(NamedTuple):
    """A prompt, and the text that it was given as."""

    prompt: Prompt
    text: str | None = None
    priority: int = 0
    cache_salt: str = ""


class AskedPrompt(NamedTuple):
    """A prompt with how it is to be answered: a request for each answer."""

    given: GivenPrompt
    requests: tuple[GenerateRequest, ...]

    @property
    def id(self) -> str:
        return self.requests[0].id

    def with_adapter(self, name: str) -> "AskedPrompt":
        requests = (msgspec.structs.replace(request, adapter=name) for request in self.requests)
        return self._replace(requests=tuple(requests)) if name else self


def given_prompts(prompts: Any, priority: Sequence[int] | None = None) -> list[GivenPrompt]:
    """One prompt or several. `priority`: the class of each. Raises `InvalidArgument`."""
    given = _given_prompts(prompts)
    if priority is None:
        return given
    if not isinstance(priority, Sequence) or [type(number) for number in priority] != [int] * len(given):
        message = f"priority must be a list of {len(given)} integers, one for each prompt, got {priority!r:.100}"
        raise InvalidArgument(message, field="priority")
    return [prompt._replace(priority=number) for prompt, number in zip(given, priority, strict=True)]


def _given_prompts(prompts: Any) -> list[GivenPrompt]:
    if isinstance(prompts, str | Mapping) or _are_ids(prompts):
        return [_given(prompts, "prompts")]
    if not isinstance(prompts, Sequence):
        raise InvalidArgument(f"prompts {_FORMS}, or a list of these, got a {type(prompts).__name__}", field="prompts")
    return [_given(prompt, f"prompts[{index}]") for index, prompt in enumerate(prompts)]


def _are_ids(value: Any) -> bool:
    return isinstance(value, Sequence) and bool(value) and all(type(item) is int for item in value)


def _given(value: Any, where: str) -> GivenPrompt:
    if isinstance(value, str):
        return GivenPrompt(value, value)
    if _are_ids(value):
        return GivenPrompt(_ids(value, where))
    if isinstance(value, Mapping):
        known = {"prompt", "prompt_token_ids", "cache_salt", "priority"}
        if stray := next((name for name in value if name not in known and not asks_for_nothing(value[name])), None):
            raise InvalidArgument(f"{where}.{stray} is unknown; known are {', '.join(sorted(known))}", field=where)
        salt, priority = value.get("cache_salt"), value.get("priority")
        salt, priority = "" if salt is None else salt, 0 if priority is None else priority
        if not isinstance(salt, str) or type(priority) is not int:
            raise InvalidArgument(f"{where}: cache_salt must be a string, and priority an integer", field=where)
        ids, text = value.get("prompt_token_ids"), value.get("prompt")
        ids = list(ids) if isinstance(ids, Iterable) else ids
        if isinstance(ids, list) and _are_ids(ids):
            return GivenPrompt(_ids(ids, where), text, priority, salt)
        if ids is None and isinstance(text, str):
            return GivenPrompt(text, text, priority, salt)
    raise InvalidArgument(f"{where} {_FORMS}", field=where)


def _ids(ids: Sequence[int], where: str) -> tuple[int, ...]:
    if min(ids) < 0 or max(ids) >= 2**31:
        raise InvalidArgument(f"{where}: token ids must be numbers of at least 0", field=where)
    return tuple(ids)


def given_conversations(messages: Any, tools: Any = None, **template: Any) -> list[GivenPrompt]:
    """One conversation or several, each a list of messages as OpenAI has them. `template`: fields of a chat's body that
    say how they are rendered. Raises `InvalidArgument`, and `TypeError` for other arguments."""
    if stray := next((name for name in template.keys() - _TEMPLATE_FIELDS if not asks_for_nothing(template[name])), ""):
        raise TypeError(f"got an unexpected keyword argument '{stray}'")
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise InvalidArgument("messages must be a list of messages, or a list of such lists", field="messages")
    several = messages if messages and isinstance(messages[0], Sequence) else [messages]
    for index, conversation in enumerate(several):
        if not isinstance(conversation, Sequence) or isinstance(conversation, str):
            got = type(conversation).__name__
            raise InvalidArgument(f"messages[{index}] must be a list of messages, got a {got}", field="messages")
    fields = {"tools": tools, **template}
    parsed_tools = parse_tools(convert_fields({"messages": [], **fields}, ChatBody).tools)
    prompts = []
    for conversation in several:
        body = convert_fields({"messages": list(conversation), **fields}, ChatBody)
        prompts.append(GivenPrompt(parse_messages(body.messages, body, parsed_tools)))
    return prompts


def asked_prompts(
    prompts: Sequence[GivenPrompt], sampling: SamplingParams | Sequence[SamplingParams] | None
) -> Iterator[AskedPrompt]:
    """Each prompt with its sampling parameters, which are those of all or one for each. Raises `InvalidArgument`."""
    params = SamplingParams.of_model() if sampling is None else sampling
    several = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    if not isinstance(several, Sequence) or not all(isinstance(own, SamplingParams) for own in several):
        message = f"sampling_params must be SamplingParams, or a list of them, got {sampling!r:.100}"
        raise InvalidArgument(message, field="sampling_params")
    if len(several) != len(prompts):
        message = f"there are {len(several)} sampling_params for {len(prompts)} prompts"
        raise InvalidArgument(message, field="sampling_params")
    for given, own in zip(prompts, several, strict=True):
        chosen, constraint, request_id = own.to_sampling(), own.constraint(), uuid4().hex
        yield AskedPrompt(
            given,
            tuple(
                GenerateRequest(
                    id=request_id,
                    prompt=given.prompt,
                    sampling=chosen,
                    priority=given.priority,
                    cache_salt=given.cache_salt,
                    choice=choice,
                    choice_count=own.n,
                    guided_decoding=constraint,
                    return_prompt_ids=choice == 0,
                )
                for choice in range(own.n)
            ),
        )
