"""Requests to models and the responses that stream out of them."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from .adapter import LoraTask
from .drafts import DraftLimit, DraftSummary
from .errors import InvalidArgument
from .logprobs import PromptToken, TokenLogprob
from .sampling import SamplingParams, check_range
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


_MAX_WORDS = 256
_LONGEST_TARGET = 3_600_000


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


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One text generation. Not every engine can satisfy all of it, see `EngineSpec.capabilities`.

    Raises:
        InvalidArgument: `priority` or a target is negative, or the request asks for nothing at all.
    """

    id: str
    prompt: Prompt
    sampling: SamplingParams = SamplingParams()
    priority: int = 0
    """The class; 0 is the most urgent one."""
    cache_salt: str = ""
    """Parts the prefix cache, as the tenant does."""
    timeout: float = 0.0
    """Seconds from the arrival to the last token; 0 leaves it to the model."""
    target_ttft_ms: float = 0.0
    """Milliseconds to the first token that are wanted; 0 leaves them to the model."""
    target_itl_ms: float = 0.0
    """Milliseconds between tokens that are wanted, in the same way."""
    choice: int = 0
    """The number of this answer to its prompt: with the same seed, each has random numbers of its own."""
    choice_count: int = 1
    """Answers to each prompt of the API request that was split into requests like this one."""
    prompt_count: int = 1
    """Prompts of that API request."""
    adapter: str = ""
    """The LoRA adapter's name; empty for the model itself."""
    lora_task: LoraTask | None = None
    """A LoRA adapter that the client sent itself."""
    guided_decoding: GuidedDecoding | None = None
    """What the text is held to."""
    echo: bool = False
    """The answer begins with the prompt's text."""
    return_prompt_ids: bool = False
    """The first chunk has the prompt's token ids."""
    reads_answer: bool = False
    """Reasoning and tool calls are told apart from the text, which has neither."""
    lenient_limits: bool = False
    """Limits that the model can't have are no errors: `max_tokens` that don't fit beside the prompt are as many as do,
    and a budget for reasoning that there is none of is no budget."""
    tools: ToolUse | None = None
    """The tools that may be called."""
    thinking_budget: int | None = None
    """Tokens of reasoning after which the model is made to end it; None is no limit."""
    thinking_budget_optional: bool = False
    """A model that does not reason has nothing to limit, and takes the request."""
    drafts: DraftLimit | None = None
    """None leaves speculation to the model."""
    prediction: str = ""
    """What the answer will likely be."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """Words that are never written, as token ids."""
    stop_word_ids: tuple[tuple[int, ...], ...] = ()
    """Words that end the text and stay in it, as token ids."""

    def __post_init__(self) -> None:
        check_range("priority", self.priority, "at least 0", lambda v: v >= 0)
        for name in ("target_ttft_ms", "target_itl_ms"):
            check_range(
                name, getattr(self, name), f"from 0 to {_LONGEST_TARGET:,}", lambda v: 0 <= v <= _LONGEST_TARGET
            )
        for name in ("bad_word_ids", "stop_word_ids"):
            check_range(name, getattr(self, name), f"at most {_MAX_WORDS} words", lambda v: len(v) <= _MAX_WORDS)
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


class GenerateChunk(msgspec.Struct, frozen=True, kw_only=True):
    """The output since the last chunk; tokens that were not read in time arrive merged."""

    text: str
    """May be empty while a character is incomplete, or a stop string may have begun."""
    token_ids: tuple[int, ...]
    usage: Usage
    finish_reason: FinishReason | None = None
    """The last chunk has one, and only the last."""
    stop_reason: str | int | None = None
    """The stop string or stop token id of the request that ended the text, if one did."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of `token_ids`, if asked for."""
    prompt_logprobs: tuple[PromptToken, ...] = ()
    """In the first chunk, if asked for: all tokens of the prompt."""
    prompt_ids: tuple[int, ...] = ()
    """In the first chunk, if asked for."""
    reasoning: str = ""
    """Of a request whose answer is read."""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    """Of a request whose answer is read."""
    end_token: bool = False
    """The last token ended the text and is no part of it."""
    drafts: DraftSummary | None = None
    """In the last chunk, where the model reports them."""


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
