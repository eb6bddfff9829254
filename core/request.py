"""Requests to models and the responses that stream out of them."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from .adapter import LoraTask
from .drafts import DraftLimit, DraftSummary
from .errors import InvalidArgument
from .kv_transfer import KVTransferParams
from .logprobs import PromptToken, TokenLogprob
from .media import MediaSource
from .retention import Retention
from .sampling import SamplingParams, check_range
from .speech import Speech, Transcript
from .tensor import Tensor

ParameterValue: TypeAlias = str | int | float | bool
GuidedDecodingKind: TypeAlias = Literal["json", "json_schema", "regex", "ebnf_grammar"]
"""Values of `guided_decoding_guide_type`."""
GrammarKind: TypeAlias = GuidedDecodingKind | Literal["choice", "structural_tag", "lark"]
ToolChoice: TypeAlias = Literal["none", "auto", "required"]


class InferRequest(msgspec.Struct, frozen=True):
    """One v2 inference request. `outputs` names the wanted outputs; None means all."""

    id: str = ""
    inputs: Mapping[str, Tensor] = {}
    outputs: tuple[str, ...] | None = None
    parameters: Mapping[str, ParameterValue] = {}


class InferResponse(msgspec.Struct, frozen=True):
    """One response of the stream that answers an `InferRequest`. The last one may be marked `final`."""

    outputs: tuple[Tensor, ...]
    parameters: Mapping[str, ParameterValue] = {}
    final: bool = False


class FinishReason(StrEnum):
    """Why a generation ended: an end or stop token, a length limit, its timeout, its client, a fault of the server, or
    that too little of its prompt was cached to begin: see `GenerateRequest.cache_hit_threshold`."""

    STOP = "stop"
    LENGTH = "length"
    TIMEOUT = "timeout"
    ABORT = "abort"
    ERROR = "error"
    CACHE_THRESHOLD = "cache_threshold"


_MAX_WORDS = 256
_LONGEST_TARGET = 3_600_000


class Tool(msgspec.Struct, frozen=True):
    """A function that the model may ask the client to call."""

    name: str
    description: str = ""
    parameters: str = "{}"
    """A JSON Schema of the arguments, as JSON text."""
    strict: bool = False
    """Whether the model's arguments are constrained to the schema."""
    custom: bool = False
    """Whether the client sees the one argument as free text."""


class ToolUse(msgspec.Struct, frozen=True):
    tools: tuple[Tool, ...]
    choice: ToolChoice = "auto"
    named: str = ""
    """The tool that must be called; empty for any."""
    parallel: bool = True
    """Whether several may be called at once."""

    @property
    def required(self) -> bool:
        """Whether the answer is calls and nothing else."""
        return bool(self.named or self.choice == "required")

    @property
    def constrained(self) -> bool:
        return self.required or (self.choice == "auto" and any(tool.strict for tool in self.tools))


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a tool, with its arguments as JSON text."""

    id: str
    name: str
    arguments: str


class ToolCallDelta(msgspec.Struct, frozen=True):
    """What the last chunk added to call `index`. Only its first delta has `id` and `name`; `arguments` is the next
    piece of JSON text."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: str
    content: str
    name: str = ""
    """Tells participants of one role apart."""
    reasoning: str = ""
    """The assistant's reasoning."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The assistant's calls."""
    tool_call_id: str = ""
    """The call whose result this is, if the role is "tool"."""
    media: tuple[MediaSource, ...] = ()
    """What stands between the parts of the content, in order; empty of a message that is text alone."""
    breaks: tuple[int, ...] = ()
    """The offsets of newlines in the content that are none of its own: each parts a text from the next, for models that
    want the texts by themselves."""


