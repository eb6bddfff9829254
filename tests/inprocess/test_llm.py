"""A language model within this process: it counts, so that its answers are known, or computes."""

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import charonia
from charonia import BeamSearchParams, RequestOutput, SamplingParams
from charonia.bench.load.fake_model import VOCAB
from charonia.core.request import GuidedDecoding
from charonia.inprocess import adapters
from charonia.inprocess.prompts import AskedPrompt, asked_prompts, given_prompts

FAKE: dict[str, Any] = {"executor": "fake", "fake_vocab_size": VOCAB, "fake_max_model_len": 4096}
ARRAY = np.ones((2, 3))
"""Has no truth value."""


@pytest.fixture(scope="module")
def llm(words: Path) -> Iterator[charonia.LLM]:
    """Its next token is the last one plus one."""
    with charonia.LLM(
        words, max_num_seqs=4, max_queued_requests=8, max_queued_tokens=900, fake_step_seconds=0.002, **FAKE
    ) as loaded:
        yield loaded


def running(llm: charonia.LLM) -> int:
    return llm.server.look(lambda gateway: gateway.requests_in_flight())


def wait_until_idle(llm: charonia.LLM) -> None:
    for _ in range(1000):
        if not running(llm):
            return
        time.sleep(0.005)
    raise AssertionError("a request is in flight")


def test_prompts_of_every_form_are_answered_in_order(llm: charonia.LLM) -> None:
    prompts = ["a", [7, 8], {"prompt": "b"}, {"prompt_token_ids": [9], "prompt": "said"}]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=3, temperature=0))
    assert [output.prompt for output in outputs] == ["a", None, "b", "said"]
    for output in outputs:
        last = output.prompt_token_ids[-1]
        [answer] = output.outputs
        assert answer.token_ids == [last + 1, last + 2, last + 3]
        assert answer.text == llm.detokenize(answer.token_ids)
        assert (answer.finish_reason, output.finished, answer.logprobs) == ("length", True, None)
    assert llm.generate("a", SamplingParams(max_tokens=3))[0].outputs[0].text == outputs[0].outputs[0].text
    assert llm.generate([]) == []
    assert len(llm.generate([1, 2])) == 1


def test_more_prompts_than_may_wait_are_answered(llm: charonia.LLM) -> None:
    prompts = [[number % 500] for number in range(60)]
    shown: list[int] = []

    class Bar:
        def __init__(self, total: int, desc: str) -> None:
            shown.append(-total)

        def __enter__(self) -> "Bar":
            return self

        def __exit__(self, *_: object) -> None: ...

        def update(self, count: int) -> None:
            shown.append(count)

    outputs = llm.generate(prompts, SamplingParams(max_tokens=2), use_tqdm=Bar)
    assert [output.outputs[0].token_ids[0] for output in outputs] == [prompt[0] + 1 for prompt in prompts]
    assert shown == [-60, *[1] * 60]


def test_more_answers_and_tokens_than_may_wait_are_given_without_a_refusal(llm: charonia.LLM) -> None:
    before = refusals(llm)
    several = llm.generate([[number] for number in range(20)], SamplingParams(max_tokens=2, n=5))
    assert [[answer.token_ids for answer in output.outputs] for output in several] == [
        [[number + 1, number + 2]] * 5 for number in range(20)
    ]
    long = llm.generate([[number] * 400 for number in range(12)], SamplingParams(max_tokens=1))
    assert [output.outputs[0].token_ids for output in long] == [[number + 1] for number in range(12)]
    assert refusals(llm) == before


def refusals(llm: charonia.LLM) -> list[str]:
    """The series of refused requests; prompts that wait are none."""
    series = llm.server.metrics().splitlines()
    return [line for line in series if line.startswith("charonia_requests_total") and "rejected" in line]


