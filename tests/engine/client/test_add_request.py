"""What an engine is asked: defaults resolved, numbers it can hold, nothing where nothing is wanted."""

from typing import Any

import msgspec
import pytest

from charonia.core.errors import ContextLengthExceeded, InvalidArgument
from charonia.core.request import ChatMessage, Conversation, GenerateRequest, Prompt
from charonia.core.request_context import GatewayHints, RequestContext
from charonia.core.resolved_sampling import LogitsParams
from charonia.core.sampling import SamplingParams
from charonia.engine.client.add_request import build_add_request, prompt_tokens_to_keep
from charonia.engine.core.messages import AddRequest, CoreReady, decode_tokens, encode_tokens
from charonia.scheduler.sequence import SequenceSpec
from charonia.tokenization.generation_defaults import GenerationDefaults

READY = CoreReady(vocab_size=100, max_model_len=64, block_size=4, blocks=32)
MODEL = GenerationDefaults((7,))

encode = msgspec.msgpack.Encoder(enc_hook=encode_tokens).encode
decode = msgspec.msgpack.Decoder(AddRequest, dec_hook=decode_tokens).decode


def add(
    model: GenerationDefaults = MODEL, bad_words: tuple[tuple[int, ...], ...] = (), **asked: object
) -> SequenceSpec:
    request = GenerateRequest(id="", prompt="", sampling=SamplingParams(**asked), choice=3)
    return build_add_request(request, RequestContext("test"), [1], model, READY, bad_words).spec


def test_a_request_that_asks_for_nothing_has_no_logits_params() -> None:
    assert add().sampling.logits is None
    assert add(min_tokens=3, ignore_eos=True).sampling.logits is None
    assert add(repetition_penalty=1.0, presence_penalty=0.0, stop=("x",)).sampling.logits is None
    assert add().sampling.choice == 3
    assert (add().sampling.logprobs, add(logprobs=0).sampling.logprobs) == (None, 0)


def test_logits_params_cross_the_wire_as_they_are() -> None:
    wishes = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {3: -100.0}, "min_tokens": 2}
    asked = add(bad_words=((1, 2), (5, 100), (4,)), min_p=0.1, repetition_penalty=1e-300, **wishes)
    expected = LogitsParams(1e-4, 0.5, -0.5, ((3, -100.0),), ((1, 2), (4,)), 2, (7,))
    content = encode(AddRequest(asked))
    assert encode(decode(content)) == content
    assert decode(content).spec.sampling == asked.sampling
    assert asked.sampling.logits == expected
    assert asked.sampling.min_p == 0.1


def test_the_models_own_penalty_counts() -> None:
    model = MODEL._replace(min_p=0.2, repetition_penalty=1.1)
    sampling = add(model).sampling
    assert (sampling.min_p, sampling.logits) == (0.2, LogitsParams(repetition_penalty=1.1))
    assert add(model, repetition_penalty=1.0, min_p=0.0).sampling.logits is None


def test_the_request_wins_over_its_model() -> None:
    model = GenerationDefaults((7,), 0.6, 20, 0.9, 0.1, 1.1)
    own = add(model).sampling
    assert (own.temperature, own.top_k, own.top_p, own.min_p) == (0.6, 20, 0.9, 0.1)
    chosen = add(model, temperature=0.0, top_k=-1, top_p=1.0, min_p=0.0, repetition_penalty=1.0).sampling
    assert (chosen.temperature, chosen.top_k, chosen.top_p, chosen.min_p, chosen.logits) == (0.0, 0, 1.0, 0.0, None)


def test_a_bias_for_a_token_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="100") as refusal:
        add(logit_bias={100: 1.0})
    assert refusal.value.field == "logit_bias"


def test_allowed_tokens_are_the_models_each_once() -> None:
    assert add(allowed_token_ids=(5, 3, 5)).sampling.logits == LogitsParams(allowed_token_ids=(3, 5))
    assert add(allowed_token_ids=(7,), min_tokens=2, ignore_eos=True).sampling.logits == LogitsParams(
        allowed_token_ids=(7,)
    )
    nothing_left: list[dict[str, Any]] = [
        {"allowed_token_ids": (100,)},
        {"allowed_token_ids": (7,) * 101},
        {"allowed_token_ids": (7,), "min_tokens": 2},
        {"allowed_token_ids": (7, 5), "min_tokens": 2, "bad_words": ((5,),)},
    ]
    for asked in nothing_left:
        with pytest.raises(InvalidArgument, match="allowed_token_ids") as refusal:
            add(**asked)
        assert refusal.value.field == "allowed_token_ids"


@pytest.mark.parametrize(
    ("asked", "max_tokens", "kept"),
    [(None, 16, None), (5, 16, 5), (64, 16, 64), (-1, 16, 48), (-1, None, 63), (-1, 0, 64), (-1, 500, 1)],
)
def test_how_much_of_a_prompt_is_kept(asked: int | None, max_tokens: int | None, kept: int | None) -> None:
    assert prompt_tokens_to_keep(SamplingParams(truncate_prompt_tokens=asked, max_tokens=max_tokens), 64) == kept


def test_no_more_than_the_models_length_is_kept() -> None:
    with pytest.raises(InvalidArgument, match="at most the model's length of 64 tokens, got 65") as refusal:
        prompt_tokens_to_keep(SamplingParams(truncate_prompt_tokens=65), 64)
    assert refusal.value.field == "truncate_prompt_tokens"


