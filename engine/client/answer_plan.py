"""Plans an answer and reads it: which text is reasoning, which is calls of tools, and what constrains it.

Knows nothing of sockets.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from ...core.direct_stream import TextSink
from ...core.errors import InvalidArgument
from ...core.logprobs import TokenLogprob
from ...core.request import Conversation, FinishReason, GenerateChunk, GenerateRequest, GuidedDecoding, join_chunks
from ...core.sampling import SamplingParams
from ...tokenization.answers.answer_formats import HERMES, AnswerParsers, choose_format
from ...tokenization.answers.answer_reader import AnswerDelta, AnswerReader
from ...tokenization.answers.tool_grammars import tool_constraint
from ...tokenization.tokenizer import Tokenizer
from ..core.messages import AddRequest
from ..drafters.prediction import PredictionFollower
from .chunk_builder import ChunkBuilder, TextEnds
from .token_stream import TokenDelta, TokenWriter

_UNKNOWN_TOOLS = "tools: this model's chat template does not know them; only required calls can be made"
_NO_REASONING = "this model's chat template has no reasoning to limit"
_TAIL = 32
"""The prompt's last tokens: enough for the marker that opens the reasoning there."""


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    prompt: list[int]
    """The request's prompt, and the beginning of the answer if the plan writes that."""
    tokenizer: Tokenizer
    """The tokenizer that shows the format's markers."""
    reader: AnswerReader | None = None
    """None if all of the text is content."""
    constraint: GuidedDecoding | None = None
    """As in `AddRequest`."""
    thinking: int | None = None
    """As in `AddRequest`, but of any size."""
    thinking_end: str = ""
    """As in `AddRequest`, as text."""
    warning: str = ""
    """For the client."""

    def complete(self, add: AddRequest) -> AddRequest:
        end = [] if self.thinking is None else self.tokenizer.encode(self.thinking_end, special=False)
        # More than an answer has limits nothing, and a message holds 64 bits.
        budget = None if self.thinking is None else min(self.thinking, add.spec.max_tokens)
        return replace(add, constraint=self.constraint, thinking=budget, thinking_end=end)

    def builder(
        self,
        sampling: SamplingParams,
        ends: TextEnds,
        echo: str = "",
        prompt_ids: tuple[int, ...] = (),
        predicted: Sequence[int] = (),
    ) -> "ChunkBuilder | AnswerBuilder | PredictedAnswerBuilder":
        """The builder of the chunks of an answer, whose text was perhaps `predicted`. Raises as `ChunkBuilder` does."""
        begin = echo if self.reader is None else ""
        chunks = ChunkBuilder(self.tokenizer, self.prompt, sampling, ends, begin, prompt_ids)
        builder = chunks if self.reader is None else AnswerBuilder(chunks, self.reader, echo)
        return PredictedAnswerBuilder(builder, PredictionFollower(predicted)) if predicted else builder


def plan_answer(
    request: GenerateRequest, prompt: list[int], tokenizer: Tokenizer, parsers: AnswerParsers
) -> AnswerPlan:
    """The plan for a request with this prompt.

    Raises:
        InvalidArgument: it limits the reasoning of a model that has none, or nothing can enforce its constraint.
    """
    if not request.reads_answer:
        return AnswerPlan(prompt, tokenizer, constraint=request.guided_decoding)
    form = choose_format(tokenizer.template_source(request.prompt), parsers)
    use = request.tools
    if use is not None and form.tools is None and use.constrained:
        form = dataclasses.replace(form, tools=HERMES)  # a model that was not trained for any
    warning = _UNKNOWN_TOOLS if use is not None and form.tools is None and use.choice != "none" else ""
    constraint = request.guided_decoding
    if use is not None and form.tools is not None:
        constraint = tool_constraint(form.tools, use, constraint)
        use = replace(use, parallel=False) if use.named else use
    reasoning = form.reasoning
    budget = request.thinking_budget
    if reasoning is None:
        if request.needs_thinking_limit:
            field = "thinking_token_budget"
            raise InvalidArgument(f"{field}: {_NO_REASONING}", field=field)
        if request.thinking_budget_optional:
            warning = "; ".join(filter(None, (warning, f"the budget for reasoning is ignored: {_NO_REASONING}")))
        if form.tools is None:
            return AnswerPlan(prompt, tokenizer, None, constraint, warning=warning)
        return AnswerPlan(prompt, tokenizer.showing(form.markers), form.reader(use), constraint, warning=warning)
    tail = tokenizer.decode(prompt[-_TAIL:], special=True).rstrip()
    continued = _continued_text(request)
    within = continued is not None and continued.rfind(reasoning.start) > continued.rfind(reasoning.end)
    inside = tail.endswith(reasoning.start) or within
    # An answer with a constraint behind its reasoning, or a limit on it, has to begin with the reasoning.
    limited = constraint is not None or budget is not None
    wanted = _asks_for_reasoning(request)
    reasons = form.reasons or bool(budget) if wanted is None or reasoning.content else wanted
    if limited and reasons and not (inside or tail.endswith(reasoning.end) or continued is not None):
        prompt, inside = prompt + tokenizer.encode(reasoning.opening, special=False), True
    if inside and constraint is not None and not constraint.after:
        # A constraint on content alone leads the model to its content; one with tools has its own way there.
        opening = reasoning.content if constraint is request.guided_decoding else ""
        constraint = constraint._replace(after=reasoning.end, opening=opening)
    shown = tokenizer.showing(form.markers)
    return AnswerPlan(
        prompt, shown, form.reader(use, inside), constraint, budget if inside else None, reasoning.end, warning
    )


