"""Requests to models and the responses that stream out of them."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from .adapter import LoraTask
from .errors import InvalidArgument
from .logprobs import MAX_LOGPROBS, PromptToken, TokenLogprob
from .tensor import Tensor

ParameterValue: TypeAlias = str | int | float | bool
GuidedDecodingKind: TypeAlias = Literal["json", "json_schema", "regex", "ebnf_grammar"]
"""What `guided_decoding_guide_type` may be."""
GrammarKind: TypeAlias = GuidedDecodingKind | Literal["choice", "structural_tag", "lark"]
ToolChoice: TypeAlias = Literal["none", "auto", "required"]


class InferRequest(msgspec.Struct, frozen=True):
    """One v2 inference request. `outputs` names the wanted outputs; None means all of them."""

    id: str = ""
    inputs: Mapping[str, Tensor] = {}
    outputs: tuple[str, ...] | None = None
    parameters: Mapping[str, ParameterValue] = {}


class InferResponse(msgspec.Struct, frozen=True):
    """One response of the stream that answers an `InferRequest`.

    `final` marks the last one; a stream may also end without it.
    """

    outputs: tuple[Tensor, ...]
    parameters: Mapping[str, ParameterValue] = {}
    final: bool = False


class FinishReason(StrEnum):
    """Why a generation ended: an end or stop token; a length limit; its time; the client; a fault of ours."""

    STOP = "stop"
    LENGTH = "length"
    TIMEOUT = "timeout"
    ABORT = "abort"
    ERROR = "error"


MAX_LISTED_TOKENS = 1024
"""Tokens that a request may name to stop at, or to bias."""

_MAX_STOP_STRINGS = 64
_MAX_STOP_STRING_LENGTH = 256
_MAX_WORDS = 256
_LONGEST_TARGET = 3_600_000


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to choose tokens. None leaves the choice to the model's generation_config.

    `temperature` 0 is greedy; `top_k` 0 or -1, `top_p` 1 and `min_p` 0 are off. `max_tokens` None means up to the
    model's length, 0 to compute the prompt alone. Without a `seed`, which -1 is too, the engine draws one.

    `repetition_penalty` counts prompt and output, `presence_penalty` and `frequency_penalty` the output alone.
    `logit_bias`: token id -> number added to its logit. `bad_words` are never written. Neither stop tokens nor `stop`
    strings end a text of less than `min_tokens` tokens, nor do those that begin in it; a stop string is cut off unless
    `include_stop_str_in_output`. `allowed_token_ids`: no others are chosen. `truncate_prompt_tokens`: how many of the
    prompt's last tokens to keep, -1 for as many as fit. Unless `skip_special_tokens`, these are in the text;
    `spaces_between_special_tokens`: with the spaces that a tokenizer puts between them. `logprobs`: how many of the
    likeliest tokens to name beside each chosen one; `prompt_logprobs`: beside each one of the prompt. None asks for no
    logprob at all.

    Raises:
        InvalidArgument: a value is out of range; `field` names it.
    """

    max_tokens: int | None = 16
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    bad_words: tuple[str, ...] = ()
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    allowed_token_ids: tuple[int, ...] | None = None
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _check("max_tokens", self.max_tokens, "at least 0", lambda v: v >= 0)
        _check("temperature", self.temperature, "a finite number of at least 0", lambda v: 0 <= v < float("inf"))
        _check("top_k", self.top_k, "-1, 0 (both off) or a positive number", lambda v: v >= -1)
        _check("top_p", self.top_p, "above 0 and at most 1", lambda v: 0 < v <= 1)
        _check("seed", self.seed, "between -2**63 and 2**64 - 1", lambda v: -(2**63) <= v < 2**64)
        for name in ("stop_token_ids", "logit_bias"):
            tokens = getattr(self, name)
            _check(name, tokens, f"at most {MAX_LISTED_TOKENS} tokens", lambda v: len(v) <= MAX_LISTED_TOKENS)
        for token in self.stop_token_ids:
            _check("stop_token_ids", token, "made of numbers of at least 0", lambda v: v >= 0)
        truncated = self.truncate_prompt_tokens
        _check("truncate_prompt_tokens", truncated, "-1 or at least 1", lambda v: v == -1 or v >= 1)
        _check("min_p", self.min_p, "between 0 and 1", lambda v: 0 <= v <= 1)
        _check("repetition_penalty", self.repetition_penalty, "a finite number above 0", lambda v: 0 < v < float("inf"))
        _check("presence_penalty", self.presence_penalty, "between -2 and 2", lambda v: -2 <= v <= 2)
        _check("frequency_penalty", self.frequency_penalty, "between -2 and 2", lambda v: -2 <= v <= 2)
        for token, bias in self.logit_bias.items():
            _check("logit_bias", token, "given for token ids of at least 0", lambda v: v >= 0)
            _check("logit_bias", bias, "between -100 and 100", lambda v: -100 <= v <= 100)
        allowed = self.allowed_token_ids
        _check("allowed_token_ids", allowed, "at least one token", len)
        _check("allowed_token_ids", min(allowed or (0,)), "made of numbers of at least 0", lambda v: v >= 0)
        most = float("inf") if self.max_tokens is None else self.max_tokens
        _check("min_tokens", self.min_tokens, "between 0 and max_tokens", lambda v: 0 <= v <= most)
        for name in ("logprobs", "prompt_logprobs"):
            _check(name, getattr(self, name), f"between 0 and {MAX_LOGPROBS}", lambda v: 0 <= v <= MAX_LOGPROBS)
        _check_words("stop", self.stop)
        _check_words("bad_words", self.bad_words)

    @property
    def chosen_seed(self) -> int | None:
        """The seed, if the client chose one."""
        return None if self.seed == -1 else self.seed


