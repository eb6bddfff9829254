"""A model over TensorRT-LLM: what is particular to it. What all text models do: text_models/."""

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from charonia.core.errors import CharoniaError, Internal, InvalidArgument, Unavailable, Unsupported
from charonia.core.metrics import Histogram
from charonia.core.model import ModelConfig
from charonia.core.request import FinishReason, GenerateChunk, GenerateRequest, GuidedDecoding, join_chunks
from charonia.core.request_context import RequestContext
from charonia.core.sampling import SamplingParams
from charonia.engine.client.llm import LlmModel
from charonia.extras.trtllm.build import tensorrt_llm_model, trtllm_engine_spec
from charonia.extras.trtllm.client import IterationStats
from charonia.extras.trtllm.options import TrtllmOptions
from charonia.telemetry.llm_metrics import LlmMetrics

from ...waiting import until

ENDLESS = {"max_tokens": 62, "ignore_eos": True}
Load = Callable[..., Awaitable[LlmModel]]


@pytest.fixture
async def load(words: Path, package: Any) -> AsyncIterator[Load]:
    loaded: list[LlmModel] = []

    async def load(step_seconds: float = 0.0, **options: Any) -> LlmModel:
        package.step_seconds = step_seconds
        loaded.append(LlmModel("words", "1", trtllm_engine_spec(str(words), TrtllmOptions(**options))))
        await loaded[-1].load()
        return loaded[-1]

    yield load
    for model in loaded:
        await model.unload()
    assert all(llm.down for llm in package.made)