def _asks_for_reasoning(request: GenerateRequest) -> bool | None:
    """Whether the request asks the chat template for reasoning, by either of the customary names; None for neither."""
    variables = request.prompt.variables if isinstance(request.prompt, Conversation) else {}
    wanted = variables.get("enable_thinking", variables.get("thinking"))
    return None if wanted is None else bool(wanted)


def _continued_text(request: GenerateRequest) -> str | None:
    """The text of the message that is to be continued, if one is."""
    chat = request.prompt
    return chat.messages[-1].content if isinstance(chat, Conversation) and chat.continue_final_message else None


class AnswerBuilder:
    """Builds the chunks of an answer with several parts: `builder` writes its text, `reader` parts it. `echo`: a text
    before it. Reasoning tokens are counted up to the last one of the end marker."""

    def __init__(self, builder: ChunkBuilder, reader: AnswerReader, echo: str = "") -> None:
        self._builder = builder
        self._reader = reader
        self._echo = echo
        self._begun = False
        self._reasoning_tokens = 0

    def build_chunk(self, delta: TokenDelta) -> GenerateChunk:
        """See `ChunkBuilder.build_chunk`. When the reader is over, the answer ends as if the model had ended it."""
        # Tokens are pushed one by one while some may be reasoning: that is how they are counted.
        single = len(delta.token_ids) < 2 or self._reader.settled
        chunks: list[GenerateChunk] = []
        for part in [delta] if single else _each_token(delta):
            chunks.append(self._read(part))
            if chunks[-1].finish_reason is not None:
                break
        return chunks[0] if single else join_chunks(chunks)

    def token_writer(self, sink: TextSink) -> TokenWriter | None:
        """See `DeltaReader.token_writer`."""
        shows = self._reader.shows

        def show(text: str, tokens: int, logprob: TokenLogprob | None) -> bool:
            return shows(text) and sink(text, tokens, logprob)

        return self._builder.token_writer(show)

    def pass_text(self, delta: TokenDelta, sink: TextSink, text: str | None = None) -> GenerateChunk | None:
        """See `DeltaReader.pass_text`: a text alone is one outside of reasoning, where no call begins."""
        reader = self._reader
        thinking = reader.thinking
        if not self._begun or self._echo or (len(delta.token_ids) > 1 and not reader.settled):
            return self.build_chunk(delta)
        built = self._builder.build_text(delta, text)
        if not isinstance(built, str):
            return self._part(built, thinking)
        read = reader.push(built)
        begins_or_ends = reader.thinking is not thinking or reader.over or read.tool_calls
        if begins_or_ends or (read.text if thinking else read.reasoning):
            return self._parted(self._builder.text_chunk(built, delta), read, thinking)
        if thinking:
            self._reasoning_tokens += len(delta.token_ids)
        elif sink(read.text, self._builder.completion_tokens, None):
            return None
        return self._builder.text_chunk(read.text, delta, (), read.reasoning, self._reasoning_tokens)

    def _read(self, delta: TokenDelta) -> GenerateChunk:
        thinking, self._begun = self._reader.thinking, True
        return self._part(self._builder.build_chunk(delta), thinking)

    def _part(self, chunk: GenerateChunk, thinking: bool) -> GenerateChunk:
        """The chunk with its text parted. `thinking`: the text before it ended within reasoning."""
        last = chunk.finish_reason is not None
        # A stop token of the request's own cuts the answer as a stop string does.
        ended_by_model = chunk.end_token and chunk.stop_reason is None
        return self._parted(chunk, self._reader.push(chunk.text, last, last and not ended_by_model), thinking)

    def _parted(self, chunk: GenerateChunk, read: AnswerDelta, thinking: bool) -> GenerateChunk:
        reader = self._reader
        if thinking or reader.thinking:
            self._reasoning_tokens += len(chunk.token_ids)
        echo, self._echo = self._echo, ""
        return replace(
            chunk,
            text=echo + read.text,
            reasoning=read.reasoning,
            tool_calls=read.tool_calls,
            usage=replace(chunk.usage, reasoning_tokens=self._reasoning_tokens),
            finish_reason=FinishReason.STOP if reader.over and chunk.finish_reason is None else chunk.finish_reason,
        )


class PredictedAnswerBuilder:
    """Has `builder` build the chunks of an answer, and adds to the last how many tokens of its prediction it has."""

    def __init__(self, builder: ChunkBuilder | AnswerBuilder, follower: PredictionFollower) -> None:
        self._builder = builder
        self._follower = follower

    def build_chunk(self, delta: TokenDelta) -> GenerateChunk:
        chunk, follower = self._builder.build_chunk(delta), self._follower
        follower.extend(chunk.token_ids)
        if chunk.finish_reason is None:
            return chunk
        counts = {"accepted_prediction_tokens": follower.accepted, "rejected_prediction_tokens": follower.rejected}
        return replace(chunk, usage=replace(chunk.usage, **counts))

    def token_writer(self, sink: TextSink) -> TokenWriter | None:
        """See `pass_text`."""
        return None

    def pass_text(self, delta: TokenDelta, sink: TextSink, text: str | None = None) -> GenerateChunk | None:
        """See `DeltaReader.pass_text`: the follower needs the tokens of each."""
        return self.build_chunk(delta)


def _each_token(delta: TokenDelta) -> Iterator[TokenDelta]:
    last = len(delta.token_ids) - 1
    for at, token in enumerate(delta.token_ids):
        yield TokenDelta(
            (token,),
            delta.cached_tokens,
            delta.finish_reason if at == last else None,
            delta.logprobs[at : at + 1],
            delta.scores if at == 0 else (),
        )
