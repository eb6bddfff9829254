import json
from typing import Any

import pytest

from charonia.core.drafts import DraftLimit
from charonia.core.errors import InvalidArgument
from charonia.core.request import GuidedDecoding, InferRequest
from charonia.core.sampling import SamplingParams
from charonia.core.tensor import Tensor
from charonia.engine.client.infer import OWN_LAYOUT, parse_infer_request
from charonia.engine.client.request_parameters import ResponseOptions, parse_request_parameters

PROMPT = {"text_input": Tensor.from_values("text_input", "BYTES", [b"x"])}


def sampling(**parameters: Any) -> SamplingParams:
    return parse_request_parameters(parameters, None)[0]


def replacing(text: str) -> Tensor:
    return Tensor.from_values("sampling_parameters", "BYTES", [text.encode()])


def test_names_of_every_generation_mean_the_same() -> None:
    expected = SamplingParams(max_tokens=5, temperature=0.5, top_k=3, top_p=0.9, seed=7, stop_token_ids=(2,))
    assert sampling(max_tokens=5, temperature=0.5, top_k=3, top_p=0.9, seed=7, end_id=2) == expected
    tensorrt = {"request_output_len": 5, "runtime_top_k": 3, "runtime_top_p": 0.9, "random_seed": 7, "end_id": 2}
    assert sampling(temperature=0.5, **tensorrt) == expected
    plain = {"max_tokens": 5, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "seed": 7, "stop_token_ids": 2}
    assert sampling(**{f"sampling_param_{name}": value for name, value in plain.items()}) == expected


def test_what_shapes_a_text_has_its_names_too() -> None:
    lists = replacing(json.dumps({"stop_words": ["a", "b"], "bad_words": "c", "logit_bias": {"7": -1}, "n": 3}))
    tokens, options = parse_request_parameters({}, lists)
    assert tokens == SamplingParams(stop=("a", "b"), bad_words=("c",), logit_bias={7: -1.0})
    assert options.n == 3
    plain = {"stop_words": "a", "min_length": 2, "min_p": 0.1, "repetition_penalty": 1.2, "num_return_sequences": 2}
    assert sampling(**plain) == SamplingParams(stop=("a",), min_tokens=2, min_p=0.1, repetition_penalty=1.2)
    assert parse_request_parameters(plain, None)[1] == ResponseOptions(n=2)
    penalties = {"sampling_param_presence_penalty": "1", "frequency_penalty": -1}
    assert sampling(**penalties) == SamplingParams(presence_penalty=1, frequency_penalty=-1)


def test_how_many_tokens_are_drafted() -> None:
    assert parse_request_parameters({}, None)[1].drafts is None
    assert parse_request_parameters({"speculative_k": "3"}, None)[1].drafts == DraftLimit(3, "speculative_k")
    request = InferRequest(id="", inputs=PROMPT, parameters={"speculative_k": 0})
    assert parse_infer_request(request, OWN_LAYOUT).requests[0].drafts == DraftLimit(0)
    with pytest.raises(InvalidArgument, match="'speculative_k' must be"):
        parse_request_parameters({"speculative_k": 33}, None)


def test_numbers_may_come_as_text() -> None:
    assert sampling(max_tokens="5", temperature="0.5", ignore_eos="true") == SamplingParams(
        max_tokens=5, temperature=0.5, ignore_eos=True
    )


def test_empty_words_are_none_and_whole_numbers_integers() -> None:
    given = {"stop_words": ["", "a"], "bad_words": [""], "max_tokens": 8.0, "stop_token_ids": [2.0]}
    tokens, _ = parse_request_parameters({}, replacing(json.dumps(given)))
    assert tokens == SamplingParams(stop=("a",), max_tokens=8, stop_token_ids=(2,))
    with pytest.raises(InvalidArgument, match="'max_tokens' must be an integer"):
        parse_request_parameters({"max_tokens": 8.5}, None)


@pytest.mark.parametrize("seed", [2**64, float(2**70), "18446744073709551616"])
def test_a_seed_of_more_than_64_bits_is_told_the_range(seed: Any) -> None:
    for name in ("seed", "random_seed"):
        with pytest.raises(InvalidArgument, match=r"between -2\*\*63 and 2\*\*64 - 1") as refusal:
            parse_request_parameters({name: seed}, None)
        assert refusal.value.field == name