def test_each_prompt_may_have_its_own_parameters(llm: charonia.LLM) -> None:
    params = [SamplingParams(max_tokens=2, n=2), SamplingParams(max_tokens=4, stop_token_ids=[11])]
    two, one = llm.generate([[5], [9]], params)
    assert [answer.index for answer in two.outputs] == [0, 1]
    assert [answer.token_ids for answer in two.outputs] == [[6, 7], [6, 7]]
    assert (one.outputs[0].finish_reason, one.outputs[0].stop_reason) == ("stop", 11)
    with pytest.raises(charonia.InvalidArgument, match="there are 2 sampling_params for 1 prompts"):
        llm.generate("a", params)


def test_messages_are_rendered(llm: charonia.LLM) -> None:
    messages = [{"role": "user", "content": "ab"}]
    [output] = llm.chat(messages, SamplingParams(max_tokens=1))
    assert output.prompt_token_ids == llm.tokenize("ab\n")
    assert len(llm.chat([messages, messages], SamplingParams(max_tokens=1))) == 2
    [other] = llm.chat(messages, SamplingParams(max_tokens=1), chat_template="{{ messages[0].content }}c")
    assert other.prompt_token_ids == llm.tokenize("abc")
    with pytest.raises(charonia.InvalidArgument, match=r"messages\[0\].role must be one of"):
        llm.chat([{"role": "nobody", "content": "a"}])


async def test_a_stream_has_what_is_new(llm: charonia.LLM) -> None:
    params = SamplingParams(max_tokens=20)
    [whole] = await llm.async_generate([[5]], params)
    pieces = [*await asyncio.to_thread(list, llm.stream([5], params))]
    assert "".join(piece.outputs[0].text for piece in pieces) == whole.outputs[0].text
    assert [token for piece in pieces for token in piece.outputs[0].token_ids] == whole.outputs[0].token_ids
    assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(piece.prompt_token_ids == [5] for piece in pieces)
    chat = [piece async for piece in llm.stream([{"role": "user", "content": "a"}], SamplingParams(max_tokens=9, n=2))]
    assert sum(len(piece.outputs[0].token_ids) for piece in chat) == 18
    assert [piece.finished for piece in chat].count(True) == 1
    [answered] = await llm.async_chat([{"role": "user", "content": "a"}])
    assert len(answered.outputs[0].token_ids) == 16


LONG = SamplingParams(max_tokens=4000, ignore_eos=True)


async def test_whoever_leaves_frees_the_engine(llm: charonia.LLM) -> None:
    with llm.stream([1], LONG) as stream:
        next(stream)
        assert running(llm) == 1
    wait_until_idle(llm)
    async with llm.stream([1], LONG) as left:
        await anext(left)
    dropped = llm.stream([1], LONG)
    next(dropped)
    del dropped
    gc.collect()
    task = asyncio.create_task(llm.async_generate([[1]], LONG))
    await asyncio.to_thread(_wait_for_work, llm)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(wait_until_idle, llm)
    cancelled = llm.stream([1], LONG)
    next(cancelled)
    cancelled.cancel()
    with pytest.raises(charonia.Cancelled):
        list(cancelled)
    await asyncio.to_thread(wait_until_idle, llm)


def test_one_prompt_that_fails_ends_the_others(llm: charonia.LLM) -> None:
    with pytest.raises(charonia.ContextLengthExceeded):
        llm.generate([[1], [2] * 5000], LONG)
    wait_until_idle(llm)


