"""What every text model does, whichever engine is behind it: our own core and TensorRT-LLM, in two versions.

Real tokenizer, real core process with the fake executor; a fake `tensorrt_llm` with the signatures of its contract. The
next token is the last one plus one.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from charonia.core.errors import InvalidArgument, QueueFull, RequestTimeout, Unavailable
from charonia.core.exchange import Exchange, serving
from charonia.core.metrics import Histogram
from charonia.core.model import MeasuredModel, TextModel
from charonia.core.request import (
    Conversation,
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    Guide,
    InferRequest,
    InferResponse,
    Message,
    Prompt,
    SamplingParams,
    TokenizeRequest,
    Usage,
)
from charonia.core.tensor import Tensor
from charonia.engine.config import EngineConfig, FakeConfig
from charonia.engine.llm import LlmModel
from charonia.engine.trtllm.build import driver
from charonia.engine.trtllm.options import TrtllmOptions
from charonia.scheduler.config import SchedulerConfig

LENGTH = 64
ENGINES = ("core", "1.2.0", "1.3.0")
HUGE = SamplingParams(
    max_tokens=1, temperature=1e300, top_k=2**70, top_p=1e-300, stop_token_ids=(2**70,), seed=2**64 - 1
)
ENDLESS = {"max_tokens": LENGTH - 2, "ignore_eos": True}
Load = Callable[..., Awaitable[LlmModel]]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def load(
    engine: str,
    words: Path,
    sibling: Callable[[str], ModuleType],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Load]:
    sockets = tmp_path_factory.mktemp("s")
    monkeypatch.setattr(tempfile, "tempdir", str(sockets))
    loaded: list[LlmModel] = []

    def ours(step_seconds: float, max_num_seqs: int, **limits: float) -> LlmModel:
        fake = FakeConfig(vocab_size=100, max_model_len=LENGTH, step_seconds=step_seconds)
        scheduler = SchedulerConfig(max_num_seqs=max_num_seqs)
        config = EngineConfig(model=str(words), executor="fake", fake=fake, scheduler=scheduler, **limits)
        return LlmModel("words", "1", config)

    def theirs(step_seconds: float, max_num_seqs: int, **limits: float) -> LlmModel:
        monkeypatch.setenv("TRTLLM_NO_USAGE_STATS", "1")
        package = sibling("engine/trtllm/fake.py").FakePackage(engine).install(monkeypatch)
        package.step_seconds = step_seconds
        return LlmModel("words", "1", driver(str(words), TrtllmOptions(max_num_seqs=max_num_seqs, **limits)))

    async def load(step_seconds: float = 0.0, max_num_seqs: int = 8, **limits: float) -> LlmModel:
        make = ours if engine == "core" else theirs
        loaded.append(make(step_seconds, max_num_seqs, **limits))
        await loaded[-1].load()
        return loaded[-1]

    yield load
    for model in loaded:
        await model.unload()
    assert list(sockets.iterdir()) == []


def ask(prompt: Prompt, **sampling: object) -> GenerateRequest:
    return GenerateRequest(id="1", prompt=prompt, sampling=SamplingParams(**sampling))


@contextmanager
def counted(model: LlmModel) -> Iterator[Exchange]:
    """A request of the model, counted as the hub would."""
    exchange = Exchange("test")
    try:
        with serving(exchange):
            yield exchange
    finally:
        model.count(exchange)


async def generate(model: LlmModel, request: GenerateRequest) -> list[GenerateChunk]:
    with counted(model):
        async with aclosing(model.generate(request)) as chunks:
            return [chunk async for chunk in chunks]


def text(chunks: list[GenerateChunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def question(parameters: dict[str, object] | None = None, **inputs: object) -> InferRequest:
    datatypes = {"text_input": "BYTES", "input_ids": "INT32", "stream": "BOOL", "sampling_parameters": "BYTES"}
    tensors = {name: Tensor.of(name, datatypes[name], value) for name, value in inputs.items()}
    return InferRequest(id="1", inputs=tensors, parameters=parameters or {})


async def infer(model: LlmModel, request: InferRequest) -> list[dict[str, object]]:
    async with aclosing(model.infer(request)) as responses:
        return [plain(response) async for response in responses]


def plain(response: InferResponse) -> dict[str, object]:
    return {tensor.name: tensor.data.tolist() for tensor in response.outputs}


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


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
    assert isinstance(model, TextModel)


async def test_every_kind_of_prompt(load: Load) -> None:
    model = await load()
    chat = Conversation((Message("user", "w5 w6"),))
    assert text(await generate(model, ask((20, 21), max_tokens=1))) == " w22"
    assert text(await generate(model, ask(chat, max_tokens=1))) == " w1"
    assert await model.tokenize(TokenizeRequest(prompt=chat)) == [5, 6, 0]
    assert await model.detokenize([5, 6]) == "w5 w6"
    for wrong in (100, -1, 2**70):
        with pytest.raises(InvalidArgument, match=f"tokens: token id {wrong} is outside the vocabulary of 100") as said:
            await model.detokenize([5, wrong])
        assert said.value.field == "tokens"


async def test_where_a_text_ends(load: Load) -> None:
    model = await load()
    ends = await generate(model, ask("w88", max_tokens=None))
    assert (text(ends), ends[-1].finish_reason, ends[-1].usage.completion_tokens) == (" w89", FinishReason.STOP, 2)
    stopped = await generate(model, ask("w10", max_tokens=20, stop_token_ids=(12,)))
    assert (text(stopped), stopped[-1].finish_reason) == (" w11", FinishReason.STOP)
    ignored = await generate(model, ask("w88", max_tokens=3, ignore_eos=True))
    assert (text(ignored), ignored[-1].finish_reason) == (" w89 w90 w91", FinishReason.LENGTH)
    whole = await generate(model, ask("w1", max_tokens=None))
    assert whole[-1].usage == Usage(1, LENGTH - 1)


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
    with counted(model):
        async with aclosing(model.generate(request)) as chunks:
            while (await anext(chunks)).finish_reason is None:
                pass
            await idle(model)
    assert model.stats().success == 1


async def test_several_answers_to_one_question(load: Load) -> None:
    model = await load()
    wanted = {"n": 2, "max_tokens": 2, "return_finish_reason": True, "exclude_input_in_output": False}
    [answer] = await infer(model, question(wanted, text_input=[b"w1"]))
    assert answer == {"text_output": [b"w1 w2 w3"] * 2, "finish_reason": [b"length"] * 2}
    with pytest.raises(InvalidArgument) as refusal:
        await infer(model, question(wanted | {"exclude_input_in_output": True}, text_input=[b"w1"], stream=[True]))
    assert refusal.value.field == "n"
    with pytest.raises(InvalidArgument, match="vocabulary"):
        await infer(model, question({"n": 3}, input_ids=[500]))


async def test_several_answers_are_one_request(load: Load) -> None:
    model = await load()
    with counted(model) as exchange:
        await infer(model, question({"n": 3, "max_tokens": 2}, text_input=[b"w1 w2"]))
    summary = exchange.summary
    assert (summary.choices, summary.prompt, summary.generated) == (3, 2, 6)
    assert model.stats().success == 1


async def test_requests_are_counted_by_how_they_ended(load: Load) -> None:
    model = await load(step_seconds=0.01)
    await generate(model, ask("w1", max_tokens=2))
    with counted(model):
        async with aclosing(model.generate(ask("w1", max_tokens=40))) as chunks:
            await anext(chunks)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(generate(model, ask("w1", max_tokens=40, ignore_eos=True)), timeout=0.1)
    with pytest.raises(InvalidArgument):
        await generate(model, ask((500,)))
    stats = model.stats()
    assert (stats.ready, stats.success, stats.failure, stats.cancelled) == (True, 1, 1, 2)


async def test_a_unary_question_has_one_answer(load: Load) -> None:
    model = await load()
    assert await infer(model, question({"max_tokens": 3}, text_input=[b"w1"])) == [{"text_output": [b" w2 w3 w4"]}]
    wanted = {"max_tokens": 2, "return_finish_reason": True, "return_num_input_tokens": True, "return_output_ids": True}
    [answer] = await infer(model, question({**wanted, "return_num_output_tokens": True}, input_ids=[7, 8]))
    assert answer == {
        "text_output": [b" w9 w10"],
        "finish_reason": [b"length"],
        "num_input_tokens": [2],
        "num_output_tokens": [2],
        "output_ids": [9, 10],
    }


async def test_the_prompt_is_echoed_when_asked_for(load: Load) -> None:
    model = await load()
    echo = {"max_tokens": 2, "exclude_input_in_output": False}
    assert await infer(model, question(echo, text_input=[b"w1"])) == [{"text_output": [b"w1 w2 w3"]}]
    assert await infer(model, question(echo, input_ids=[1])) == [{"text_output": [b"w1 w2 w3"]}]
    with pytest.raises(InvalidArgument, match="exclude_input_in_output"):
        await infer(model, question(echo, text_input=[b"w1"], stream=[True]))


async def test_a_streamed_question_has_an_answer_per_step(load: Load) -> None:
    model = await load()
    request = question({"max_tokens": 4, "return_finish_reason": True}, text_input=[b"w1"], stream=[True])
    answers = await infer(model, request)
    assert b"".join(answer["text_output"][0] for answer in answers) == b" w2 w3 w4 w5"
    assert [answer["finish_reason"] for answer in answers] == [[b""]] * (len(answers) - 1) + [[b"length"]]


async def test_wanted_outputs_may_be_named(load: Load) -> None:
    model = await load()
    request = InferRequest(
        inputs={"text_input": Tensor.of("text_input", "BYTES", [b"w1"])},
        outputs=("num_output_tokens", "text_output"),
        parameters={"max_tokens": 1},
    )
    assert list((await infer(model, request))[0].items()) == [("num_output_tokens", [1]), ("text_output", [b" w2"])]


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
        (GenerateRequest(id="", prompt="w1", guide=Guide("json")), "guided_decoding_guide_type"),
    ]:
        with pytest.raises(InvalidArgument, match=field) as refusal:
            await generate(model, request)
        assert refusal.value.field == field
    assert model.stats().failure == 12
    huge = GenerateRequest(id="", prompt="w1", priority=2**70, sampling=HUGE)
    assert text(await generate(model, huge)) == " w2"


async def test_a_reader_that_leaves_frees_everything(load: Load) -> None:
    model = await load(step_seconds=0.01)
    with counted(model):
        async with aclosing(model.generate(ask("w1", **ENDLESS))) as chunks:
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
    async with aclosing(model.generate(ask("w1", **ENDLESS))) as running:
        await anext(running)
        second = asyncio.create_task(generate(model, ask("w5", max_tokens=1)))
        await until(lambda: waiting(model) == 1)
        with pytest.raises(QueueFull, match="max_queued_requests"):
            await generate(model, ask("w7", max_tokens=1))
    assert text(await second) == " w6"
    with pytest.raises(InvalidArgument, match="max_queued_requests"):
        await generate(model, GenerateRequest(id="", prompt="w1", choices=2))


async def test_the_urgent_go_first(load: Load) -> None:
    model = await load(step_seconds=0.01, max_num_seqs=1)
    ended: list[int] = []

    async def one(priority: int) -> None:
        request = GenerateRequest(id="", prompt="w1", sampling=SamplingParams(max_tokens=2), priority=priority)
        await generate(model, request)
        ended.append(priority)

    async with aclosing(model.generate(ask("w1", max_tokens=12))) as running:
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


async def test_what_is_measured(load: Load) -> None:
    model = await load()
    assert isinstance(model, MeasuredModel)
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
