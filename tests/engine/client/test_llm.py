"""The language model over our own engine: what is particular to it. What all text models do: text_models/."""

import subprocess
import sys
from math import inf
from pathlib import Path

import msgspec
import pytest

from charonia.core.errors import InvalidArgument, NotFound, Unavailable
from charonia.core.request import GenerateRequest
from charonia.core.request_context import RequestContext
from charonia.core.sampling import SamplingParams
from charonia.engine.client.add_request import build_add_request
from charonia.engine.client.client import own_engine_spec
from charonia.engine.client.engine import EngineSpec
from charonia.engine.client.llm import LlmModel
from charonia.engine.config import EngineConfig, LoraConfig
from charonia.engine.core.messages import AddRequest, CoreReady, decode_tokens, encode_tokens
from charonia.tokenization.generation_defaults import GenerationDefaults

HUGE = SamplingParams(
    max_tokens=1, temperature=1e300, top_k=2**70, top_p=1e-300, stop_token_ids=(2**70,), seed=2**64 - 1
)


def test_numbers_that_no_device_can_hold_are_clipped_to_what_they_mean() -> None:
    request = GenerateRequest(id="", prompt="", priority=2**70, sampling=HUGE)
    asked = build_add_request(
        request,
        RequestContext("test"),
        [1],
        GenerationDefaults((7,)),
        CoreReady(vocab_size=100, max_model_len=8, block_size=4, blocks=2),
    ).spec
    assert (asked.sampling.temperature, asked.sampling.top_k, asked.sampling.top_p) == (1e6, 100, 1e-6)
    assert (asked.stop_token_ids, asked.priority) == ({7}, 2**16)


def test_requests_that_no_client_waits_for_are_of_the_lowest_class_and_have_time() -> None:
    ready = CoreReady(vocab_size=100, max_model_len=8, block_size=4, blocks=2)
    request = GenerateRequest(id="", prompt="", priority=3, sampling=SamplingParams(max_tokens=1))
    context = RequestContext("test", background=True)
    for each, wanted in (
        (context, (2**16, 1e9)),
        (context.child("test"), (2**16, 1e9)),
        (RequestContext("test"), (3, 0)),
    ):
        made = build_add_request(request, each, [1], GenerationDefaults(()), ready)
        assert (made.spec.priority, made.timeout) == wanted


def test_targets_cross_in_seconds_and_requests_that_no_client_waits_for_have_none_to_keep() -> None:
    ready = CoreReady(vocab_size=100, max_model_len=8, block_size=4, blocks=2)
    for context, targets, wanted in (
        (RequestContext("test"), {"target_ttft_ms": 500.0, "target_itl_ms": 20.0}, (0.5, 0.02)),
        (RequestContext("test"), {}, (None, None)),
        (RequestContext("test", background=True), {"target_ttft_ms": 500.0}, (inf, inf)),
    ):
        request = GenerateRequest(id="", prompt="", sampling=SamplingParams(max_tokens=1), **targets)
        made = build_add_request(request, context, [1], GenerationDefaults(()), ready)
        content = msgspec.msgpack.encode(made, enc_hook=encode_tokens)
        sent = msgspec.msgpack.decode(content, type=AddRequest, dec_hook=decode_tokens).spec
        assert (sent.target_ttft, sent.target_itl) == wanted


@pytest.mark.parametrize("name", ["target_ttft_ms", "target_itl_ms"])
def test_targets_are_for_tenants_that_are_named(name: str) -> None:
    request = GenerateRequest(id="", prompt="", **{name: 100.0})
    for tenants, allowed in ((("alpha",), {"alpha"}), (("*",), {"alpha", ""}), ((), set[str]())):
        spec = own_engine_spec(EngineConfig(model="nowhere", target_tenants=tenants))
        for tenant in ("alpha", ""):
            if tenant in allowed:
                spec.check_request(request, tenant)
                continue
            with pytest.raises(InvalidArgument, match="--target-tenants") as refusal:
                spec.check_request(request, tenant)
            assert refusal.value.field == name
    with pytest.raises(InvalidArgument, match="not supported"):
        EngineSpec("other", "nowhere", connect=lambda *_: None).check_request(request, "alpha")


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), 1e12])
def test_a_target_is_a_time(value: float) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        GenerateRequest(id="", prompt="", target_ttft_ms=value)
    assert refusal.value.field == "target_ttft_ms"


@pytest.mark.parametrize("seed", [None, -1])
def test_an_unseeded_request_draws_its_own_seed(seed: int | None) -> None:
    request = GenerateRequest(id="", prompt="", sampling=SamplingParams(max_tokens=1, seed=seed))
    ready = CoreReady(vocab_size=100, max_model_len=8, block_size=4, blocks=2)
    seeds = {
        build_add_request(request, RequestContext("test"), [1], GenerationDefaults(()), ready).spec.sampling.seed
        for _ in range(9)
    }
    assert len(seeds) == 9


async def test_it_describes_itself_completed() -> None:
    config = LlmModel("words", "3", EngineConfig(model="nowhere")).config
    assert (config.name, config.version, config.backend, config.platform) == ("words", "3", "charonia", "")
    assert config.decoupled
    assert config.max_batch_size == 0
    assert [spec.name for spec in config.inputs] == ["text_input", "input_ids", "stream", "sampling_parameters"]
    assert all(spec.optional for spec in config.inputs)
    assert config.outputs[0].name == "text_output"


async def test_it_fails_clearly_when_it_cannot_load(tmp_path: Path) -> None:
    model = LlmModel("words", "1", EngineConfig(model=str(tmp_path), executor="fake"))
    with pytest.raises(NotFound, match=r"tokenizer\.json"):
        await model.load()
    with pytest.raises(Unavailable, match="words"):
        await anext(model.generate(GenerateRequest(id="", prompt="w1"), RequestContext("test")))
    await model.unload()


def test_leaves_torch_to_the_core() -> None:
    check = "import charonia.engine.client.llm, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers"} & set(loaded)


async def test_a_tokenizer_that_is_not_there_is_named(words: Path) -> None:
    model = LlmModel("m", "1", EngineConfig(model=str(words), tokenizer="/nowhere", executor="fake"))
    with pytest.raises(NotFound, match=r"^tokenizer: there is no directory '/nowhere'") as refused:
        await model.load()
    assert refused.value.field == "tokenizer"


async def test_adapters_are_found_before_the_engine_starts(words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lora = LoraConfig(modules={"sql": "/nowhere"})
    model = LlmModel("m", "1", EngineConfig(model=str(words), lora=lora, executor="fake"))
    monkeypatch.setattr(model.client, "start", None)
    with pytest.raises(NotFound, match=r"^lora_modules: 'sql': there is no directory '/nowhere'") as refused:
        await model.load()
    assert refused.value.field == "lora_modules"