@dataclass
class Structured:
    json: Any = None
    regex: str | None = None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate(3), "prompts must be a text, a list of token ids"),
        (lambda llm: llm.generate(["a", 3]), "prompts[1] must be a text"),
        (lambda llm: llm.generate({"promt": "a"}), "prompts.promt is unknown"),
        (lambda llm: llm.generate({"prompt_embeds": ARRAY}), "prompts.prompt_embeds is unknown"),
        (lambda llm: llm.generate(["a", {"prompt": "b", "nope": ARRAY}]), "prompts[1].nope is unknown"),
        (lambda llm: llm.generate({"prompt": "a", "cache_salt": ARRAY}), "prompts: cache_salt must be a string"),
        (lambda llm: llm.generate({"prompt": "a", "priority": ARRAY}), "and priority an integer"),
        (lambda llm: llm.generate({"prompt_token_ids": 5}), "prompts must be a text"),
        (lambda llm: llm.generate({"prompt_token_ids": ARRAY}), "prompts must be a text"),
        (lambda llm: llm.chat(ARRAY), "messages must be a list of messages"),
        (lambda llm: llm.chat({"role": "user", "content": "a"}), "messages must be a list of messages"),
        (lambda llm: llm.chat(None), "messages must be a list of messages"),
        (lambda llm: llm.chat([[{"role": "user", "content": "a"}], None]), "messages[1] must be a list of messages"),
        (lambda llm: llm.generate("a", {"max_tokens": 2}), "sampling_params must be SamplingParams, or a list of them"),
        (lambda llm: llm.generate(["a"], [None]), "sampling_params must be SamplingParams, or a list of them"),
        (lambda llm: llm.generate("a", 3), "sampling_params must be SamplingParams, or a list of them, got 3"),
        (lambda llm: llm.generate(["a", "b"], lora_request=[None]), "lora_request must have one for each of 2 prompts"),
        (lambda llm: llm.generate("a", lora_request=["nobody"]), "'lora_name' is not supported by this model"),
        (lambda llm: llm.generate([[-1]]), "prompts[0]: token ids must be numbers of at least 0"),
        (lambda llm: llm.generate("a", SamplingParams(top_p=7)), "top_p must be above 0 and at most 1, got 7"),
        (lambda llm: llm.generate("a", SamplingParams(top_k="x")), "top_k must be an integer"),  # type: ignore[arg-type]
        (lambda llm: llm.generate("a", SamplingParams(n=0)), "n must be between 1 and 128, got 0"),
        (lambda llm: llm.generate("a", SamplingParams(structured_outputs=Structured({}, "a"))), "structured_outputs"),
        (lambda llm: llm.generate("a", lora_request="nobody"), "'lora_name' is not supported by this model"),
        (lambda llm: llm.generate("a", lora_request=3), "lora_request must be a name"),
        (lambda llm: llm.stream(["a", "b"]), "a stream answers one prompt, got 2"),
        (lambda llm: llm.embed("a"), "model 'words' makes no embeddings"),
        (lambda llm: llm.embed(["a", [1]]), "prompts are texts, or lists of token ids"),
        (lambda llm: llm.score("a", "b"), "model 'words' makes no scores"),
        (lambda llm: llm.classify("a"), "model 'words' makes no classes"),
        (lambda llm: llm.encode("a"), "pooling_task: model 'words' does none, not embed"),
        (lambda llm: llm.reward("a"), "pooling_task: model 'words' does none, not token_classify"),
        (lambda llm: llm.beam_search("a", BeamSearchParams(11, 4)), "beam_width must be between 1 and 10, got 11"),
        (lambda llm: llm.beam_search("a", BeamSearchParams(2, 0)), "max_tokens must be between 1 and"),
        (lambda llm: llm.beam_search("a", BeamSearchParams(2, 1), "nobody"), "'lora_name' is not supported"),
        (
            lambda llm: llm.beam_search("a", BeamSearchParams(2, 1), concurrency_limit=0),
            "concurrency_limit must be at least 1, got 0",
        ),
        (lambda llm: llm.beam_search([[1] * 4096], BeamSearchParams(2, 1)), "4096"),
        (lambda llm: llm.score(["a", "b"], ["c"] * 3), "there are 2 texts on one side and 3 on the other"),
    ],
)
def test_what_cannot_be_answered_is_refused(
    llm: charonia.LLM, call: Callable[[charonia.LLM], object], message: str
) -> None:
    with pytest.raises(charonia.InvalidArgument) as refused:
        call(llm)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("pooling_params", ARRAY, "pooling_task says what is wanted"),
        ("pooling_params", object(), "pooling_task says what is wanted"),
        ("lora_request", "nobody", "encoders have no adapters"),
        ("truncate_prompt_tokens", 5, "texts are cut to the model's length"),
        ("tokenization_kwargs", {"truncation": True}, "texts are cut to the model's length"),
    ],
)
@pytest.mark.parametrize(
    "ask",
    [
        charonia.LLM.encode,
        charonia.LLM.embed,
        charonia.LLM.classify,
        charonia.LLM.reward,
        lambda llm, text, **arguments: llm.score(text, text, **arguments),
    ],
)
def test_what_vllm_s_encoders_take_is_refused_by_name(
    llm: charonia.LLM, ask: Callable[..., object], name: str, value: Any, reason: str
) -> None:
    with pytest.raises(charonia.Unsupported, match=f"^{name} is not served: {reason}$") as refused:
        ask(llm, "a", **{name: value})
    assert refused.value.field == name
    with pytest.raises(charonia.InvalidArgument):  # this model is no encoder
        ask(llm, "a", use_tqdm=False, **{name: None})
    with pytest.raises(TypeError, match="unexpected keyword argument 'nope'"):
        ask(llm, "a", nope=1)