def ask(prompt: str, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(id="1", prompt=prompt, sampling=SamplingParams(**sampling))


def of_tenant(name: str = "") -> RequestContext:
    context = RequestContext("test")
    context.tenant = name
    return context


async def generate(model: LlmModel, request: GenerateRequest, tenant: str = "") -> GenerateChunk:
    async with aclosing(model.generate(request, of_tenant(tenant))) as chunks:
        return join_chunks([chunk async for chunk in chunks])


def adapters(directory: Path, *names: str) -> str:
    for name in names:
        (directory / name).mkdir()
        (directory / name / "adapter_config.json").write_text('{"r": 8, "target_modules": ["q_proj"]}')
    return json.dumps({name: str(directory / name) for name in names})


async def test_one_call_for_each_sequence_with_everything_in_it(load: Load, package: Any, tmp_path: Path) -> None:
    model = await load(lora_modules=adapters(tmp_path, "x", "y"), guided_decoding_backend="xgrammar")
    request = GenerateRequest(
        id="1", prompt="w1 w2", cache_salt="s", adapter="y", guided_decoding=GuidedDecoding("regex", "w.*"),
        sampling=SamplingParams(max_tokens=3, seed=5),
    )  # fmt: skip
    assert (await generate(model, request, "t")).text == " w3 w4 w5"
    [llm] = package.made
    _warm_up, call = llm.calls
    assert (call["inputs"], call["streaming"], call["cache_salt"]) == ([1, 2], True, "1:ts")
    assert call["lora_request"].given == {"lora_name": "y", "lora_int_id": 2, "lora_path": f"{tmp_path}/y"}
    assert (call["sampling_params"].guided_decoding.regex, call["sampling_params"].seed) == ("w.*", 5)


async def test_adapters_are_asked_for_as_models_are(load: Load, tmp_path: Path) -> None:
    model = await load(lora_modules=adapters(tmp_path, "x", "y"))
    assert model.adapters.adapters is not None
    assert {name: adapter.path for name, adapter in model.adapters.adapters.items()} == {
        name: f"{tmp_path}/{name}" for name in "xy"
    }
    context = RequestContext("test", adapter="y")
    async with aclosing(model.generate(GenerateRequest(id="", prompt="w1"), context)) as chunks:
        assert [chunk async for chunk in chunks]
    with pytest.raises(InvalidArgument, match="'y': ask for the model itself"):
        await anext(model.generate(GenerateRequest(id="", prompt="w1", adapter="x"), context))
    for change in (model.adapters.load_adapter("z", "/z"), model.adapters.unload_adapter("x")):
        with pytest.raises(InvalidArgument, match="takes no adapters while it serves"):
            await change
    assert (await load()).adapters.adapters is None


async def test_an_adapter_that_is_not_there(load: Load, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="lora_modules: /nowhere of 'a' has no adapter_config") as refusal:
        await load(lora_modules='{"a": "/nowhere"}')
    assert refusal.value.field == "lora_modules"
    model = await load(lora_modules=adapters(tmp_path, "x"))
    with pytest.raises(InvalidArgument, match="lora_name: no adapter 'z'; known are x") as refusal:
        await generate(model, GenerateRequest(id="", prompt="w1", adapter="z"))
    assert refusal.value.field == "lora_name"


async def test_no_more_are_handed_over_than_it_runs_at_once(load: Load, package: Any) -> None:
    model = await load(step_seconds=0.001, max_num_seqs=3)
    await asyncio.gather(*(generate(model, ask(f"w{key}", max_tokens=6)) for key in range(20, 32)))
    [llm] = package.made
    assert (llm.most, len(llm.calls), llm.running) == (3, 13, [])


async def test_an_abort_is_told_once_and_what_comes_late_is_not_read(load: Load, package: Any) -> None:
    model = await load(step_seconds=0.002)
    async with aclosing(model.generate(ask("w1", **ENDLESS), of_tenant())) as chunks:
        await anext(chunks)
    _warm_up, result = package.made[0].results
    await until(lambda: result.finished)
    assert (result.aborts, result.outputs[0].finish_reason) == (1, "cancelled")
    assert (await generate(model, ask("w5", max_tokens=1))).text == " w6"


async def test_a_stop_string_aborts_and_an_end_does_not(load: Load, package: Any) -> None:
    model = await load(step_seconds=0.002)
    stopped = await generate(model, ask("w1", max_tokens=60, stop=("w5 w6",)))
    assert (stopped.text, stopped.finish_reason) == (" w2 w3 w4 ", FinishReason.STOP)
    await generate(model, ask("w1", max_tokens=3))
    await generate(model, ask("w88"))
    results = package.made[0].results[1:]
    await until(lambda: all(result.finished for result in results))
    assert [result.aborts for result in results] == [1, 0, 0]


@pytest.mark.parametrize("hides_end", [False, True])
async def test_a_minimum_holds_back_every_stop_token(load: Load, package: Any, hides_end: bool) -> None:
    package.hides_end = hides_end
    model = await load()
    asked = {"max_tokens": 40, "min_tokens": 4, "stop_token_ids": (5, 8)}
    whole = await generate(model, ask("w3", **asked))
    assert (whole.token_ids, whole.finish_reason) == ((4, 5, 6, 7, 8), FinishReason.STOP)
    assert (whole.text, whole.usage.completion_tokens) == (" w4 w5 w6 w7", 5)
    ends = await generate(model, ask("w88", min_tokens=1))
    assert (ends.text, ends.token_ids, ends.finish_reason) == (" w89", (89, 90), FinishReason.STOP)


async def test_a_slow_reader_holds_nobody_up(load: Load, package: Any) -> None:
    model = await load(max_num_seqs=1)
    async with aclosing(model.generate(ask("w1", max_tokens=30), of_tenant())) as slow:
        first = await anext(slow)
        assert (await generate(model, ask("w50", max_tokens=1))).text == " w51"
        rest = [chunk async for chunk in slow]
    whole = join_chunks([first, *rest])
    assert whole.token_ids == tuple(range(2, 32))
    assert len(rest) < 5


async def test_a_banned_word_of_several_tokens_is_given_as_text(load: Load, package: Any) -> None:
    model = await load(sampler_type="TRTLLMSampler")
    await generate(model, ask("w1", max_tokens=1, bad_words=("w7", "w8 w9")))
    params = package.made[0].calls[-1]["sampling_params"]
    assert (params.bad_token_ids, params.bad, params.end_id) == ([7], ["w8 w9"], None)


async def test_an_error_of_one_request_is_its_own(load: Load, fake: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = await load(step_seconds=0.002)
    async with aclosing(model.generate(ask("w20", **ENDLESS), of_tenant())) as other:
        await anext(other)
        with pytest.raises(Internal, match="TensorRT-LLM: no"):
            await generate(model, ask(f"w{fake.BROKEN}"))
        await anext(other)
    assert model.stats().ready
    assert model.client.state().running == 0
    assert not caplog.records


async def test_a_broken_engine_ends_everything_and_is_not_ready(
    load: Load, fake: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = await load(step_seconds=0.002, max_num_seqs=2)
    tasks = [asyncio.create_task(generate(model, ask("w20", **ENDLESS))) for _ in range(2)]
    await until(lambda: model.client.state().running == 2)
    tasks[0].cancel()
    with caplog.at_level(logging.ERROR), pytest.raises(Unavailable, match="a rank died"):
        await generate(model, ask(f"w{fake.BROKEN + 1}"))
    with pytest.raises(Unavailable, match="TensorRT-LLM broke: a rank died"):
        await tasks[1]
    assert not model.stats().ready
    with pytest.raises(Unavailable, match="a rank died"):
        await generate(model, ask("w1"))
    assert [record.message for record in caplog.records] == ["TensorRT-LLM broke"]


async def test_an_engine_that_shuts_down_by_itself_is_lost(load: Load, package: Any) -> None:
    model = await load()
    package.made[0].down = True
    with pytest.raises(Unavailable, match="TensorRT-LLM broke: LLM is shutting down"):
        await generate(model, ask("w1"))
    assert not model.stats().ready


async def test_a_request_that_ends_without_a_word(
    load: Load, package: Any, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await load()

    async def nothing(result: Any) -> Any:
        raise StopAsyncIteration

    monkeypatch.setattr(fake.Result, "__anext__", nothing)
    with pytest.raises(Internal, match="without a word"):
        await generate(model, ask("w1"))
    assert model.client.state().running == 0


async def test_what_it_refuses_is_the_requests_fault(load: Load, package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = await load()

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ValueError("draft tokens do not go with min_p")

    monkeypatch.setattr(type(package.made[0]), "generate_async", refuse)
    with pytest.raises(InvalidArgument, match="TensorRT-LLM refuses the request: draft tokens"):
        await generate(model, ask("w1"))
    assert model.stats().ready


async def test_what_it_does_not_take_breaks_no_engine(
    load: Load, package: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await load(lora_modules=adapters(tmp_path, "x"))

    def refuse(**arguments: Any) -> None:
        raise ValueError(f"lora_path ({arguments['lora_path']}) does not exist.")

    package.place("tensorrt_llm.llmapi.LoRARequest", refuse)
    with pytest.raises(InvalidArgument, match="does not exist"):
        await generate(model, GenerateRequest(id="", prompt="w1", adapter="x"))
    assert model.stats().ready


async def test_what_can_never_be_satisfied_does_not_wait_to_hear_so(load: Load) -> None:
    model = await load(step_seconds=0.002, max_num_seqs=1)
    async with aclosing(model.generate(ask("w20", **ENDLESS), of_tenant())) as running:
        await anext(running)
        with pytest.raises(InvalidArgument, match="maximum context length is 64"):
            await generate(model, ask("w1", max_tokens=64))
        assert model.client.state().running == 1
        assert sum(model.client.state().waiting.values()) == 0


async def test_tenants_and_salts_share_no_prefix(load: Load, package: Any) -> None:
    model = await load()
    prompt = "w1 w2 w3 w4"
    cached = []
    for tenant, salt in [("a", ""), ("a", ""), ("b", ""), ("a", "x"), ("ax", ""), ("", "ax"), ("", ""), ("", "")]:
        request = GenerateRequest(id="", prompt=prompt, cache_salt=salt, sampling=SamplingParams(max_tokens=1))
        cached.append((await generate(model, request, tenant)).usage.cached_tokens)
    assert cached == [0, 3, 0, 0, 0, 0, 0, 3]
    state = model.client.state()
    assert (state.totals.prefix_queries, state.totals.prefix_hits) == (32, 6)


# Statistics


def test_iterations_are_our_steps() -> None:
    metrics = LlmMetrics()
    iterations = IterationStats(metrics)
    batching = {"numScheduledRequests": 3, "numGenRequests": 2, "numCtxTokens": 40, "numPausedRequests": 1}
    cache = {"usedNumBlocks": 5, "maxNumBlocks": 10, "tokensPerBlock": 32}
    iterations.record_iteration({"iterLatencyMS": 20.0, "kvCacheStats": cache, "inflightBatchingStats": batching})
    iterations.record_iteration({"iterLatencyMS": 1.0, "kvCacheStats": cache, "inflightBatchingStats": {}})
    assert (iterations.kv_tokens, iterations.totals.preemptions) == ((160, 320), 1)
    assert [sum_of(each) for each in (metrics.step, metrics.step_tokens, metrics.step_sequences)] == [
        (1, 0.02), (1, 42.0), (1, 3.0)
    ]  # fmt: skip
    iterations.record_iteration({})
    assert iterations.kv_tokens == (0, 0)


def sum_of(histogram: Histogram) -> tuple[int, float]:
    return sum(histogram.counts), histogram.sum


async def test_statistics_are_asked_for_and_their_end_breaks_nothing(
    load: Load, package: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = await load()
    await generate(model, ask("w1", max_tokens=5))
    found = package.made[0]
    metrics = LlmMetrics()
    iterations = IterationStats(metrics)
    following = asyncio.create_task(iterations.follow(found, every=0.001))
    await until(lambda: sum(metrics.step.counts) == 6)
    found.records.append({"inflightBatchingStats": 3})
    await following
    assert [record.message for record in caplog.records] == ["TensorRT-LLM gives no statistics any more"]


# Loading


async def test_without_the_package_the_model_names_the_extra(words: Path) -> None:
    model = tensorrt_llm_model(ModelConfig("words", "1", "tensorrtllm"), str(words), {}, lambda *progress: None)
    assert isinstance(model, LlmModel)
    assert model.config.backend == "tensorrtllm"
    with pytest.raises(Unsupported, match=r"\.\[tensorrt-llm\]"):
        await model.load()


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (ValueError("max_batch_size is too large"), InvalidArgument, "refuses the model: max_batch_size"),
        (RuntimeError("Only 1 GPUs are available"), Unavailable, "cannot load the model: Only 1 GPUs"),
    ],
)
async def test_a_model_that_cannot_be_made(
    load: Load, package: Any, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[CharoniaError], says: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(package.modules["tensorrt_llm"], "LLM", fail)
    with pytest.raises(kind, match=says):
        await load()


async def test_a_model_that_generates_nothing_is_shut_down(
    load: Load, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def break_down(result: Any) -> None:
        result._queue.put_nowait(RuntimeError("CUDA error"))

    monkeypatch.setattr(fake.Result, "_generate", break_down)
    with pytest.raises(Unavailable, match="generates nothing: CUDA error"):
        await load()


async def test_a_load_that_is_given_up_is_shut_down_when_it_is_done(words: Path, package: Any) -> None:
    model = LlmModel("words", "1", trtllm_engine_spec(str(words), TrtllmOptions()))
    making, go_on = threading.Event(), threading.Event()
    real = package.modules["tensorrt_llm"].LLM

    def slow(**kwargs: Any) -> Any:
        making.set()
        go_on.wait(10)
        return real(**kwargs)

    package.place("tensorrt_llm.LLM", slow)
    loading = asyncio.create_task(model.load())
    await until(making.is_set)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert package.made == []
    go_on.set()
    await until(lambda: len(package.made) == 1 and package.made[0].down)


async def test_progress_is_told(words: Path, package: Any) -> None:
    told: list[tuple[Any, ...]] = []
    model = tensorrt_llm_model(
        ModelConfig("words", "1", "tensorrtllm"), str(words), {"max_num_seqs": "2"}, lambda *each: told.append(each)
    )
    await model.load()
    await model.unload()
    assert [(phase, done, detail) for phase, done, _, detail in told] == [
        ("TensorRT-LLM", 0.0, ""), ("TensorRT-LLM", 1.0, "1.2.0")
    ]  # fmt: skip
