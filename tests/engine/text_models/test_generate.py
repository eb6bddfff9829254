"""What every text model does, whichever engine is behind it; see conftest.py."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import aclosing

import msgspec
import pytest

from charonia.core.drafts import DraftLimit
from charonia.core.errors import Cancelled, InvalidArgument, QueueFull, RequestTimeout, Unavailable
from charonia.core.metrics import Histogram
from charonia.core.request import (
    ChatMessage,
    Conversation,
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    GuidedDecoding,
    Prompt,
    TokenizeRequest,
    Usage,
    join_chunks,
)
from charonia.core.request_context import RequestContext
from charonia.core.sampling import SamplingParams
from charonia.engine.client.llm import LlmModel
from charonia.tokenization.tokenizer import Tokenizer

from ...waiting import until
from .conftest import Load, counted

LENGTH = 64
HUGE = SamplingParams(
    max_tokens=1, temperature=1e300, top_k=2**70, top_p=1e-300, stop_token_ids=(2**70,), seed=2**64 - 1
)
ENDLESS = {"max_tokens": LENGTH - 2, "ignore_eos": True}


def ask(prompt: Prompt, **sampling: object) -> GenerateRequest:
    return GenerateRequest(id="1", prompt=prompt, sampling=SamplingParams(**sampling))


async def generate(model: LlmModel, request: GenerateRequest) -> list[GenerateChunk]:
    with counted(model) as context:
        async with aclosing(model.generate(request, context)) as chunks:
            return [chunk async for chunk in chunks]


def text(chunks: list[GenerateChunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def waiting(model: LlmModel) -> int:
    return sum(model.client.state().waiting.values())


async def idle(model: LlmModel) -> None:
    """Return when nothing runs or waits, and the cache holds nothing for anybody."""
    await until(lambda: not (model.client.state().running or waiting(model) or model.stats().kv_tokens))


async def test_text_streams_out_with_its_usage(load: Load) -> None:
    model = await load()
    chunks = await generate(model, ask("w1 w2 w3", max_tokens=4))
    assert text(chunks) == " w4 w5 w6 w7"
    assert [token for chunk in chunks for token in chunk.token_ids] == [4, 5, 6, 7]
    assert chunks[-1].usage == Usage(prompt_tokens=3, completion_tokens=4)
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == [FinishReason.LENGTH]
    assert model.capabilities.text is model


async def test_every_kind_of_prompt(load: Load) -> None:
    model = await load()
    chat = Conversation((ChatMessage("user", "w5 w6"),))
    assert text(await generate(model, ask((20, 21), max_tokens=1))) == " w22"
    assert text(await generate(model, ask(chat, max_tokens=1))) == " w1"
    assert await model.tokenize(TokenizeRequest(prompt=chat)) == ([5, 6, 0], None)
    assert await model.tokenize(TokenizeRequest(prompt="w5 w6", with_strings=True)) == ([5, 6], ["w5", "w6"])
    assert await model.detokenize([5, 6]) == "w5 w6"
    for wrong in (100, -1, 2**70):
        with pytest.raises(InvalidArgument, match=f"tokens: token id {wrong} is outside the vocabulary of 100") as said:
            await model.detokenize([5, wrong])
        assert said.value.field == "tokens"


async def test_what_is_long_is_counted_up_to_a_bound(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("charonia.engine.client.llm._MIN_COUNTED", 300)
    model = await load()
    assert await model.tokenize(TokenizeRequest(prompt="w5 " * 300)) == ([5] * 300, None)
    assert await model.detokenize([5] * 300) == " ".join(["w5"] * 300)
    with pytest.raises(
        InvalidArgument, match="at most 300 tokens: the first 4800 characters of prompt are 1600 tokens"
    ):
        await model.tokenize(TokenizeRequest(prompt="w5 " * 2000))


async def test_a_prompt_may_be_all_that_is_wanted(load: Load) -> None:
    """Though an end token would have come next."""
    model = await load()
    for prompt in ("w1 w89", (1, 89)):
        request = GenerateRequest(id="1", prompt=prompt, sampling=SamplingParams(max_tokens=0), echo=True)
        with counted(model) as context:
            [chunk] = [chunk async for chunk in model.generate(request, context)]
        assert (chunk.text, chunk.token_ids, chunk.finish_reason) == ("w1 w89", (), FinishReason.LENGTH)
        assert (chunk.usage.prompt_tokens, chunk.usage.completion_tokens) == (2, 0)
        assert (context.summary.prompt, context.summary.generated) == (2, 0)


async def test_a_prompt_is_scored_or_refused(load: Load, engine: str) -> None:
    """The fake's ranks and logprobs say how far a token is from the one that it would have chosen."""
    model = await load()
    request = ask("w1 w2 w5 w6", max_tokens=2, prompt_logprobs=1)
    if engine != "core":
        with pytest.raises(InvalidArgument, match="prompt_logprobs"):
            await generate(model, request)
        return
    first, *others = await generate(model, request)
    assert [(token.text.strip(), token.rank) for token in first.prompt_logprobs] == [
        ("w1", 0),
        ("w2", 1),
        ("w5", 3),
        ("w6", 1),
    ]
    given = [token.given for token in first.prompt_logprobs if token.given]
    assert [(each.logprob, each.top[0].id) for each in given] == [(-1.0, 2), (-3.0, 3), (-1.0, 6)]
    assert not any(chunk.prompt_logprobs for chunk in others)
    assert text([first, *others]).strip() == "w7 w8"


