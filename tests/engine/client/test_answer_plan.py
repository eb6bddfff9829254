"""Answers that are read, through a whole language model: the engine is a script of tokens, all else is real."""

import dataclasses
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from charonia.core.errors import InvalidArgument
from charonia.core.logprobs import TokenLogprob
from charonia.core.request import (
    ChatMessage,
    Conversation,
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    GuidedDecoding,
    Tool,
    ToolUse,
    join_chunks,
)
from charonia.core.request_context import RequestContext
from charonia.core.sampling import SamplingParams
from charonia.engine.client.admission import AdmissionControl, QueueLimits, QueueTicket
from charonia.engine.client.answer_plan import plan_answer
from charonia.engine.client.chunk_builder import TextEnds
from charonia.engine.client.engine import EngineCapabilities, EngineSpec
from charonia.engine.client.llm import LlmModel
from charonia.engine.client.sequence_stats import SequenceStats
from charonia.engine.client.token_stream import TokenDelta, TokenStream
from charonia.engine.core.messages import AddRequest, CoreReady
from charonia.tokenization.answers.answer_formats import AnswerParsers
from charonia.tokenization.answers.harmony import FINAL
from charonia.tokenization.tokenizer import Tokenizer as OwnTokenizer

TEMPLATE = (
    "{% if tools %}{% for tool in tools %}<tools>{{ tool | tojson }}</tools>{% endfor %}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
TOOLS = ToolUse((Tool("weather", "Looks out of the window.", '{"type": "object"}'), Tool("time")))
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'


class ScriptedEngine:
    """An engine whose every answer is `answer`, `pace` tokens at a time."""

    ready = True
    kv_tokens = (0, 0)
    capabilities = EngineCapabilities()

    def __init__(self) -> None:
        self.answer: Sequence[int] = ()
        self.pace = 1
        self.added: list[AddRequest] = []
        self.left = 0
        self._admission = AdmissionControl(QueueLimits(8, 1 << 20))

    async def start(self) -> CoreReady:
        return CoreReady(vocab_size=2000, max_model_len=4096, block_size=16, blocks=8)

    async def close(self) -> None: ...

    def admit(self, request: GenerateRequest, tenant: str = "") -> QueueTicket:
        return self._admission.admit(tenant, 1)

    @contextmanager
    def open_stream(self, add: AddRequest, stats: SequenceStats, ticket: QueueTicket) -> Iterator[TokenStream]:
        self.added.append(add)
        yield ScriptedStream(stats, ticket, self)  # type: ignore[arg-type]


class ScriptedStream(TokenStream):
    def __init__(self, stats: SequenceStats, ticket: QueueTicket, engine: ScriptedEngine) -> None:
        super().__init__(stats, ticket)
        self._engine, self._next = engine, 0

    async def read(self) -> Any:
        answer, pace = self._engine.answer, self._engine.pace
        self.push(list(answer[self._next : self._next + pace]), 0.0)
        self._next = min(self._next + pace, len(answer))
        self._engine.left = len(answer) - self._next
        if not self._engine.left:
            self.finish(FinishReason.STOP)
        return await super().read()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["hello there"], trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (directory / "config.json").write_text("{}")
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
async def model(checkpoint: Path, engine: ScriptedEngine) -> AsyncIterator[LlmModel]:
    guided = frozenset({"guided_decoding", "thinking_budget"})
    spec = EngineSpec("test", str(checkpoint), lambda *_: engine, guided, parsers=AnswerParsers())  # type: ignore[arg-type,return-value]
    model = LlmModel("qwen", "1", spec)
    await model.load()
    yield model
    await model.unload()


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint / "tokenizer.json"))


def ask(*, content: str = "hi", use: ToolUse | None = TOOLS, sampling: Any = None, **others: Any) -> GenerateRequest:
    variables = others.pop("variables", {})
    chat = Conversation((ChatMessage("user", content),), variables, tools=use.tools if use else ())
    sampling = sampling or SamplingParams(max_tokens=1000)
    return GenerateRequest(id="", prompt=chat, sampling=sampling, tools=use, reads_answer=True, **others)