def test_an_argument_that_no_chat_has_is_refused(llm: charonia.LLM) -> None:
    for ask in (llm.chat, llm.stream):
        with pytest.raises(TypeError, match="unexpected keyword argument 'max_tokens'"):
            ask([{"role": "user", "content": "a"}], max_tokens=5)
    with pytest.raises(TypeError, match="unexpected keyword argument 'chat_template'"):
        llm.stream("a", chat_template="x")


def test_programs_for_vllm_pass_what_asks_for_nothing(llm: charonia.LLM) -> None:
    params = SamplingParams(
        max_tokens=1, detokenize=True, output_kind=2, extra_args=None, best_of=None, logits_processors=None
    )
    [output] = llm.generate([5], params, use_tqdm=False, lora_request=None, priority=[3])
    assert (output.metrics, output.lora_request) == (None, None)
    assert len(llm.generate([[5], [6]], params, lora_request=[None, None])) == 2
    [output] = llm.chat([{"role": "user", "content": "a"}], params, False, None)
    assert output.finished
    for name, value in (
        ("detokenize", False),
        ("extra_args", {"a": 1}),
        ("logits_processors", [print]),
        ("best_of", ARRAY),
    ):
        with pytest.raises(charonia.Unsupported, match=f"^{name} ") as refused:
            llm.generate([5], SamplingParams(**{name: value}))
        assert refused.value.field == name
    [output] = llm.generate([{"prompt": "a", "multi_modal_data": None, "nope": {}}], params, tokenization_kwargs={})
    assert output.finished
    with pytest.raises(charonia.Unsupported, match=r"^tokenization_kwargs is not served: truncate_prompt_tokens of"):
        llm.generate([5], params, tokenization_kwargs={"truncation": True})
    for priority in ([1, 2], 1, ["a"]):
        with pytest.raises(charonia.InvalidArgument, match="priority must be a list of 1 integers") as wrong:
            llm.generate([5], params, priority=priority)  # type: ignore[arg-type]
        assert wrong.value.field == "priority"


def test_the_most_urgent_prompts_are_answered_first(words: Path) -> None:
    with charonia.LLM(words, max_num_seqs=1, fake_step_seconds=0.001, **FAKE) as llm:
        answered: list[int] = []
        generator = llm._generator
        asked = [*asked_prompts(given_prompts([[5]] * 3, [2, 0, 1]), SamplingParams(max_tokens=1))]
        answer = generator._answer

        async def follow(prompt: AskedPrompt) -> RequestOutput:
            output = await answer(prompt)
            answered.append(prompt.given.priority)
            return output

        generator._answer = follow  # type: ignore[method-assign]
        llm._run(lambda: generator.answer_all(asked, None))
        assert answered == [0, 1, 2]


@dataclass(frozen=True)
class LoraRequest:
    """As vLLM's."""

    lora_name: str
    lora_int_id: int
    lora_path: str


