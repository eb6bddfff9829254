"""Requests refuse what makes no sense, and say which field it was."""

import msgspec
import pytest

from charonia.core.errors import ErrorCode, InvalidArgument
from charonia.core.request import GenerateRequest
from charonia.core.sampling import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", -5),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("seed", 2**64),
        ("stop_token_ids", (3, -1)),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("presence_penalty", 2.1),
        ("frequency_penalty", float("nan")),
        ("logit_bias", {3: 101.0}),
        ("logit_bias", {-1: 1.0}),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("logprobs", 21),
        ("prompt_logprobs", 21),
        ("stop", ("",)),
        ("stop", ("x" * 257,)),
        ("bad_words", ("x",) * 65),
    ],
)
def test_a_value_out_of_range_is_named(field: str, value: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert field in caught.value.message
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT


def test_the_edges_are_allowed() -> None:
    SamplingParams(max_tokens=1, temperature=0, top_k=-1, top_p=1, seed=2**64 - 1, stop_token_ids=(0,))
    SamplingParams(min_p=1, presence_penalty=-2, frequency_penalty=2, logit_bias={0: -100}, logprobs=0)
    SamplingParams(max_tokens=None, min_tokens=10**6, stop=("x" * 256,), bad_words=("y",) * 64)


def test_no_new_tokens_are_for_those_who_want_the_prompt() -> None:
    for wanted in ({"echo": True}, {"sampling": SamplingParams(max_tokens=0, prompt_logprobs=0)}):
        GenerateRequest(**{"id": "", "prompt": "x", "sampling": SamplingParams(max_tokens=0)} | wanted)
    with pytest.raises(InvalidArgument, match="max_tokens must be at least 1") as caught:
        GenerateRequest(id="", prompt="x", sampling=SamplingParams(max_tokens=0))
    assert caught.value.field == "max_tokens"


def test_an_unknown_field_is_not_ignored() -> None:
    with pytest.raises(msgspec.ValidationError, match="beam_width"):
        msgspec.convert({"beam_width": 4}, SamplingParams)


@pytest.mark.parametrize(
    ("allowed", "told"), [((), "at least one token, got 0"), ((3, -2), "numbers of at least 0, got -2")]
)
def test_allowed_tokens_are_told_what_is_wrong_with_them(allowed: tuple[int, ...], told: str) -> None:
    with pytest.raises(InvalidArgument, match=f"allowed_token_ids must be .*{told}"):
        SamplingParams(allowed_token_ids=allowed)