async def answer(model: LlmModel, request: GenerateRequest) -> list[GenerateChunk]:
    with RequestContext("test") as context:
        return [chunk async for chunk in model.generate(request, context)]


@pytest.mark.parametrize("pace", [1, 3, 1000])
async def test_reasoning_content_and_calls_are_told_apart(
    model: LlmModel, engine: ScriptedEngine, tokenizer: Tokenizer, pace: int
) -> None:
    written = f"<think>\nA café?</think>\n\nI look.{CALL}<tool_call>" + '{"name": "time"}</tool_call><|im_end|>'
    engine.answer, engine.pace = tokenizer.encode(written).ids, pace
    whole = join_chunks(await answer(model, ask()))
    assert (whole.reasoning, whole.text) == ("A café?", "I look.")
    assert [(call.index, call.name, call.arguments) for call in whole.tool_calls] == [
        (0, "weather", '{"city": "Zürich"}'),
        (1, "time", "{}"),
    ]
    assert len({call.id for call in whole.tool_calls}) == 2
    assert whole.finish_reason is FinishReason.STOP
    assert whole.usage.reasoning_tokens == len(tokenizer.encode("<think>\nA café?</think>").ids)
    assert whole.usage.completion_tokens == len(engine.answer)


@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("pass_texts", [False, True])
async def test_reasoning_that_begins_in_a_merged_delta_is_counted_alone(
    model: LlmModel, tokenizer: Tokenizer, checkpoint: Path, first: int, pass_texts: bool
) -> None:
    own = OwnTokenizer.load(checkpoint)
    reasoned = "\n\n<think>hm</think>"
    tokens = tokenizer.encode(f"{reasoned}I look{CALL}").ids
    for end in range(first + 1, len(tokens) + 1):
        plan = plan_answer(ask(), [1, 2], own, AnswerParsers())
        builder = plan.builder(SamplingParams(max_tokens=1000), TextEnds())
        build: Any = partial(builder.pass_text, sink=lambda *_: False) if pass_texts else builder.build_chunk
        parts = [tokens[:first], tokens[first:end], tokens[end:]]
        chunks = [build(TokenDelta(tuple(part), 0, None)) for part in parts if part]
        whole = join_chunks([*chunks, builder.build_chunk(TokenDelta((), 0, FinishReason.LENGTH))])
        assert (whole.reasoning, whole.text) == ("hm", "I look")
        assert whole.usage.reasoning_tokens == len(tokenizer.encode("<think>hm</think>").ids)