def _check(name: str, value: Any, must_be: str, holds: Any) -> None:
    if value is not None and not holds(value):
        got = len(value) if isinstance(value, tuple | dict) else repr(value)
        raise InvalidArgument(f"{name} must be {must_be}, got {got}", field=name)


def _check_words(name: str, words: tuple[str, ...]) -> None:
    if len(words) > _MAX_STOP_STRINGS or not all(0 < len(word) <= _MAX_STOP_STRING_LENGTH for word in words):
        message = f"{name} must be at most {_MAX_STOP_STRINGS} strings of 1 to {_MAX_STOP_STRING_LENGTH} characters"
        raise InvalidArgument(message, field=name)


class Tool(msgspec.Struct, frozen=True):
    """A function that the model may ask the client to call. `parameters`: a JSON Schema of its arguments, as JSON text.
    `strict`: what the model writes for it is held to them. `custom`: to the client its one argument is a free text."""

    name: str
    description: str = ""
    parameters: str = "{}"
    strict: bool = False
    custom: bool = False


class ToolUse(msgspec.Struct, frozen=True):
    """The tools of a request. With `named`, exactly that tool is called; without `parallel`, one call at most."""

    tools: tuple[Tool, ...]
    choice: ToolChoice = "auto"
    named: str = ""
    parallel: bool = True

    @property
    def constrained(self) -> bool:
        """Whether what is written of calls is held to the tools' parameters."""
        return bool(self.named or self.choice == "required") or (
            self.choice == "auto" and any(tool.strict for tool in self.tools)
        )


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a tool; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


class ToolCallDelta(msgspec.Struct, frozen=True):
    """What came of call `index` since the last chunk: `id` and `name` whole in the first delta of a call and empty in
    others, `arguments` the next piece of their JSON text."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn of a conversation; `name` tells participants of the same role apart.

    The assistant's may have `reasoning` and `tool_calls`; one of role "tool" is the result of call `tool_call_id`.
    """

    role: str
    content: str
    name: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""


class Conversation(msgspec.Struct, frozen=True):
    """A prompt for a chat template to render: the model's, or `chat_template`, with `tools` and further `variables`.

    `add_generation_prompt`: the prompt ends with the assistant's turn opened. `continue_final_message`: it ends in the
    middle of the last message, which the answer continues.

    Raises:
        InvalidArgument: both are set, or there is nothing to continue.
    """

    messages: tuple[ChatMessage, ...]
    variables: Mapping[str, Any] = {}
    chat_template: str = ""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: tuple[Tool, ...] = ()

    def __post_init__(self) -> None:
        field = "continue_final_message"
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidArgument(f"{field} and add_generation_prompt can't both be true", field=field)
        if self.continue_final_message and not self.messages[-1].content.strip():
            raise InvalidArgument(f"{field}: the last message is empty", field=field)


Prompt: TypeAlias = str | tuple[int, ...] | Conversation
"""Text to tokenize, token ids as they are, or a conversation to render."""


