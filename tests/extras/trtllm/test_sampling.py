"""What a request asks for, in TensorRT-LLM's words, and what it would accept and not do."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from charonia.core.errors import InvalidArgument
from charonia.core.request import GuidedDecoding
from charonia.core.resolved_sampling import LogitsParams, ResolvedSampling
from charonia.engine.core.messages import AddRequest
from charonia.extras.trtllm.request import SamplingTranslator
from charonia.scheduler.sequence import SequenceSpec

MAPPED = {
    "repetition_penalty": (LogitsParams(repetition_penalty=1.5), {"repetition_penalty": 1.5}),
    "presence_penalty": (LogitsParams(presence_penalty=0.5), {"presence_penalty": 0.5}),
    "frequency_penalty": (LogitsParams(frequency_penalty=-0.5), {"frequency_penalty": -0.5}),
    "bad_words": (LogitsParams(bad_words=((5,), (6, 7))), {"bad_token_ids": [5], "bad": ["6-7"]}),
    "min_tokens": (
        LogitsParams(min_tokens=3, stop_token_ids=(9,)),
        {"min_tokens": 3, "end_id": 9, "ignore_eos": False},
    ),
}


pytestmark = pytest.mark.usefixtures("package")


def translate(asked: AddRequest, applies_all: bool = True) -> Any:
    """The fake `SamplingParams` of a request."""
    return SamplingTranslator("1.2.0", 12, applies_all, lambda ids: "-".join(map(str, ids))).translate(asked)


def add(stops: Sequence[int] = (), constraint: GuidedDecoding | None = None, **sampling: Any) -> AddRequest:
    asked = ResolvedSampling(**sampling)
    prompt = np.array([1, 2, 3, 4], np.int32)
    spec = SequenceSpec(key=1, prompt=prompt, max_tokens=7, stop_token_ids=frozenset(stops), sampling=asked)
    return AddRequest(spec, constraint)


def given(params: Any, names: Any) -> dict[str, Any]:
    return {name: getattr(params, name) for name in names}


def test_drawing() -> None:
    asked = add([7, 9], temperature=0.5, top_k=4, top_p=0.25, min_p=0.125, seed=2**63 - 1, choice=1)
    expected = {"max_tokens": 7, "temperature": 0.5, "top_k": 4, "top_p": 0.25, "min_p": 0.125, "seed": 0, "n": 1}
    stops = {"stop_token_ids": [7, 9], "ignore_eos": True, "include_stop_str_in_output": True, "end_id": None}
    expected |= stops | {"logprobs": None, "detokenize": False}
    assert given(translate(asked), expected) == expected


def test_greedy_is_the_likeliest_token() -> None:
    expected = {"top_k": 1, "temperature": None, "top_p": None, "stop_token_ids": None}
    assert given(translate(add()), expected) == expected


@pytest.mark.parametrize("name", MAPPED)
def test_changes_of_logits(name: str) -> None:
    logits, expected = MAPPED[name]
    params = translate(add([9], logits=logits))
    assert given(params, expected) == expected


def test_every_field_that_shapes_is_passed_on_or_refused() -> None:
    # The next test's, a part of min_tokens, and refused.
    elsewhere = {"logit_bias", "stop_token_ids", "allowed_token_ids"}
    elsewhere |= {"suppressed", "suppressed_first", "timestamps", "reported"}
    assert {*LogitsParams._fields} == {*MAPPED} | elsewhere
    assert {*ResolvedSampling._fields} == {
        "temperature", "top_k", "top_p", "seed", "choice", "min_p", "logits", "logprobs", "prompt_logprobs",
        "logprob_token_ids",
    }  # fmt: skip


def test_a_bias_is_a_number_for_every_token() -> None:
    params = translate(add(logits=LogitsParams(logit_bias=((3, 2.0), (11, -1.0)))))
    assert params.embedding_bias.tolist() == [0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, -1]
    assert str(params.embedding_bias.dtype) == "torch.float32"


@pytest.mark.parametrize(("asked", "passed"), [(0, 1), (1, 1), (5, 5)])
def test_logprobs_are_asked_for_even_of_none_but_the_chosen(asked: int, passed: int) -> None:
    assert translate(add(logprobs=asked)).logprobs == passed


@pytest.mark.parametrize(
    ("constraint", "field", "value"),
    [
        (GuidedDecoding("json"), "json_object", True),
        (GuidedDecoding("json_schema", "{}"), "json", "{}"),
        (GuidedDecoding("regex", "a+"), "regex", "a+"),
        (GuidedDecoding("ebnf_grammar", "x"), "grammar", "x"),
    ],
)
def test_guides(constraint: GuidedDecoding, field: str, value: Any) -> None:
    assert getattr(translate(add(constraint=constraint)).guided_decoding, field) == value


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty", "bad_words", "min_p"])
def test_what_a_sampler_would_ignore_is_refused_by_name(name: str) -> None:
    asked = add(min_p=0.5) if name == "min_p" else add(logits=MAPPED[name][0])
    with pytest.raises(InvalidArgument, match=f"{name}: the PyTorch sampler of tensorrt_llm 1.2.0 does") as refusal:
        translate(asked, applies_all=False)
    assert refusal.value.field == name


@pytest.mark.parametrize("name", ["allowed_token_ids", "suppressed", "suppressed_first", "reported"])
def test_what_there_is_nothing_like_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{name}: TensorRT-LLM has nothing like it") as refusal:
        translate(add(logits=LogitsParams(**{name: (1, 2)})))
    assert refusal.value.field == name


def test_what_does_not_go_together_is_refused() -> None:
    logits = LogitsParams(min_tokens=2, stop_token_ids=(9,), bad_words=((1, 2),))
    with pytest.raises(InvalidArgument, match="min_tokens and bad_words"):
        translate(add([9], logits=logits))