def test_adapters_of_one_name_are_told_apart(
    root: Path, sibling: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "_MOST_OF_A_NAME", 2)
    demo, making = root / "examples" / "model_repository" / "demo" / "1", sibling("adapters.py")
    layers = making.layers_of(demo)
    paths = [str(making.write_adapter(tmp_path / str(step), layers, seed=step)) for step in range(4)]
    steps = [LoraRequest("policy", step, path) for step, path in enumerate(paths)]
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=0)
    with charonia.LLM(
        demo, threads=1, kv_cache_bytes=16 << 20, enable_lora=True, lora_modules=[f"sql={paths[0]}/"]
    ) as llm:

        def ask(adapter: LoraRequest | None) -> float:
            [output] = llm.generate([[5, 6, 7]], params, lora_request=adapter)
            assert output.lora_request is adapter
            return round(output.outputs[0].cumulative_logprob or 0.0, 3)

        with ThreadPoolExecutor(4) as threads:  # which use it first at once
            first, *others, plain = threads.map(ask, [*[steps[0]] * 3, None])
        assert others == [first] * 2
        assert first != plain
        alone = [ask(LoraRequest(f"alone-{step.lora_int_id}", 9, step.lora_path)) for step in steps]
        assert [ask(step) for step in steps] == alone
        assert [ask(step) for step in steps] == alone
        assert len({plain, *alone}) == 5
        served = [served.adapter.name for served in llm.server.look(lambda gateway: gateway.adapters())]
        assert len([name for name in served if name.startswith("policy")]) == 2
        assert ask(LoraRequest("sql", 1, paths[0])) == first
        assert "sql-1" not in [served.adapter.name for served in llm.server.look(lambda gateway: gateway.adapters())]
        outputs = llm.generate([[5, 6, 7]] * 3, params, lora_request=[steps[3], None, steps[0]])
        assert [output.lora_request for output in outputs] == [steps[3], None, steps[0]]
        assert [round(output.outputs[0].cumulative_logprob or 0.0, 3) for output in outputs] == [alone[3], plain, first]
        pieces = list(llm.stream([5, 6, 7], params, lora_request=steps[3]))
        assert round(sum(piece.outputs[0].cumulative_logprob or 0.0 for piece in pieces), 3) == alone[3]
        with pytest.raises(charonia.CharoniaError, match="none"):
            llm.generate([[5]], lora_request=LoraRequest("policy", 99, str(tmp_path / "none")))


def test_the_end_is_told(words: Path) -> None:
    with charonia.LLM(words, fake_step_seconds=0.01, **FAKE) as llm:
        threading.Thread(target=lambda: (_wait_for_work(llm), llm.shutdown())).start()
        with pytest.raises(charonia.ServerExiting):
            llm.generate([1], LONG)
    with pytest.raises(charonia.Unavailable, match="the server was stopped"):
        llm.generate("a")
    with pytest.raises(charonia.Unavailable, match="failed to load"):
        charonia.LLM(words)


def _wait_for_work(llm: charonia.LLM) -> None:
    while not running(llm):
        time.sleep(0.002)


def test_a_model_that_computes(root: Path) -> None:
    with charonia.LLM(root / "examples" / "model_repository" / "demo" / "1", threads=1, kv_cache_bytes=16 << 20) as llm:
        params = SamplingParams(max_tokens=6, temperature=0, logprobs=2, prompt_logprobs=0, ignore_eos=True)
        one, two = llm.generate([[5, 6, 7], [9]], params)
        assert llm.generate([[9]], params)[0].outputs == two.outputs
        [answer] = one.outputs
        assert answer.logprobs is not None
        assert answer.cumulative_logprob == pytest.approx(
            sum(known[token].logprob for known, token in zip(answer.logprobs, answer.token_ids, strict=True))
        )
        assert all(known[token].rank == 1 for known, token in zip(answer.logprobs, answer.token_ids, strict=True))
        assert one.prompt_logprobs is not None
        assert [None if known is None else [*known] for known in one.prompt_logprobs] == [None, [6], [7]]
        default = llm.get_default_sampling_params()
        assert (default.temperature, default.max_tokens) == (None, 16)