class GuidedDecoding(NamedTuple):
    """A constraint on generated text: any JSON, JSON of a schema, a regular expression, an EBNF or Lark grammar, one of
    several texts (`choice`), or tags with a schema each (`structural_tag`).

    `text` is the schema, expression or grammar, a JSON list for `choice`, empty for `json`. `parameter`: the request's
    parameter, for errors. `after`: what the model writes up to and including this text is free. `strict`: a part of
    the schema that cannot be enforced is refused, and not left out.
    """

    kind: GrammarKind
    text: str = ""
    parameter: str = "guided_decoding_guide_type"
    after: str = ""
    strict: bool = False

    @classmethod
    def from_parameters(cls, kind: GuidedDecodingKind | None, text: str) -> "GuidedDecoding | None":
        """The constraint of the parameters `guided_decoding_guide_type` and `guided_decoding_guide`, if any.

        Raises:
            InvalidArgument: a kind lacks its guide, a guide its kind, or `json` has one.
        """
        if kind is None and text:
            message = "guided_decoding_guide needs guided_decoding_guide_type"
            raise InvalidArgument(message, field="guided_decoding_guide_type")
        if kind is not None and (kind == "json") == bool(text):
            needs = "takes no guide" if kind == "json" else "needs one"
            message = f"guided_decoding_guide: type '{kind}' {needs}"
            raise InvalidArgument(message, field="guided_decoding_guide")
        return None if kind is None else cls(kind, text)


MAX_DRAFTS = 32
"""Tokens that a step may draft for a sequence, whoever says how many."""


class DraftLimit(NamedTuple):
    """The most tokens that a step may draft for a sequence; 0 drafts none. `parameter`: the request's, for errors."""

    most: int
    parameter: str = "speculative_k"


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One text generation. `priority` 0 is the most urgent class; `cache_salt` and the tenant part the prefix cache.

    `timeout`: seconds from the arrival to the last token; 0 leaves it to the model. `target_ttft_ms`, `target_itl_ms`:
    milliseconds to the first token and between tokens that are wanted; 0 leaves them to the model. `choice` numbers the
    answers to one prompt: with the same seed, each has random numbers of its own. `choice_count` answers to each of
    `prompt_count` prompts: the API request that was split into requests like this one. `adapter`: the LoRA adapter's
    name, empty for the model itself; `lora_task`: one that the client sent itself. Not every engine has adapters or
    `guided_decoding`. `echo`: the answer begins with
    the prompt's text. `return_prompt_ids`: its first chunk has the prompt's token ids. `reads_answer`: reasoning and
    tool calls are told apart from the text, which has neither. `lenient_limits`: those that the model can't have are no
    errors: `max_tokens` that don't fit beside the prompt are as many as do, reasoning that there is none of has no
    budget. `tools`: which of them may be called. `thinking_budget`: tokens of reasoning after which the model is made
    to end it; None is no limit; where it is `optional`, a model that does not reason has nothing to limit. `drafts`:
    None leaves speculation to the model. `prediction`: what the answer will likely be; where it is right, it comes
    faster. `bad_word_ids`, `stop_word_ids`: words as sequences of token ids; the first ones are never written, the
    others end the text and stay in it.

    Raises:
        InvalidArgument: `priority` or a target is negative, or the request asks for nothing at all.
    """

    id: str
    prompt: Prompt
    sampling: SamplingParams = SamplingParams()
    priority: int = 0
    cache_salt: str = ""
    timeout: float = 0.0
    target_ttft_ms: float = 0.0
    target_itl_ms: float = 0.0
    choice: int = 0
    choice_count: int = 1
    prompt_count: int = 1
    adapter: str = ""
    lora_task: LoraTask | None = None
    guided_decoding: GuidedDecoding | None = None
    echo: bool = False
    return_prompt_ids: bool = False
    reads_answer: bool = False
    lenient_limits: bool = False
    tools: ToolUse | None = None
    thinking_budget: int | None = None
    thinking_budget_optional: bool = False
    drafts: DraftLimit | None = None
    prediction: str = ""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    stop_word_ids: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        _check("priority", self.priority, "at least 0", lambda v: v >= 0)
        for name in ("target_ttft_ms", "target_itl_ms"):
            _check(name, getattr(self, name), f"from 0 to {_LONGEST_TARGET:,}", lambda v: 0 <= v <= _LONGEST_TARGET)
        for name in ("bad_word_ids", "stop_word_ids"):
            _check(name, getattr(self, name), f"at most {_MAX_WORDS} words", lambda v: len(v) <= _MAX_WORDS)
        if self.prompt_only and not (self.echo or self.wants_prompt_logprobs or self.choice):
            message = "max_tokens must be at least 1 unless the prompt is to be echoed or scored, got 0"
            raise InvalidArgument(message, field="max_tokens")

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.sampling.prompt_logprobs is not None

    @property
    def needs_thinking_limit(self) -> bool:
        """Whether it is refused where reasoning can't be limited."""
        return self.thinking_budget is not None and not (self.lenient_limits or self.thinking_budget_optional)

    @property
    def prompt_only(self) -> bool:
        """Whether no token is to be generated."""
        return self.sampling.max_tokens == 0


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt to turn into token ids, by default exactly as `generate` would."""

    prompt: Prompt
    add_special_tokens: bool = True


class Usage(msgspec.Struct, frozen=True):
    """Tokens counted so far; `cached_tokens` of the prompt came out of the prefix cache, `reasoning_tokens` of the
    completion were reasoning. When the text has ended: tokens of the request's prediction, if it had one, that the
    completion has, `accepted_prediction_tokens`, and those that it has not."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


