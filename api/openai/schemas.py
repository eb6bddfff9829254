"""Fields of the bodies of completions, chat, /tokenize and /detokenize: names, types, and how some become another.

The reference is OpenAI's API (https://platform.openai.com/docs/api-reference) with vLLM's extra parameters
(https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html). Sampling parameters are those of
`SamplingParams`.
"""

from typing import Annotated, Any, Literal, TypeAlias, get_type_hints

import msgspec

from ...core.drafts import MAX_DRAFTS, DraftLimit
from ...core.foreign_parameters import FOREIGN_NO_OPS
from ...core.logprobs import MAX_LOGPROBS
from ...core.sampling import SamplingParams
from .json_body import NoOpValues, field_error, shortened
from .text_constraints import ConstraintFields

_NO_OP_VALUES: NoOpValues = {
    **FOREIGN_NO_OPS,
    "vllm_xargs": ({},),
    "options": ({},),
    "routed_experts_prompt_start": (0,),
    "truncation_side": ("left",),
    "media_io_kwargs": ({},),
    "best_of": (1,),
    "top_logprobs": (0,),
    "length_penalty": (1,),
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
    "thinking_token_budget": (-1,),
    "include_reasoning": (True,),
    "separate_reasoning": (False,),
    "stream_reasoning": (True,),
    "web_search_options": (),
    "use_beam_search": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
}
# A text gets the special tokens that the tokenizer puts around it, a conversation those that its template writes.
COMPLETION_NO_OP_VALUES: NoOpValues = {**_NO_OP_VALUES, "add_special_tokens": (True,)}
CHAT_NO_OP_VALUES: NoOpValues = {**_NO_OP_VALUES, "add_special_tokens": (False,)}
TOKENIZE_NO_OP_VALUES: NoOpValues = {"media_io_kwargs": ({},)}


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class SpeculativeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`k`: the most tokens that a step drafts for the answer."""

    k: Annotated[int, msgspec.Meta(ge=0, le=MAX_DRAFTS)]


class ThinkingSwitch(msgspec.Struct, frozen=True, kw_only=True):
    """DeepSeek's, Zhipu's and Anthropic's `thinking`."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: int | None = None


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True):
    """OpenRouter's `reasoning`, of which `effort` is also OpenAI's on another endpoint. `exclude`: it is not shown."""

    effort: str | None = None
    max_tokens: int | None = None
    enabled: bool | None = None
    exclude: bool | None = None


class PredictedContent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's predicted output: what the answer will likely be, as a text or its parts."""

    content: Any
    type: Literal["content"]


_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Values of `reasoning_effort`."""

BUDGET_NAMES = ("thinking_budget", "thinking_budget_tokens")
"""Qwen's and llama.cpp's names of `thinking_token_budget`."""

StringOrList: TypeAlias = str | tuple[str, ...] | None


class GenerationBody(ConstraintFields, frozen=True, kw_only=True):
    """Fields that completions and chat have, beside `SamplingFields`."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    cache_salt: str | None = None
    cache_hit_threshold: float | None = None
    priority: int | None = None
    timeout: float | None = None
    target_ttft_ms: float | None = None
    target_itl_ms: float | None = None
    n: int | None = None
    stop: StringOrList = None
    bad_words: StringOrList = None
    logit_bias: dict[str, float] | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    lora_name: str | None = None
    retention_scope: str | None = None
    retention_directives: Any = None
    kv_cache_retention_config: Any = None
    speculative: SpeculativeOptions | bool | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def drafts(self) -> DraftLimit | None:
        """Raises `InvalidArgument` for `true`, which does not say how many."""
        if self.speculative is True:
            raise field_error("speculative", "must be false, or an object with k")
        if isinstance(self.speculative, SpeculativeOptions):
            return DraftLimit(self.speculative.k, "speculative.k")
        return None if self.speculative is None else DraftLimit(0, "speculative")