async def test_where_a_text_ends(load: Load) -> None:
    model = await load()
    ends = await generate(model, ask("w88", max_tokens=None))
    assert (text(ends), ends[-1].finish_reason, ends[-1].usage.completion_tokens) == (" w89", FinishReason.STOP, 2)
    stopped = await generate(model, ask("w10", max_tokens=20, stop_token_ids=(12,)))
    assert (text(stopped), stopped[-1].finish_reason, stopped[-1].stop_reason) == (" w11", FinishReason.STOP, 12)
    kept = await generate(model, ask("w10", max_tokens=20, stop_token_ids=(12,), include_stop_str_in_output=True))
    assert text(kept) == " w11 w12"
    assert ends[-1].stop_reason is None
    ignored = await generate(model, ask("w88", max_tokens=3, ignore_eos=True))
    assert (text(ignored), ignored[-1].finish_reason) == (" w89 w90 w91", FinishReason.LENGTH)
    whole = await generate(model, ask("w1", max_tokens=None))
    assert whole[-1].usage == Usage(1, LENGTH - 1)


async def test_a_prompt_may_be_cut_to_its_end(load: Load) -> None:
    model = await load()
    many = tuple(each % 90 for each in range(9 * LENGTH))
    for prompt in (many, " ".join(f"w{each}" for each in many), Conversation((ChatMessage("user", "w5 " * 500),))):
        [*_, last] = chunks = await generate(model, ask(prompt, max_tokens=4, truncate_prompt_tokens=-1))
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (LENGTH - 4, 4)
        assert text(chunks).startswith(" w1 " if isinstance(prompt, Conversation) else f" w{many[-1] + 1} ")
    with counted(model) as context:
        request = GenerateRequest(
            id="1", prompt="w1 w2 w3", sampling=SamplingParams(max_tokens=1, truncate_prompt_tokens=2), echo=True
        )
        assert text([chunk async for chunk in model.generate(request, context)]) == "w2 w3 w4"
    with pytest.raises(InvalidArgument, match="at most the model's length of 64 tokens") as refusal:
        await generate(model, ask("w1", truncate_prompt_tokens=LENGTH + 1))
    assert refusal.value.field == "truncate_prompt_tokens"


async def test_a_stop_string_ends_the_text_and_the_sequence(load: Load) -> None:
    model = await load(step_seconds=0.01)
    chunks = await generate(model, ask("w1", max_tokens=60, stop=("w5 w6", "w50")))
    assert (text(chunks), chunks[-1].finish_reason) == (" w2 w3 w4 ", FinishReason.STOP)
    assert chunks[-1].usage == Usage(1, 5)
    await idle(model)
    assert (model.stats().success, model.stats().cancelled) == (1, 0)