class Conversation(msgspec.Struct, frozen=True, tag=True):
    """A prompt for a chat template to render.

    Raises:
        InvalidArgument: both of the last two flags are set, or the last message is empty.
    """

    messages: tuple[ChatMessage, ...]
    variables: Mapping[str, Any] = {}
    """Further variables of the template."""
    chat_template: str = ""
    """The template, in place of the model's."""
    add_generation_prompt: bool = True
    """The prompt ends with an opened turn of the assistant."""
    continue_final_message: bool = False
    """The prompt ends within the last message, which the answer continues."""
    tools: tuple[Tool, ...] = ()

    def __post_init__(self) -> None:
        field = "continue_final_message"
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidArgument(f"{field} and add_generation_prompt can't both be true", field=field)
        if self.continue_final_message and not self.messages[-1].content.strip():
            raise InvalidArgument(f"{field}: the last message is empty", field=field)


class TextWithMedia(msgspec.Struct, frozen=True, tag=True):
    """A text to tokenize, with the model's token where each of its media stands; they precede a text without any."""

    text: str
    media: tuple[MediaSource, ...]


Prompt: TypeAlias = str | tuple[int, ...] | Conversation | TextWithMedia
"""Text to tokenize, token ids, or a conversation to render."""


def prompt_media(prompt: Prompt) -> tuple[MediaSource, ...]:
    if isinstance(prompt, TextWithMedia):
        return prompt.media
    if not isinstance(prompt, Conversation):
        return ()
    return tuple(medium for message in prompt.messages for medium in message.media)


class GuidedDecoding(NamedTuple):
    kind: GrammarKind
    """Any JSON, JSON of a schema, a regular expression, an EBNF or Lark grammar, one of several texts (`choice`), or
    tags with a schema each (`structural_tag`)."""
    text: str = ""
    """The schema, expression or grammar, or a JSON list of choices; empty for `json`."""
    parameter: str = "guided_decoding_guide_type"
    """The request's parameter, for errors."""
    after: str = ""
    """Text up to and including this is not constrained."""
    strict: bool = False
    """A schema is refused if a part of it cannot be enforced."""
    opening: str = ""
    """The text that comes between `after` and what is constrained, and no other."""

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
    """One text generation. Engines may lack parts of it, see `EngineSpec.capabilities`.

    Raises:
        InvalidArgument: `priority` or a target is negative, a part is none, or the request asks for nothing.
    """

    id: str
    prompt: Prompt = ""
    speech: Speech | None = None
    """What a model that writes down sounds gets in place of the prompt."""
    sampling: SamplingParams = SamplingParams()
    priority: int = 0
    """The priority class; 0 is the most urgent."""
    cache_salt: str = ""
    """Separates the prefix cache from that of other salts."""
    cache_hit_threshold: float | None = None
    """The part of the prompt, from 0 to 1, that has to be cached: else the answer is empty at once, for the request may
    find more elsewhere. None is the model's default."""
    timeout: float = 0.0
    """Seconds from arrival to the last token; 0 is the model's default."""
    target_ttft_ms: float = 0.0
    """The wanted milliseconds to the first token; 0 is the model's default."""
    target_itl_ms: float = 0.0
    """The wanted milliseconds between tokens; 0 is the model's default."""
    choice: int = 0
    """The number of this answer to its prompt; each has random numbers of its own."""
    choice_count: int = 1
    """Answers to each prompt of the API request, which was split into requests like this one."""
    prompt_count: int = 1
    """Prompts of that API request."""
    adapter: str = ""
    """The LoRA adapter's name; empty for the model itself."""
    lora_task: LoraTask | None = None
    """A LoRA adapter that the client sent itself."""
    guided_decoding: GuidedDecoding | None = None
    """The constraint on the text."""
    echo: bool = False
    """The answer begins with the prompt's text."""
    return_prompt_ids: bool = False
    """The first chunk has the prompt's token ids."""
    reads_answer: bool = False
    """Reasoning and tool calls are separated from the text."""
    lenient_limits: bool = False
    """Limits beyond the model's are no errors: `max_tokens` is lowered to what fits beside the prompt, and a budget for
    reasoning is ignored if the model has none."""
    tools: ToolUse | None = None
    """The tools that may be called."""
    thinking_budget: int | None = None
    """Tokens of reasoning after which the model must end it; None is no limit."""
    thinking_budget_optional: bool = False
    """The budget is ignored by a model that does not reason."""
    drafts: DraftLimit | None = None
    """The limit of drafts; None is the model's default."""
    prediction: str = ""
    """The expected answer, for speculation."""
    kv_transfer: KVTransferParams | None = None
    """The server that is to answer what this one computes, or that has computed the prompt."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """Words that are never generated, as token ids."""
    retention: Retention | None = None
    """What of its cache is to be kept for its session; without a scope that is the gateway's, or its own."""
    stop_word_ids: tuple[tuple[int, ...], ...] = ()
    """Words that end the text and stay in it, as token ids."""

    def __post_init__(self) -> None:
        check_range("priority", self.priority, "at least 0", lambda v: v >= 0)
        for name in ("target_ttft_ms", "target_itl_ms"):
            check_range(
                name, getattr(self, name), f"from 0 to {_LONGEST_TARGET:,}", lambda v: 0 <= v <= _LONGEST_TARGET
            )
        part = self.cache_hit_threshold
        check_range("cache_hit_threshold", part, "from 0 to 1", lambda v: v is None or 0 <= v <= 1)
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
        """Whether a model that cannot limit reasoning refuses it."""
        return self.thinking_budget is not None and not (self.lenient_limits or self.thinking_budget_optional)

    @property
    def prompt_only(self) -> bool:
        return self.sampling.max_tokens == 0


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt to tokenize, by default exactly as `generate` would."""

    prompt: Prompt
    add_special_tokens: bool = True
    with_strings: bool = False


class TokenizedPrompt(NamedTuple):
    """A prompt's tokens, and if they were wanted the vocabulary's entry of each, as its tokenizer spells it."""

    ids: list[int]
    strings: list[str] | None = None


class Usage(msgspec.Struct, frozen=True):
    """Token counts so far."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    reasoning_tokens: int = 0
    """Completion tokens that were reasoning."""
    accepted_prediction_tokens: int | None = None
    """Tokens of the request's prediction that the completion has; set at the end of the text."""
    rejected_prediction_tokens: int | None = None
    """Tokens of the prediction that it has not."""