def thinking_variables(thinks: bool) -> dict[str, Any]:
    """The variables by which chat templates let a model reason or not: Qwen's and DeepSeek's names for it."""
    return {"enable_thinking": thinks, "thinking": thinks}


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    prompt: Any
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None

    @property
    def num_logprobs(self) -> int | None:
        """The number of likeliest tokens beside each chosen one; None: no logprob is shown at all."""
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The number of likeliest tokens computed for each token of the prompt; None: no logprob at all."""
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
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    thinking_token_budget: int | None = None
    thinking_budget: int | None = None
    thinking_budget_tokens: int | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    enable_thinking: bool | None = None
    thinking: ThinkingSwitch | bool | None = None
    reasoning: ReasoningOptions | bool | None = None
    prediction: PredictedContent | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    echo: bool | None = None

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables of the chat template: the request's own, and what its fields say in the words of templates.

        Raises `InvalidArgument` for an effort that there is not.
        """
        thinks = self._thinks
        variables = {} if thinks is None else thinking_variables(thinks)
        effort, field = self.reasoning_effort, "reasoning_effort"
        if effort is None and isinstance(self.reasoning, ReasoningOptions):
            effort, field = self.reasoning.effort, "reasoning.effort"
        if effort is not None:
            if effort not in _EFFORTS:
                raise field_error(field, f"must be one of {', '.join(_EFFORTS)}, got {shortened(effort)}")
            variables |= thinking_variables(effort != "none") | {"reasoning_effort": effort}
        return variables | (self.chat_template_kwargs or {})

    @property
    def _thinks(self) -> bool | None:
        """Whether the model is to reason, by the names that other services have for that; None leaves it to the
        model."""
        if self.enable_thinking is not None:
            return self.enable_thinking
        if self.thinking is not None:
            return self.thinking if isinstance(self.thinking, bool) else self.thinking.type != "disabled"
        return self.reasoning.enabled if isinstance(self.reasoning, ReasoningOptions) else self.reasoning

    @property
    def reasoning_budget(self) -> int | None:
        """Tokens that the model may reason for, by the first of the fields that say so; None is no limit, which vLLM
        calls -1."""
        field, budget = next(iter(self._budgets.items()), ("", -1))
        if budget < -1:
            raise field_error(field, f"must be -1 or at least 0, got {budget}")
        return None if budget == -1 else budget

    @property
    def _budgets(self) -> dict[str, int]:
        """The budgets for reasoning by their fields, of which the first counts."""
        thinking = self.thinking if isinstance(self.thinking, ThinkingSwitch) else None
        reasoning = self.reasoning if isinstance(self.reasoning, ReasoningOptions) else None
        stated = {
            "thinking_token_budget": self.thinking_token_budget,
            "thinking_budget": self.thinking_budget,
            "thinking_budget_tokens": self.thinking_budget_tokens,
            "thinking.budget_tokens": thinking.budget_tokens if thinking else None,
            "reasoning.max_tokens": reasoning.max_tokens if reasoning else None,
        }
        return {name: value for name, value in stated.items() if value is not None}

    @property
    def budget_warnings(self) -> tuple[str, ...]:
        """What is told of budgets by other services' names, and of those beside another."""
        first, *others = self._budgets or ("",)
        taken = (f"{first}: taken for thinking_token_budget",) if first in BUDGET_NAMES else ()
        return (*taken, *(f"{name}: ignored beside another budget" for name in others))

    @property
    def shows_reasoning(self) -> bool:
        excluded = isinstance(self.reasoning, ReasoningOptions) and self.reasoning.exclude
        return self.include_reasoning is not False and not excluded

    @property
    def num_logprobs(self) -> int | None:
        top = self.top_logprobs or 0
        if not 0 <= top <= MAX_LOGPROBS:
            raise field_error("top_logprobs", f"must be between 0 and {MAX_LOGPROBS}, got {top}")
        if top and not self.logprobs:
            raise field_error("top_logprobs", "needs logprobs to be true")
        return top if self.logprobs else None

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs


_OWN_FORM = {*CompletionBody.__struct_fields__, *ChatBody.__struct_fields__}
SamplingFields = msgspec.defstruct(
    "SamplingFields",
    [(name, kind | None, None) for name, kind in get_type_hints(SamplingParams).items() if name not in _OWN_FORM],
)
"""The parameters of `SamplingParams` that a body has under the same name and with the same type, or as null."""


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /tokenize, with either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[dict[str, Any]] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    @property
    def template_variables(self) -> dict[str, Any]:
        return self.chat_template_kwargs or {}


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[int]
    model: str | None = None