async def test_the_last_chunk_comes_when_the_engine_was_told(load: Load) -> None:
    model = await load(step_seconds=0.01)
    request = ask("w1", max_tokens=60, stop=("w3",))
    with counted(model) as context:
        async with aclosing(model.generate(request, context)) as chunks:
            while (await anext(chunks)).finish_reason is None:
                pass
            await idle(model)
    assert model.stats().success == 1


async def test_requests_are_counted_by_how_they_ended(load: Load) -> None:
    model = await load(step_seconds=0.01)
    await generate(model, ask("w1", max_tokens=2))
    with counted(model) as context:
        async with aclosing(model.generate(ask("w1", max_tokens=40), context)) as chunks:
            await anext(chunks)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(generate(model, ask("w1", max_tokens=40, ignore_eos=True)), timeout=0.1)
    with pytest.raises(InvalidArgument):
        await generate(model, ask((500,)))
    stats = model.stats()
    assert (stats.ready, stats.success, stats.failure, stats.cancelled) == (True, 1, 1, 2)


async def test_refusals_name_the_field(load: Load) -> None:
    model = await load()
    too_long = "w1 " * LENGTH
    for request, field in [
        (ask((500,)), "prompt"),
        (ask((-1,)), "prompt"),
        (ask((2**70,)), "prompt"),
        (ask(too_long), "prompt"),
        (ask(too_long, max_tokens=None), "prompt"),
        (ask(""), "prompt"),
        (ask("w1", max_tokens=LENGTH), "max_tokens"),
        (ask("w1", max_tokens=2**70), "max_tokens"),
        (GenerateRequest(id="", prompt="w1", cache_salt="\ud800"), "cache_salt"),
        (ask(Conversation(())), "messages"),
        (GenerateRequest(id="", prompt="w1", adapter="a"), "lora_name"),
        (GenerateRequest(id="", prompt="w1", guided_decoding=GuidedDecoding("json")), "guided_decoding_guide_type"),
        (
            GenerateRequest(id="", prompt="w1", guided_decoding=GuidedDecoding("json", "", "response_format")),
            "response_format",
        ),
    ]:
        with pytest.raises(InvalidArgument, match=field) as refusal:
            await generate(model, request)
        assert refusal.value.field == field
    assert model.stats().failure == 13
    huge = GenerateRequest(id="", prompt="w1", priority=2**70, sampling=HUGE)
    assert text(await generate(model, huge)) == " w2"


async def test_what_was_predicted_is_counted_or_refused(load: Load, engine: str) -> None:
    model = await load()
    predicted = GenerateRequest(id="1", prompt="w1", prediction="w2 w3 w9 w5", sampling=SamplingParams(max_tokens=6))
    less = msgspec.structs.replace(predicted, drafts=DraftLimit(3))
    none = GenerateRequest(id="1", prompt="w1", drafts=DraftLimit(3, "speculative.k"))
    if engine != "core":
        for request, field in ((predicted, "prediction"), (none, r"speculative.k")):
            with pytest.raises(InvalidArgument, match="not supported") as refusal:
                await generate(model, request)
            assert refusal.value.field == field
        return
    for request in (predicted, less):
        chunks = await generate(model, request)
        assert text(chunks) == " w2 w3 w4 w5 w6 w7"
        usage = chunks[-1].usage
        assert (usage.accepted_prediction_tokens, usage.rejected_prediction_tokens) == (3, 1)
    with pytest.raises(
        InvalidArgument, match="must be at most 0, got 3: without a prediction nothing drafts"
    ) as refusal:
        await generate(model, none)
    assert refusal.value.field == "speculative.k"
    assert text(await generate(model, msgspec.structs.replace(none, drafts=DraftLimit(0))))
    with pytest.raises(InvalidArgument, match="must be at most 16, got 17"):
        await generate(model, msgspec.structs.replace(predicted, drafts=DraftLimit(17)))
    with pytest.raises(InvalidArgument, match="prediction are"):
        await generate(model, msgspec.structs.replace(predicted, prediction="w1 " * 1000))