DraftReport: TypeAlias = Literal["none", "summary", "detailed"]
"""What the last chunk of a text tells of its drafts: nothing, sums, or those of each step too."""


class DraftSummary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The drafts of one text, as vLLM's `metrics.speculative_decoding` has them. A histogram counts steps by how many
    of their drafts were accepted; steps without drafts are not counted. `num_spec_tokens`: the most of a step.

    Source: https://docs.vllm.ai/en/stable/features/speculative_decoding/acceptance_metrics/
    """

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    acceptance_histogram_by_draft_length: dict[str, list[int]]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    per_step_accepted: list[int] | None = None
    per_step_drafted: list[int] | None = None


def summarize_drafts(steps: Sequence[tuple[int, int]], most: int, detailed: bool = False) -> DraftSummary:
    """The summary of steps with so many drafts each, and so many of them accepted, where `most` may be drafted."""
    by_length = {drafted: [0] * (drafted + 1) for drafted in sorted({drafted for drafted, _ in steps})}
    histogram = [0] * (most + 1)
    for drafted, right in steps:
        by_length[drafted][right] += 1
        histogram[right] += 1
    total, accepted = sum(drafted for drafted, _ in steps), sum(right for _, right in steps)
    return DraftSummary(
        mean_acceptance_length=1 + accepted / max(len(steps), 1),
        draft_acceptance_rate=accepted / max(total, 1),
        acceptance_histogram=histogram,
        acceptance_histogram_by_draft_length={str(length): counts for length, counts in by_length.items()},
        num_spec_steps=len(steps),
        num_accepted_draft_tokens=accepted,
        num_draft_tokens=total,
        num_spec_tokens=most,
        per_step_accepted=[right for _, right in steps] if detailed else None,
        per_step_drafted=[drafted for drafted, _ in steps] if detailed else None,
    )


class GenerateChunk(msgspec.Struct, frozen=True, kw_only=True):
    """The output since the last chunk; tokens that were not read in time arrive merged.

    `text` may be empty while a character is incomplete, or a stop string may have begun. The last chunk, and only it,
    has a `finish_reason`; `stop_reason` is the stop string or stop token id of the request that ended the text, if one
    did. `reasoning` and `tool_calls`: of requests whose answer is read. `logprobs`: one for each of `token_ids`, if
    asked for. `end_token`: the last token ended the text and is no part of it. In the first chunk, if asked for:
    `prompt_logprobs`, all tokens of the prompt, and `prompt_ids`. `drafts`: in the last chunk, where the model reports
    them.
    """

    text: str
    token_ids: tuple[int, ...]
    usage: Usage
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[PromptToken, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    end_token: bool = False
    drafts: DraftSummary | None = None


def join_chunks(chunks: Sequence[GenerateChunk]) -> GenerateChunk:
    """All chunks of a stream as one."""
    return msgspec.structs.replace(
        chunks[-1],
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        logprobs=tuple(logprob for chunk in chunks for logprob in chunk.logprobs),
        prompt_logprobs=chunks[0].prompt_logprobs,
        prompt_ids=chunks[0].prompt_ids,
        reasoning="".join(chunk.reasoning for chunk in chunks),
        tool_calls=_join_calls([delta for chunk in chunks for delta in chunk.tool_calls]),
    )


def _join_calls(deltas: Sequence[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        arguments.setdefault(delta.index, []).append(delta.arguments)
    first = {delta.index: delta for delta in reversed(deltas)}
    return tuple(
        msgspec.structs.replace(first[index], arguments="".join(pieces)) for index, pieces in arguments.items()
    )