class GenerateChunk(msgspec.Struct, frozen=True, kw_only=True):
    """The output since the last chunk; tokens that the client did not read in time arrive merged."""

    text: str
    """Empty while a character is incomplete or a stop string may have begun."""
    token_ids: tuple[int, ...]
    usage: Usage
    finish_reason: FinishReason | None = None
    """Set in the last chunk only."""
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the text."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of `token_ids`, if asked for."""
    prompt_logprobs: tuple[PromptToken, ...] = ()
    """All tokens of the prompt, in the first chunk."""
    prompt_ids: tuple[int, ...] = ()
    """The prompt's token ids, in the first chunk."""
    reasoning: str = ""
    """Separated from the text if the request has `reads_answer`."""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    """Separated from the text if the request has `reads_answer`."""
    end_token: bool = False
    """The last token ended the text and is no part of it."""
    drafts: DraftSummary | None = None
    """In the last chunk, if the model reports drafts."""
    transcript: Transcript | None = None
    """What the text is, of a request with `speech`."""
    kv_transfer_params: Mapping[str, Any] | None = None
    """In the last chunk, where another server is to go on: how it finds what was computed."""

    @property
    def is_text(self) -> bool:
        """Whether it has tokens and their text, and nothing else."""
        return not (
            self.finish_reason or self.logprobs or self.reasoning or self.tool_calls or self.prompt_logprobs
            or self.prompt_ids or self.drafts or self.transcript
        )  # fmt: skip


def join_chunks(chunks: Sequence[GenerateChunk]) -> GenerateChunk:
    """The chunks of a stream as one."""
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