async def test_logprobs_come_with_their_tokens(load: Load) -> None:
    model = await load()
    whole = join_chunks(await generate(model, ask("w1", max_tokens=2, logprobs=2)))
    assert [(logprob.id, logprob.text, logprob.logprob) for logprob in whole.logprobs] == [
        (2, " w2", -1.0),
        (3, " w3", -1.0),
    ]
    assert [(top.id, top.logprob) for top in whole.logprobs[0].top] == [(2, -1.0), (3, -2.0)]
    chosen = join_chunks(await generate(model, ask("w1", max_tokens=2, logprobs=0)))
    assert [(logprob.logprob, logprob.top) for logprob in chosen.logprobs] == [(-1.0, ()), (-1.0, ())]
    assert join_chunks(await generate(model, ask("w1", max_tokens=2))).logprobs == ()


async def test_a_reader_that_leaves_frees_everything(load: Load) -> None:
    model = await load(step_seconds=0.01)
    with counted(model) as context:
        async with aclosing(model.generate(ask("w1", **ENDLESS), context)) as chunks:
            await anext(chunks)
    await idle(model)
    assert model.stats().cancelled == 1


async def test_time_that_runs_out(load: Load) -> None:
    model = await load(step_seconds=0.02, max_num_seqs=1)
    begun = GenerateRequest(id="1", prompt="w1", sampling=SamplingParams(**ENDLESS), timeout=0.5)
    late = GenerateRequest(id="2", prompt="w1", sampling=SamplingParams(**ENDLESS), timeout=0.1)
    running = asyncio.create_task(generate(model, begun))
    await until(lambda: model.client.state().running == 1)
    with pytest.raises(RequestTimeout):
        await generate(model, late)
    chunks = await running
    assert chunks[-1].finish_reason is FinishReason.TIMEOUT
    assert text(chunks).startswith(" w2 w3")
    await idle(model)
    # A text that its time cut short counts as one that timed out, like one that never began.
    assert model.stats().failure == 2


async def test_a_full_queue_refuses_before_any_work(load: Load) -> None:
    model = await load(step_seconds=0.02, max_num_seqs=1, max_queued_requests=1)
    async with aclosing(model.generate(ask("w1", **ENDLESS), RequestContext("test"))) as running:
        await anext(running)
        second = asyncio.create_task(generate(model, ask("w5", max_tokens=1)))
        await until(lambda: waiting(model) == 1)
        with pytest.raises(QueueFull, match="max_queued_requests"):
            await generate(model, ask("w7", max_tokens=1))
    assert text(await second) == " w6"
    with pytest.raises(InvalidArgument, match="max_queued_requests"):
        await generate(model, GenerateRequest(id="", prompt="w1", choice_count=2))


async def test_the_urgent_go_first(load: Load) -> None:
    model = await load(step_seconds=0.01, max_num_seqs=1)
    ended: list[int] = []

    async def one(priority: int) -> None:
        request = GenerateRequest(id="", prompt="w1", sampling=SamplingParams(max_tokens=2), priority=priority)
        await generate(model, request)
        ended.append(priority)

    async with aclosing(model.generate(ask("w1", max_tokens=12), RequestContext("test"))) as running:
        await anext(running)
        tasks = [asyncio.create_task(one(priority)) for priority in (4, 2, 0)]
        await until(lambda: waiting(model) == len(tasks))
    await asyncio.gather(*tasks)
    assert ended == [0, 2, 4]


async def test_unloading_ends_what_runs_and_what_waits(load: Load) -> None:
    model = await load(step_seconds=0.02, max_num_seqs=1)
    tasks = [asyncio.create_task(generate(model, ask("w1", **ENDLESS))) for _ in range(2)]
    await until(lambda: bool(model.client.state().running and waiting(model)))
    await model.unload()
    for task in tasks:
        with pytest.raises(Unavailable):
            await asyncio.wait_for(task, timeout=10)
    assert not model.stats().ready
    with pytest.raises(Unavailable):
        await generate(model, ask("w1"))