def test_a_minimum_beyond_the_models_length_is_its_length() -> None:
    logits = add(min_tokens=2**70, max_tokens=None).sampling.logits
    assert logits is not None
    assert logits.min_tokens == 64


CHAT = Conversation((ChatMessage("user", "x"),))


@pytest.mark.parametrize(
    ("prompt", "tokens", "max_tokens", "field"),
    [("x", 64, 1, "prompt"), (CHAT, 64, None, "messages"), (CHAT, 63, 2, "max_tokens"), ("x", 1, 2**70, "max_tokens")],
)
def test_what_is_too_long_is_told_by_its_field(prompt: Prompt, tokens: int, max_tokens: int | None, field: str) -> None:
    asked = GenerateRequest(id="", prompt=prompt, sampling=SamplingParams(max_tokens=max_tokens))
    said = f"with max_tokens {max_tokens} exceeds it" if field == "max_tokens" else "leaves no room for an answer"
    with pytest.raises(
        ContextLengthExceeded, match=f"maximum context length is 64 tokens: a prompt of {tokens} {said}"
    ) as refusal:
        build_add_request(asked, RequestContext("test"), [1] * tokens, MODEL, READY)
    assert refusal.value.field == field


@pytest.mark.parametrize(("tokens", "max_tokens", "expected"), [(63, 1, 1), (63, None, 1), (1, None, 63), (64, 0, 0)])
def test_what_just_fits_is_taken(tokens: int, max_tokens: int | None, expected: int) -> None:
    asked = GenerateRequest(id="", prompt="x", sampling=SamplingParams(max_tokens=max_tokens), echo=True)
    assert build_add_request(asked, RequestContext("test"), [1] * tokens, MODEL, READY).spec.max_tokens == expected


@pytest.mark.parametrize(
    ("prompt", "ends"),
    [
        ([1, 1, 1], ()),
        ([1, 9, 1, 1], (2,)),
        ([1, 9, 1, 8, 1], (2, 4)),
        ([1, 9, 1, 8, 1, 9, 1, 1, 9], (2, 6, 9)),
    ],
)
def test_a_request_says_where_messages_end(prompt: list[int], ends: tuple[int, ...]) -> None:
    """The first, and the last two, by the tokens that end a text."""
    asked = GenerateRequest(id="", prompt=CHAT)
    defaults = GenerationDefaults((8, 9))
    assert build_add_request(asked, RequestContext("test"), prompt, defaults, READY).spec.snapshot_at == ends


@pytest.mark.parametrize(("tokens", "max_tokens", "expected"), [(60, 100, 4), (60, 3, 3), (63, 2**70, 1)])
def test_lenient_limits_are_cut_to_what_fits(tokens: int, max_tokens: int, expected: int) -> None:
    asked = GenerateRequest(id="", prompt="x", sampling=SamplingParams(max_tokens=max_tokens), lenient_limits=True)
    assert build_add_request(asked, RequestContext("test"), [1] * tokens, MODEL, READY).spec.max_tokens == expected
    with pytest.raises(ContextLengthExceeded):
        build_add_request(asked, RequestContext("test"), [1] * 64, MODEL, READY)


def test_stop_tokens_join_eos_unless_it_is_ignored() -> None:
    model = GenerationDefaults((1, 2))
    assert add(model, stop_token_ids=(9, 2, 100)).stop_token_ids == {1, 2, 9}
    assert add(model, stop_token_ids=(9,), ignore_eos=True).stop_token_ids == {9}


def test_a_gateways_hints_stand_in_for_what_a_request_does_not_say() -> None:
    hints = GatewayHints(priority=5, target_ttft_ms=800.0, target_itl_ms=40.0)
    request = GenerateRequest(id="", prompt="", sampling=SamplingParams(), priority=1, target_ttft_ms=100.0)
    spec = build_add_request(request, RequestContext("test", hints=hints), [1], MODEL, READY).spec
    assert (spec.priority, spec.target_ttft, spec.target_itl) == (5, 0.1, 0.04)
    spec = build_add_request(request, RequestContext("test"), [1], MODEL, READY).spec
    assert (spec.priority, spec.target_ttft, spec.target_itl) == (1, 0.1, None)


def test_where_an_encoder_reads_the_prompt_the_decoder_begins_by_itself() -> None:
    engine = msgspec.structs.replace(READY, source_tokens=6, source_vocab_size=300)
    model = MODEL._replace(decoder_start=(2, 9), suppressed=(4, 100))

    def ask(prompt: list[int], model: GenerationDefaults = model, **asked: object) -> SequenceSpec:
        request = GenerateRequest(id="", prompt=tuple(prompt), sampling=SamplingParams(**asked))
        return build_add_request(request, RequestContext("test"), prompt, model, engine).spec

    spec = ask([5, 6, 8], max_tokens=60)
    assert spec.prompt.tolist() == [2, 9]
    assert ask([299]).prompt.tolist() == [2, 9], "the encoder's vocabulary is another one"
    assert spec.sampling.logits == LogitsParams(suppressed=(4,))
    for prompt, own, asked, said in (
        ([1] * 7, model, {}, "prompt: the encoder"),
        ([300], model, {}, "vocabulary of 300"),
        ([1], model, {"prompt_logprobs": 0}, "prompt_logprobs"),
        ([1], MODEL, {}, "decoder_start_token_id"),
        ([1], MODEL._replace(decoder_start=(100,)), {}, "decoder_start_token_id"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            ask(prompt, own, **asked)
