from typing import Any

import pytest

from charonia.core.errors import InvalidArgument
from charonia.core.logprobs import PromptToken
from charonia.core.request import FinishReason, GenerateChunk, GenerateRequest, Usage
from charonia.extras.dynamo.tokens import Role, chunk_fields, read_request

from ...scored_tokens import scored


def read(role: Role = "agg", **fields: Any) -> GenerateRequest:
    return read_request({"token_ids": [5, 6], "model": "m", **fields}, "r1", role)


def test_fields_of_a_request_become_ours() -> None:
    request = read(
        sampling_options={
            "n": 1, "temperature": 0.5, "top_k": -1, "seed": 3, "guided_decoding": {"regex": "a+"}, "top_p": None,
        },
        stop_conditions={
            "max_tokens": 7, "min_tokens": 2, "stop": ["x"], "stop_token_ids": [8, 9], "stop_token_ids_hidden": [9, 2],
        },
        output_options={"logprobs": 2, "prompt_logprobs": "", "skip_special_tokens": True},
        routing={"priority": -3, "cache_salt": "s", "dp_rank": 0},
    )  # fmt: skip
    sampling = request.sampling
    assert (request.id, request.prompt, request.priority, request.cache_salt) == ("r1", (5, 6), 3, "s")
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0.5, -1, None, 3)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.stop_token_ids) == (7, 2, (8, 9, 2))
    assert (sampling.stop, sampling.logprobs, sampling.prompt_logprobs) == ((), 2, None)
    assert request.guided_decoding is not None
    assert (request.guided_decoding.kind, request.guided_decoding.text) == ("regex", "a+")
    assert request.kv_transfer is None
    assert not request.reads_answer


def test_what_is_left_out_is_the_models() -> None:
    request = read()
    assert (request.sampling.max_tokens, request.sampling.temperature, request.priority) == (None, None, 0)
    assert read(routing={"priority": 5}).priority == 0


@pytest.mark.parametrize(
    ("fields", "adapter"), [({"model": "a"}, "a"), ({"routing": {"lora_name": "a"}}, "a"), ({}, "")]
)
def test_an_adapter_is_the_model_that_is_asked_for(fields: dict[str, Any], adapter: str) -> None:
    assert read_request({"token_ids": [5], "model": "m", **fields}, "r1", "agg", ["a"]).adapter == adapter


def test_token_ids_may_be_packed() -> None:
    assert read(token_ids=b"\x05\0\0\0\xff\x01\0\0").prompt == (5, 511)


def test_reasoning_and_words() -> None:
    request = read(stop_conditions={"max_thinking_tokens": 4}, sampling_options={"bad_words_token_ids": [[1, 2]]})
    assert (request.reads_answer, request.thinking_budget, request.bad_word_ids) == (True, 4, ((1, 2),))
    assert read(require_reasoning=True).reads_answer


def test_a_prompt_is_held_whatever_its_first_token() -> None:
    request = read("prefill", stop_conditions={"max_tokens": 9, "min_tokens": 3, "stop_token_ids": [1]})
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.ignore_eos, sampling.stop_token_ids, sampling.min_tokens) == (1, True, (), 0)
    assert request.kv_transfer is not None
    assert request.kv_transfer.do_remote_decode


def test_an_answer_begins_where_the_prompt_was_computed() -> None:
    params = {"do_remote_prefill": True, "remote_request_id": "h", "remote_host": "127.0.0.1", "remote_port": 9}
    result = {"disaggregated_params": {"kv_transfer_params": params}}
    transfer = read("decode", prefill_result=result).kv_transfer
    assert transfer is not None
    assert (transfer.remote_request_id, transfer.remote_port) == ("h", 9)
    assert read("agg", prefill_result=result).kv_transfer is None
    assert read("decode").kv_transfer is None  # nobody computed it: the worker does
    assert read("prefill", _HEALTH_CHECK=True).kv_transfer is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"sampling_options": {"n": 2}}, "n"),
        ({"sampling_options": {"best_of": 3}}, "best_of"),
        ({"sampling_options": {"use_beam_search": True}}, "use_beam_search"),
        ({"sampling_options": {"temperature": -1}}, "temperature"),
        ({"sampling_options": {"top_k": "many"}}, "top_k"),
        ({"sampling_options": {"guided_decoding": {"regex": "a", "choice": ["b"]}}}, "guided_decoding.regex"),
        ({"multi_modal_data": {"image_url": [{"Url": "data:"}]}}, "multi_modal_data"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        read(**fields)
    assert refused.value.field == field


def test_chunks_have_the_contracts_fields() -> None:
    usage = Usage(5, 1, 4)
    assert chunk_fields(GenerateChunk(text="a", token_ids=(7,), usage=usage)) == {"token_ids": [7], "index": 0}
    likeliest = (8, "b", -0.1)
    chunk = GenerateChunk(
        text="a",
        token_ids=(7,),
        usage=usage,
        finish_reason=FinishReason.LENGTH,
        logprobs=(scored(7, "a", -2.0, likeliest, (7, "a", -2.0), rank=2),),
        prompt_logprobs=(PromptToken(1, "x"), PromptToken(2, "y", scored(2, "y", -3.0, likeliest), 9)),
        kv_transfer_params={"do_remote_prefill": True},
    )
    fields = chunk_fields(chunk)
    assert (fields["finish_reason"], fields["log_probs"]) == ("length", [-2.0])
    assert fields["completion_usage"] == {
        "prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6, "prompt_tokens_details": {"cached_tokens": 4},
    }  # fmt: skip
    assert fields["top_logprobs"][0][0] == {"rank": 1, "token_id": 8, "token": "b", "logprob": -0.1, "bytes": [98]}
    assert fields["engine_data"]["prompt_logprobs"] == [
        None,
        {
            "8": {"logprob": -0.1, "rank": 1, "decoded_token": "b"},
            "2": {"logprob": -3.0, "rank": 9, "decoded_token": "y"},
        },
    ]
    assert fields["disaggregated_params"] == {"kv_transfer_params": {"do_remote_prefill": True}}


@pytest.mark.parametrize(("reason", "word"), [("stop", "stop"), ("abort", "cancelled"), ("error", "error")])
def test_ends_have_dynamos_words(reason: str, word: str) -> None:
    chunk = GenerateChunk(text="", token_ids=(), usage=Usage(1, 0), finish_reason=FinishReason(reason))
    assert chunk_fields(chunk)["finish_reason"] == word