@pytest.fixture
def tokenizing(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Whoever tokenizes a conversation waits for it."""
    go, read = threading.Event(), Tokenizer.prompt_ids

    def slowly(tokenizer: Tokenizer, prompt: Prompt, *how: object) -> list[int]:
        if isinstance(prompt, Conversation):
            assert go.wait(60)
        return read(tokenizer, prompt, *how)

    monkeypatch.setattr(Tokenizer, "prompt_ids", slowly)
    yield go
    go.set()


CHAT = Conversation((ChatMessage("user", "w5 w6"),))


async def test_a_reader_that_leaves_while_its_prompt_is_tokenized_stands_in_line_no_more(
    load: Load, tokenizing: threading.Event
) -> None:
    model = await load(max_queued_requests=1)
    reader = asyncio.create_task(generate(model, ask(CHAT)))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await generate(model, ask("w1"))
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert text(await generate(model, ask("w1", max_tokens=1))) == " w2"
    assert model.stats().cancelled == 1


async def test_time_that_runs_out_while_a_prompt_is_tokenized(load: Load, tokenizing: threading.Event) -> None:
    model = await load(max_queued_requests=1)
    late = GenerateRequest(id="1", prompt=CHAT, sampling=SamplingParams(max_tokens=1), timeout=0.01)
    with pytest.raises(RequestTimeout):
        await generate(model, late)
    assert text(await generate(model, ask("w1", max_tokens=1))) == " w2"
    assert (model.stats().failure, model.stats().cancelled) == (1, 0)


async def test_a_request_is_cancelled_while_its_prompt_is_tokenized(load: Load, tokenizing: threading.Event) -> None:
    model = await load(max_queued_requests=1)
    reader = asyncio.create_task(generate(model, ask(CHAT)))
    await asyncio.sleep(0)
    model.cancel("another")
    model.cancel("1")
    with pytest.raises(Cancelled):
        await reader
    assert text(await generate(model, ask("w1", max_tokens=1))) == " w2"
    assert model.stats().cancelled == 1


async def test_unloading_while_prompts_are_tokenized(load: Load, tokenizing: threading.Event) -> None:
    """More of them than there are threads."""
    model = await load()
    asking = [asyncio.create_task(generate(model, ask(CHAT))) for _ in range(3)]
    counting = [asyncio.create_task(model.tokenize(TokenizeRequest(prompt=CHAT))) for _ in range(3)]
    await asyncio.sleep(0)
    await model.unload()
    tokenizing.set()
    ends = await asyncio.gather(*asking, *counting, return_exceptions=True)
    assert all(isinstance(end, Unavailable) for end in ends[:3])
    assert ends[3:] == [([5, 6, 0], None)] * 3
    for late in (model.tokenize(TokenizeRequest(prompt=CHAT)), model.detokenize([5] * 300)):
        with pytest.raises(Unavailable, match="not loaded"):
            await late


async def test_what_is_measured(load: Load) -> None:
    model = await load()
    assert model.capabilities.measured is model
    await generate(model, ask("w1 w2 w3", max_tokens=4))
    await generate(model, ask("w1 w2 w3", max_tokens=4))
    found = {(reading.family, *reading.labels.values()): reading.value for reading in model.readings()}
    assert found["charonia_requests_total", "length", ""] == 2
    assert found["charonia_prompt_tokens_total", ""] == 6
    assert found["charonia_generation_tokens_total", ""] == 8
    assert found["charonia_prefix_cache_queries_total",] == 6
    for family in ("time_to_first_token", "queue", "prefill", "decode", "request"):
        histogram = found[f"charonia_{family}_seconds",]
        assert isinstance(histogram, Histogram)
        assert sum(histogram.counts) == 2, family
    statistics = model.statistics()
    assert (statistics.inference_count, statistics.execution_count) == (2, 2)