async def test_the_second_of_required_calls_that_is_cut_leaves_nothing(
    model: LlmModel, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    required = ToolUse(TOOLS.tools, choice="required")
    tokens = tokenizer.encode(f'{CALL}\n<tool_call>\n{{"name": "time", "arguments"').ids
    for end in range(len(tokenizer.encode(CALL).ids), len(tokens)):
        engine.answer, engine.pace = tokens[:end], 3
        whole = join_chunks(await answer(model, ask(use=required)))
        assert ([call.name for call in whole.tool_calls], whole.text) == (["weather"], "")
        assert whole.tool_calls[0].arguments == '{"city": "Zürich"}'


@pytest.mark.parametrize("pace", [1, 2, 5])
@pytest.mark.parametrize("opening", ["", "<think>"])
async def test_what_is_text_alone_comes_as_text_and_all_else_as_ever(
    model: LlmModel, tokenizer: Tokenizer, checkpoint: Path, pace: int, opening: str
) -> None:
    written = f"{opening}hm</think>I look é{CALL} well <tool_ca 1 < 2 {CALL}bye"
    own = OwnTokenizer.load(checkpoint)
    tokens = tokenizer.encode(written).ids
    deltas = [TokenDelta(tuple(tokens[at : at + pace]), 3, None) for at in range(0, len(tokens), pace)]
    deltas[-1] = msgspec.structs.replace(deltas[-1], finish_reason=FinishReason.LENGTH)
    plans = [plan_answer(ask(), [1, 2], own, AnswerParsers()) for _ in range(2)]
    one, other = (plan.builder(SamplingParams(max_tokens=1000), TextEnds()) for plan in plans)
    texts: list[str] = []

    def leave(text: str, tokens: int, logprob: TokenLogprob | None) -> bool:
        texts.append(text)
        return False

    chunks = [one.pass_text(delta, leave) for delta in deltas]
    assert any(texts)
    expected = [other.build_chunk(delta) for delta in deltas]
    for chunk, wanted in zip(chunks, expected, strict=True):
        assert chunk is not None, "none was taken"
        assert msgspec.structs.replace(chunk, tool_calls=()) == msgspec.structs.replace(wanted, tool_calls=())
        assert [(call.index, call.name, call.arguments) for call in chunk.tool_calls] == [
            (call.index, call.name, call.arguments) for call in wanted.tool_calls
        ]
    assert chunks[-1].usage == expected[-1].usage


async def test_tokens_of_content_are_written_and_those_of_reasoning_and_calls_are_left(
    model: LlmModel, tokenizer: Tokenizer, checkpoint: Path
) -> None:
    own = OwnTokenizer.load(checkpoint)
    tokens = tokenizer.encode(f"<think>hm</think>I look \u00e9{CALL} well <tool_ca 1 < 2 {CALL}bye").ids
    plans = [plan_answer(ask(), [1, 2], own, AnswerParsers()) for _ in range(2)]
    one, other = (plan.builder(SamplingParams(max_tokens=1000), TextEnds()) for plan in plans)
    taken: list[tuple[str, int]] = []
    written = 0
    for token in tokens:
        delta = TokenDelta((token,), 3, None)
        wanted = other.build_chunk(delta)
        taken.clear()

        def take(text: str, count: int, logprob: TokenLogprob | None) -> bool:
            taken.append((text, count))
            return True

        write = one.token_writer(take)
        left = None if write is None else write(token, None)
        written += write is not None and left is None
        if write is None or left is not None:
            chunk = one.pass_text(delta, take, left)
            if chunk is not None:
                assert not taken
                taken.append((chunk.text, chunk.usage.completion_tokens))
                assert (chunk.reasoning, len(chunk.tool_calls)) == (wanted.reasoning, len(wanted.tool_calls))
        assert taken == [(wanted.text, wanted.usage.completion_tokens)]
    assert 5 < written < len(tokens) // 2


async def test_markers_that_are_special_tokens_are_read_and_others_not_shown(
    model: LlmModel, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    engine.answer = tokenizer.encode(f"a<|im_start|>b{CALL}<|im_end|>").ids
    whole = join_chunks(await answer(model, ask()))
    assert (whole.text, [call.name for call in whole.tool_calls]) == ("ab", ["weather"])
    shown = SamplingParams(max_tokens=1000, skip_special_tokens=False)
    whole = join_chunks(await answer(model, ask(sampling=shown)))
    assert whole.text == "a<|im_start|>b"


async def test_text_is_content_where_the_request_does_not_have_it_read(
    model: LlmModel, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    engine.answer = tokenizer.encode(f"a{CALL}<|im_end|>").ids
    request = GenerateRequest(id="", prompt="hi", sampling=SamplingParams(max_tokens=1000))
    whole = join_chunks(await answer(model, request))
    assert whole.text == 'a\n{"name": "weather", "arguments": {"city": "Zürich"}}\n'
    none = ToolUse(TOOLS.tools, choice="none")
    assert "Zürich" in join_chunks(await answer(model, ask(use=none))).text


async def test_an_answer_of_one_call_at_most_ends_with_it(
    model: LlmModel, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    engine.answer = tokenizer.encode(f"{CALL}{CALL}<|im_end|>").ids
    whole = join_chunks(await answer(model, ask(use=ToolUse(TOOLS.tools, parallel=False))))
    assert [call.arguments for call in whole.tool_calls] == ['{"city": "Zürich"}']
    assert whole.finish_reason is FinishReason.STOP
    assert engine.left > 0


async def test_a_grammar_begins_behind_the_reasoning_that_the_prompt_opens(
    model: LlmModel, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    engine.answer = tokenizer.encode('why?</think>\n\n{"a": 1}<|im_end|>').ids
    constraint = GuidedDecoding("json", parameter="response_format")
    whole = join_chunks(await answer(model, ask(use=None, guided_decoding=constraint)))
    assert (whole.reasoning, whole.text) == ("why?", '{"a": 1}')
    added = engine.added[-1]
    assert added.constraint == constraint._replace(after="</think>")
    assert tokenizer.decode(added.spec.prompt.tolist(), skip_special_tokens=False).endswith("assistant\n<think>\n")
    await answer(model, ask(use=None, guided_decoding=constraint, variables={"enable_thinking": False}))
    assert engine.added[-1].constraint == constraint


async def test_a_budget_of_reasoning_reaches_the_engine(
    model: LlmModel, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    engine.answer = tokenizer.encode("why?</think>ok<|im_end|>").ids
    whole = join_chunks(await answer(model, ask(thinking_budget=7)))
    added = engine.added[-1]
    assert (added.thinking, added.thinking_end) == (7, [tokenizer.token_to_id("</think>")])
    assert (whole.reasoning, whole.text) == ("why?", "ok")
    await answer(model, ask(thinking_budget=7, variables={"enable_thinking": False}))
    assert engine.added[-1].thinking is None
    await answer(model, ask(thinking_budget=2**70))
    added = engine.added[-1]
    assert added.thinking == added.spec.max_tokens, "a message holds no more than 64 bits"


async def test_a_budget_is_refused_where_nothing_is_reasoned(model: LlmModel) -> None:
    chat = Conversation((ChatMessage("user", "hi"),), chat_template="{{ messages[0].content }}")
    request = GenerateRequest(id="", prompt=chat, reads_answer=True, thinking_budget=1)
    with pytest.raises(InvalidArgument, match="no reasoning") as caught:
        await answer(model, request)
    assert caught.value.field == "thinking_token_budget"
    whole = join_chunks(await answer(model, msgspec.structs.replace(request, lenient_limits=True)))
    assert whole.finish_reason is not None
    context, wish = RequestContext("test"), msgspec.structs.replace(request, thinking_budget_optional=True)
    join_chunks([chunk async for chunk in model.generate(wish, context)])
    assert context.warnings == [
        "the budget for reasoning is ignored: this model's chat template has no reasoning to limit"
    ]


async def test_an_echoed_prompt_is_not_read(model: LlmModel, engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    engine.answer = tokenizer.encode(f"{CALL}<|im_end|>").ids
    whole = join_chunks(await answer(model, ask(content=f"Write {CALL}", echo=True)))
    assert f"Write {CALL}" in whole.text
    assert len(whole.tool_calls) == 1


async def test_a_stop_string_ends_reasoning_too(model: LlmModel, engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
    engine.answer, engine.pace = tokenizer.encode("<think>one two three</think>four<|im_end|>").ids, 100
    whole = join_chunks(await answer(model, ask(sampling=SamplingParams(max_tokens=1000, stop=("two",)))))
    assert (whole.reasoning, whole.text, whole.stop_reason) == ("one ", "", "two")


@pytest.mark.parametrize("stop", ["string", "token"])
async def test_what_the_request_stops_by_cuts_a_call(
    model: LlmModel, engine: ScriptedEngine, tokenizer: Tokenizer, stop: str
) -> None:
    """Of either kind; the model's own end leaves what is no call as text."""
    [newline] = tokenizer.encode("\n").ids
    stops = SamplingParams(
        max_tokens=1000, **({"stop": ("\n",)} if stop == "string" else {"stop_token_ids": (newline,)})
    )
    engine.answer = tokenizer.encode("I look.<tool_call>\n").ids
    whole = join_chunks(await answer(model, ask(sampling=stops)))
    assert (whole.text, whole.tool_calls) == ("I look.", ())
    assert whole.stop_reason == ("\n" if stop == "string" else newline)
    engine.answer = tokenizer.encode("I look.<tool_call><|im_end|>").ids
    assert join_chunks(await answer(model, ask())).text == "I look.<tool_call>"


async def test_required_calls_are_held_to_the_tools_behind_the_reasoning(
    model: LlmModel, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    engine.answer = tokenizer.encode(f"hm</think>{CALL}<|im_end|>").ids
    whole = join_chunks(await answer(model, ask(use=ToolUse(TOOLS.tools, "required"))))
    assert (whole.reasoning, whole.text, len(whole.tool_calls)) == ("hm", "", 1)
    constraint = engine.added[-1].constraint
    assert constraint is not None
    assert (constraint.kind, constraint.parameter, constraint.after) == ("structural_tag", "tool_choice", "</think>")
    await answer(model, ask(use=ToolUse(TOOLS.tools, named="time"), variables={"enable_thinking": False}))
    constraint = engine.added[-1].constraint
    assert constraint is not None
    assert constraint.after == ""
    assert "weather" not in constraint.text


async def test_tools_that_nobody_requires_cost_no_grammar(
    model: LlmModel, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    engine.answer = tokenizer.encode("ok<|im_end|>").ids
    await answer(model, ask())
    assert engine.added[-1].constraint is None
    await answer(model, ask(use=ToolUse((Tool("time", strict=True),))))
    constraint = engine.added[-1].constraint
    assert constraint is not None
    assert (constraint.parameter, constraint.strict) == ("strict", True)


async def test_a_template_that_knows_no_tools_gets_required_calls_as_hermes_writes_them(
    model: LlmModel, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    engine.answer = tokenizer.encode(f"{CALL}<|im_end|>").ids
    chat = Conversation((ChatMessage("user", "hi"),), chat_template="{{ messages[0].content }}")
    for use, calls in ((ToolUse(TOOLS.tools, "required"), 1), (TOOLS, 0)):
        request = GenerateRequest(
            id="", prompt=chat, sampling=SamplingParams(max_tokens=1000), tools=use, reads_answer=True
        )
        assert len(join_chunks(await answer(model, request)).tool_calls) == calls


async def test_an_engine_without_grammars_refuses_what_needs_one(model: LlmModel) -> None:
    model._spec = dataclasses.replace(model._spec, capabilities=frozenset())
    with pytest.raises(InvalidArgument, match="'tool_choice' is not supported"):
        await answer(model, ask(use=ToolUse(TOOLS.tools, "required")))


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}])
async def test_constraints_on_gpt_oss_begin_behind_an_analysis_that_the_prompt_opens(
    model: LlmModel, engine: ScriptedEngine, tokenizer: Tokenizer, variables: dict[str, object]
) -> None:
    template = "{{ tools }}{{ messages[0].content }}<|start|>assistant{# <|channel|>analysis<|message|> #}"
    chat = Conversation((ChatMessage("user", "hi"),), variables, template)
    asked = GenerateRequest(id="", prompt=chat, sampling=SamplingParams(max_tokens=1000), reads_answer=True)
    call = "<|start|>assistant<|channel|>commentary to=functions.time <|constrain|>json<|message|>{}<|call|>"
    for changes, opening, written in (
        ({"tools": ToolUse(TOOLS.tools, "required")}, "", call),
        ({"guided_decoding": GuidedDecoding("json")}, f"<|start|>assistant{FINAL}", f"<|start|>assistant{FINAL}{{}}"),
    ):
        engine.answer = tokenizer.encode(f"hm<|end|>{written}<|im_end|>").ids
        whole = join_chunks(await answer(model, msgspec.structs.replace(asked, **changes)))
        constraint = engine.added[-1].constraint
        assert constraint is not None
        assert (constraint.after, constraint.opening) == ("<|end|>", opening)
        assert tokenizer.decode(engine.added[-1].spec.prompt.tolist()).endswith(
            "<|start|>assistant<|channel|>analysis<|message|>"
        )
        assert whole.reasoning == "hm"
        assert (whole.text, len(whole.tool_calls)) == (("", 1) if "tools" in changes else ("{}", 0))