def test_a_tensor_replaces_what_chooses_tokens_and_nothing_else() -> None:
    tensor = replacing(json.dumps({"temperature": 0, "stop_token_ids": [1, 2], "return_finish_reason": True}))
    tokens, options = parse_request_parameters({"max_tokens": 5, "return_output_ids": True}, tensor)
    assert tokens == SamplingParams(temperature=0, stop_token_ids=(1, 2))
    assert options == ResponseOptions(return_output_ids=True, return_finish_reason=True)


def test_wishes_for_nothing_and_words_of_the_protocol_pass() -> None:
    assert sampling(bad_words="", stop_words="", beam_width=1, stop=False, logprobs=False, n=1) == SamplingParams()
    assert (
        sampling(id="x", sequence_id=4, triton_enable_empty_final_response=True, temperature=None) == SamplingParams()
    )


@pytest.mark.parametrize(
    ("parameters", "field", "message"),
    [
        ({"max_token": 5}, "max_token", "unknown parameter 'max_token'; did you mean 'max_tokens'?"),
        ({"max_tokenss": 5}, "max_tokenss", "unknown parameter 'max_tokenss'; did you mean 'max_tokens'?"),
        ({"no_such": 5}, "no_such", "unknown parameter 'no_such'"),
        ({"beam_width": 2}, "beam_width", "'beam_width' is not supported yet"),
        ({"sampling_param_best_of": 2}, "sampling_param_best_of", "'sampling_param_best_of' is not supported yet"),
        ({"audio": "AA=="}, "audio", "'audio' is not supported yet"),
        ({"prompt_logprobs": 5}, "prompt_logprobs", "'prompt_logprobs' is not supported yet"),
        ({"timeout": []}, "timeout", "'timeout' must be an integer, got a list"),
        ({"num_return_sequences": [1]}, "num_return_sequences", "must be an integer, got a list"),
        ({"stop": True}, "stop", "'stop' must be a string, got a boolean"),
        ({"stop_words": ["a", 1]}, "stop_words", r"'stop_words\[1\]' must be a string, got an integer"),
        ({"n": 0}, "n", "'n' must be an integer >= 1"),
        ({"num_return_sequences": 129}, "num_return_sequences", "'num_return_sequences' must be an integer <= 128"),
        ({"request_output_len": "x"}, "request_output_len", "'request_output_len' must be an integer, got a string"),
        ({"request_output_len": -1}, "request_output_len", "'request_output_len': max_tokens must be at least 0"),
        ({"timeout": 2**63}, "timeout", "'timeout' must be an integer <= 9223372036854775807"),
        ({"timeout": "1" * 400}, "timeout", "'timeout' must be an integer <= 9223372036854775807"),
        ({"presence_penalty": 3}, "presence_penalty", "between -2 and 2"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "'logit_bias'"),
        ({"max_tokens": "many"}, "max_tokens", "'max_tokens' must be an integer, got a string"),
        ({"max_tokens": -1}, "max_tokens", "max_tokens must be at least 0"),
        ({"stream": "maybe"}, "stream", "'stream' must be a boolean, got a string"),
        ({"max_tokens": 1, "request_output_len": 2}, "request_output_len", "says again what 'max_tokens' says"),
    ],
)
def test_everything_else_is_refused_by_name(parameters: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as refusal:
        parse_request_parameters(parameters, None)
    assert refusal.value.field == field


def test_what_nobody_knows_is_ignored_and_told() -> None:
    asked = InferRequest(id="", inputs=PROMPT, parameters={"trace_id": "x", "max_tokens": 5, "colour": 3})
    parsed = parse_infer_request(asked, OWN_LAYOUT)
    assert (parsed.ignored, parsed.requests[0].sampling.max_tokens) == (["trace_id", "colour"], 5)
    ignored: list[str] = []
    parse_request_parameters({}, replacing('{"colour": null, "max_tokns": null}'), ignored=ignored)
    assert ignored == [], "a null asks for nothing"
    refused = {"max_tokns": 5, "IMAGE": 1, "mirostat": 2, "logprob_token_ids": [1], "do_sample": False}
    for name, value in refused.items():
        with pytest.raises(InvalidArgument) as refusal:
            parse_infer_request(InferRequest(id="", inputs=PROMPT, parameters={name: value}), OWN_LAYOUT)
        assert refusal.value.field == name
    with pytest.raises(InvalidArgument, match="unknown parameter 'field 64'"):
        parse_request_parameters({f"field {number}": 1 for number in range(65)}, None, ignored=[])


def test_a_sampler_that_is_off_asks_for_nothing() -> None:
    off = {"mirostat": 0, "no_repeat_ngram_size": 0, "dry_multiplier": 0.0, "xtc_probability": False, "top_a": 0}
    assert parse_request_parameters(off, None) == parse_request_parameters({}, None)


@pytest.mark.parametrize("text", ["{", "[1]", "nan", "[" * 100_000, r'{"max_tokens": "\ud800"}'])
def test_a_tensor_that_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        parse_request_parameters({}, replacing(text))
    assert refusal.value.field == "sampling_parameters"


def test_a_tensor_names_its_own_fields() -> None:
    with pytest.raises(InvalidArgument) as refusal:
        parse_request_parameters({}, replacing('{"stop_token_ids": [1, "x"]}'))
    assert refusal.value.field == "stop_token_ids"


def test_what_vllms_clients_say_of_tokens() -> None:
    asked = {"allowed_token_ids": [5], "skip_special_tokens": False, "truncate_prompt_tokens": -1}
    expected = SamplingParams(allowed_token_ids=(5,), skip_special_tokens=False, truncate_prompt_tokens=-1)
    assert parse_request_parameters({}, replacing(json.dumps(asked)))[0] == expected
    plain = {"allowed_token_ids": 5, "sampling_param_skip_special_tokens": "false", "truncate_prompt_tokens": "-1"}
    assert sampling(**plain) == expected
    with pytest.raises(InvalidArgument, match="allowed_token_ids must be at least one token, got 0"):
        parse_request_parameters({}, replacing('{"allowed_token_ids": []}'))


def test_a_timeout_is_in_microseconds_and_not_negative() -> None:
    assert parse_request_parameters({"timeout": 1_500_000}, None)[1].timeout == 1_500_000
    assert (
        parse_infer_request(InferRequest(inputs=PROMPT, parameters={"timeout": 1_500_000}), OWN_LAYOUT)
        .requests[0]
        .timeout
        == 1.5
    )
    with pytest.raises(InvalidArgument, match="timeout"):
        parse_request_parameters({"timeout": -1}, None)


def test_a_negative_priority_is_refused_as_on_every_door() -> None:
    for parameters in ({"priority": -3}, {"priority": "-3"}):
        with pytest.raises(InvalidArgument, match="priority must be at least 0, got -3") as refusal:
            parse_infer_request(InferRequest(inputs=PROMPT, parameters=parameters), OWN_LAYOUT)
        assert refusal.value.field == "priority"


def test_a_guide_and_its_type_come_together() -> None:
    schema = {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": "{}", "lora_name": "a"}
    asked = parse_infer_request(InferRequest(inputs=PROMPT, parameters=schema), OWN_LAYOUT).requests[0]
    assert (asked.guided_decoding, asked.adapter) == (GuidedDecoding("json_schema", "{}"), "a")
    plain = {"guided_decoding_guide_type": "json"}
    assert parse_infer_request(InferRequest(inputs=PROMPT, parameters=plain), OWN_LAYOUT).requests[
        0
    ].guided_decoding == GuidedDecoding("json")
    for wrong, field in [
        ({"guided_decoding_guide": "{}"}, "guided_decoding_guide_type"),
        ({"guided_decoding_guide_type": "regex"}, "guided_decoding_guide"),
        (schema | {"guided_decoding_guide_type": "json"}, "guided_decoding_guide"),
        (schema | {"guided_decoding_guide_type": "yaml"}, "guided_decoding_guide_type"),
    ]:
        with pytest.raises(InvalidArgument) as refusal:
            parse_infer_request(InferRequest(inputs=PROMPT, parameters=wrong), OWN_LAYOUT)
        assert refusal.value.field == field
