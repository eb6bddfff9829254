"""The bodies of /v1/completions and /v1/chat/completions: which fields there are, and what each may be."""

from typing import Any, TypeAlias

import msgspec

from ...core.errors import InvalidArgument
from ...core.guided_decoding import GuidedDecoding, GuidedDecodingKind
from ...core.logprobs import MAX_LOGPROBS
from .json_body import NoOpValues
from .response_format import ResponseFormat, resolve_guide

NO_OP_VALUES: NoOpValues = {
    "best_of": (1,),
    "top_logprobs": (0,),
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
    "use_beam_search": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "return_tokens_as_token_ids": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "structured_outputs": (),
    "mm_processor_kwargs": ({},),
}
"""Fields of OpenAI and vLLM that are not supported, here or by the other endpoint."""

COMPLETION_NO_OP_VALUES: NoOpValues = {**NO_OP_VALUES, "add_special_tokens": (True,)}
CHAT_NO_OP_VALUES: NoOpValues = {**NO_OP_VALUES, "add_special_tokens": (False,)}
"""A text gets the tokens that the tokenizer puts around it; a conversation those that its template writes."""


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


StringOrList: TypeAlias = str | tuple[str, ...] | None
"""One string, or several."""


class GenerationBody(msgspec.Struct, frozen=True, kw_only=True):
    """What both have."""

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
    stop: StringOrList = None
    include_stop_str_in_output: bool | None = None
    bad_words: StringOrList = None
    allowed_token_ids: tuple[int, ...] | None = None
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    min_tokens: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    lora_name: str | None = None
    response_format: ResponseFormat | None = None
    guided_decoding_guide_type: GuidedDecodingKind | None = None
    guided_decoding_guide: str | None = None

    @property
    def guide(self) -> GuidedDecoding | None:
        """What the text must be. Raises `InvalidArgument` where that contradicts itself."""
        guide = GuidedDecoding.from_parameters(self.guided_decoding_guide_type, self.guided_decoding_guide or "")
        return resolve_guide(self.response_format, guide)

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens to name beside each chosen one; None names none and no logprob at all."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same of the prompt's tokens."""
        return self.prompt_logprobs


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    prompt: Any
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """An echo has logprobs as the rest has."""
        echoed = self.logprobs if self.echo else None
        return max((most for most in (echoed, self.prompt_logprobs) if most is not None), default=None)


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def num_logprobs(self) -> int | None:
        top = self.top_logprobs or 0
        if not 0 <= top <= MAX_LOGPROBS:
            raise InvalidArgument(f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {top}", field="top_logprobs")
        if top and not self.logprobs:
            raise InvalidArgument("top_logprobs needs logprobs to be true", field="top_logprobs")
        return top if self.logprobs else None
