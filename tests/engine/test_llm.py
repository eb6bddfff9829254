"""A text model from end to end: real tokenizer, real core process, fake executor (the next token is last + 1)."""

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from charonia.core.errors import InvalidArgument, NotFound, Unavailable
from charonia.core.exchange import Exchange, serving
from charonia.core.model import TextModel
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
from charonia.engine.addition import addition
from charonia.engine.config import EngineConfig, FakeConfig
from charonia.engine.llm import LlmModel
from charonia.engine.messages import Ready
from charonia.tokenization.generation import GenerationDefaults

LENGTH = 64
EOS = 90
HUGE = SamplingParams(
    max_tokens=1, temperature=1e300, top_k=2**70, top_p=1e-300, stop_token_ids=(2**70,), seed=2**64 - 1
)
Load = Callable[..., Awaitable[LlmModel]]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without weights, whose token 7 is the word w7."""
    directory = tmp_path_factory.mktemp("words")
    tokenizer = Tokenizer(models.WordLevel({f"w{token}": token for token in range(100)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"eos_token_id": EOS}))
    (directory / "chat_template.jinja").write_text("{{ messages[-1].content }} w0")
    return directory


@pytest.fixture
async def load(
    words: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Load]:
    sockets = tmp_path_factory.mktemp("s")
    monkeypatch.setattr(tempfile, "tempdir", str(sockets))
    loaded: list[LlmModel] = []

    async def load(step_seconds: float = 0.0, model: Path = words) -> LlmModel:
        fake = FakeConfig(vocab_size=100, max_model_len=LENGTH, step_seconds=step_seconds)
        loaded.append(LlmModel("words", "1", EngineConfig(model=str(model), executor="fake", fake=fake)))
        await loaded[-1].load()
        return loaded[-1]

    yield load
    for model in loaded:
        await model.unload()
    assert left_in(sockets) == []


def left_in(directory: Path) -> list[Path]:
    return list(directory.iterdir())


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
    async with asyncio.timeout(10):
        while model.client.load.running or model.client.kv_tokens[0]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert (model.stats().success, model.stats().cancelled) == (1, 0)


async def test_the_last_chunk_comes_when_the_engine_was_told(load: Load) -> None:
    model = await load(step_seconds=0.01)
    request = ask("w1", max_tokens=60, stop=("w3",))
    with counted(model):
        async with aclosing(model.generate(request)) as chunks:
            while (await anext(chunks)).finish_reason is None:
                pass
            async with asyncio.timeout(10):
                while model.client.load.running:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
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


def test_numbers_that_no_device_can_hold_are_clipped_to_what_they_mean() -> None:
    request = GenerateRequest(id="", prompt="", priority=2**70, sampling=HUGE)
    asked = addition(
        request, [1], GenerationDefaults((7,)), Ready(vocab_size=100, max_model_len=8, block_size=4, blocks=2)
    )
    assert (asked.temperature, asked.top_k, asked.top_p, asked.stop_token_ids) == (1e6, 100, 1e-6, [7])
    assert asked.priority == 2**16


def test_an_unseeded_request_draws_its_own_seed() -> None:
    ready = Ready(vocab_size=100, max_model_len=8, block_size=4, blocks=2)
    seeds = {addition(ask("", max_tokens=1), [1], GenerationDefaults(()), ready).seed for _ in range(9)}
    assert len(seeds) == 9


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


async def test_it_describes_itself_completed() -> None:
    config = LlmModel("words", "3", EngineConfig(model="nowhere")).config
    assert (config.name, config.version, config.backend, config.platform) == ("words", "3", "charonia", "")
    assert config.decoupled
    assert config.max_batch_size == 0
    assert [spec.name for spec in config.inputs] == ["text_input", "input_ids", "stream", "sampling_parameters"]
    assert all(spec.optional for spec in config.inputs)
    assert config.outputs[0].name == "text_output"


async def test_it_fails_clearly_when_it_cannot_load(load: Load, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"tokenizer\.json"):
        await load(model=tmp_path)
    model = LlmModel("words", "1", EngineConfig(model=str(tmp_path)))
    with pytest.raises(Unavailable, match="words"):
        await generate(model, ask("w1"))
    await model.unload()


def test_leaves_torch_to_the_core() -> None:
    check = "import charonia.engine.llm, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers"} & set(loaded)