def test_answers_are_held_to_a_form() -> None:
    held = SamplingParams(structured_outputs={"choice": ["yes", "no"]}).constraint()
    assert held is not None
    assert (held.kind, held.text) == ("choice", '["yes","no"]')
    assert SamplingParams(structured_outputs=Structured(regex="a+")).constraint() == GuidedDecoding(
        "regex", "a+", "structured_outputs.regex"
    )
    assert SamplingParams().constraint() is None


@pytest.mark.proof
def test_an_encoder_makes_vectors(sibling: Callable[[str], ModuleType], tmp_path: Path) -> None:
    sibling("encoder_models.py").write_embedder(tmp_path / "mini")
    with charonia.LLM(tmp_path / "mini", runner="pooling", convert="embed") as llm:
        one, two = llm.embed(["the ferry", "a river"])
        assert one.outputs.hidden_size == len(one.outputs.embedding) > 8
        assert one.outputs.embedding != two.outputs.embedding
        assert llm.embed("a river")[0].outputs.embedding == pytest.approx(two.outputs.embedding, abs=1e-5)
        [ids] = asyncio.run(llm.async_embed([[4, 5]]))
        assert (one.prompt_token_ids, ids.prompt_token_ids) == (None, [4, 5])
        assert llm.embed([]) == []
        nothing: dict[str, Any] = {"lora_request": None, "truncate_prompt_tokens": None, "tokenization_kwargs": {}}
        [pooled] = llm.encode([[4, 5]], None, pooling_task="embed", **nothing)
        assert pooled.outputs.data.tolist() == pytest.approx(ids.outputs.embedding, abs=1e-5)
        assert (pooled.prompt_token_ids, llm.encode([])) == ([4, 5], [])
        with pytest.raises(charonia.InvalidArgument, match="pooling_task: model 'mini' does embed, not token_embed"):
            llm.encode("a river", pooling_task="token_embed")
        assert llm.get_tokenizer()("a river")["input_ids"]
        same, other = (score.outputs.score for score in llm.score("a river", ["a river", "the ferry"]))
        assert same == pytest.approx(1, abs=1e-5)
        assert other == pytest.approx(np.dot(one.outputs.embedding, two.outputs.embedding), abs=1e-5)
        with pytest.raises(charonia.InvalidArgument, match="'mini' does not generate text"):
            llm.generate("a")


@pytest.mark.proof
def test_rows_of_tokens_come_as_they_are(sibling: Callable[[str], ModuleType], tmp_path: Path) -> None:
    sibling("encoder_models.py").write_late_interaction(tmp_path / "late", "pylate")
    with charonia.LLM(tmp_path / "late") as llm:
        one, two = llm.encode(["the ferry", "a river"])
        assert one.outputs.data.ndim == two.outputs.data.ndim == 2
        assert one.outputs.data.shape[1] == two.outputs.data.shape[1]
        assert len(llm.encode("a river", pooling_task="token_embed")) == 1


@pytest.mark.proof
def test_a_classifier_makes_classes(sibling: Callable[[str], ModuleType], tmp_path: Path) -> None:
    sibling("encoder_models.py").write_cross_encoder(tmp_path / "three", labels=3)
    with charonia.LLM(tmp_path / "three") as llm:
        one, two = llm.classify(["the ferry", "a river"])
        assert one.outputs.num_classes == len(two.outputs.probs) == 3
        assert sum(one.outputs.probs) == pytest.approx(1)
        assert one.outputs.probs != two.outputs.probs
        assert llm.classify([]) == []


def test_sampling_parameters_are_cloned() -> None:
    stop = ["a"]
    params = SamplingParams(max_tokens=3, stop=stop)
    params.clone().max_tokens = 4
    assert params == SamplingParams(max_tokens=3, stop=["a"]) == params.clone()
    assert params.clone().stop is not stop
