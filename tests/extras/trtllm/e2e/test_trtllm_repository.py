"""Repositories of Triton's TensorRT-LLM backend, served as they are: the ensemble of four models, and `llmapi`."""

import json
import queue
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tritonclient.utils import InferenceServerException

from ....e2e.models import FAKE
from ....e2e.serving import Server, served_well
from ....e2e.tensors import given
from .trtllm_repository import TrtllmRepository, write_ascii_tokenizer

PROMPT = "The quick"
SAMPLED = {"temperature": 1.5, "seed": 7, "top_k": 50}
LENGTH = 24


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: Path, tokenizer_only: Path, loras: Path
) -> Iterator[Server]:
    models = tmp_path_factory.mktemp("models")
    ascii_only = write_ascii_tokenizer(tmp_path_factory.mktemp("ascii") / "ascii", checkpoint)
    repository = TrtllmRepository(models)
    repository.write_texts(ascii_only)
    modules = json.dumps({"named": str(loras / "a")}).replace('"', r"\"")
    repository.write_llm("tensorrt_llm", ascii_only, lora_cache_max_adapter_size="8", lora_modules=modules)
    repository.write_ensemble("ensemble", "tensorrt_llm")
    repository.write_llm("slow", tokenizer_only, **FAKE, fake_step_seconds=0.05, exclude_input_in_output="${x}")
    repository.write_bls("tensorrt_llm_bls", "tensorrt_llm")
    repository.write_bls("slow_bls", "slow")
    repository.write_llmapi("llmapi", ascii_only)
    with served_well(tmp_path_factory.mktemp("r") / "t", "--model-repository", str(models)) as running:
        yield running


def ask(server: Server, model: str, status: int = 200, **body: Any) -> Any:
    response = httpx.post(f"{server.url}/v2/models/{model}/generate", json=body, timeout=60)
    assert response.status_code == status, response.text
    return response.json()


def events(server: Server, model: str, **body: Any) -> list[Any]:
    url = f"{server.url}/v2/models/{model}/generate_stream"
    with httpx.stream("POST", url, json=body, timeout=60) as response:
        assert response.status_code == 200
        return [json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line]


@pytest.fixture(scope="module")
def own_text(server: Server) -> str:
    """What the engine itself makes of the prompt."""
    body = {"model": "tensorrt_llm", "prompt": PROMPT, "max_tokens": LENGTH, **SAMPLED}
    text: str = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
    assert text
    return text


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_the_text_is_the_engines_own(server: Server, own_text: str, model: str) -> None:
    body = {"text_input": PROMPT, "max_tokens": LENGTH, "bad_words": "", "stop_words": ""} | SAMPLED
    assert ask(server, model, **body)["text_output"] == own_text
    parts = events(server, model, **body | {"max_tokens": 8 * LENGTH}, stream=True)
    assert "".join(part["text_output"] for part in parts).startswith(own_text)
    assert ask(server, model, **body, exclude_input_in_output=False)["text_output"] == PROMPT + own_text


def test_llmapis_text_is_the_engines_own(server: Server, own_text: str) -> None:
    body = {f"sampling_param_{name}": value for name, value in SAMPLED.items()}
    body |= {"text_input": PROMPT, "sampling_param_max_tokens": LENGTH}
    whole = ask(server, "llmapi", **body, return_finish_reason=True)
    assert whole["text_output"] == own_text
    assert whole["finish_reason"] in ("stop", "length")
    parts = events(server, "llmapi", **body, streaming=True)
    assert "".join(part["text_output"] for part in parts) == own_text
    greedy = ask(server, "llmapi", text_input=PROMPT, sampling_param_temperature=0)["text_output"]
    assert ask(server, "llmapi", text_input=PROMPT)["text_output"] == greedy
    assert ask(server, "ensemble", text_input=PROMPT, max_tokens=32)["text_output"] == greedy
    refused = ask(server, "llmapi", 400, text_input=PROMPT, sampling_param_logits_post_processor_name="x")
    assert "sampling_param_logits_post_processor_name" in refused["error"]


def test_words_and_numbers(server: Server, own_text: str) -> None:
    body = {"text_input": PROMPT, "max_tokens": LENGTH, **SAMPLED}
    banned = ask(server, "ensemble", **body, bad_words=[own_text[0]])["text_output"]
    assert banned != own_text
    told = ask(server, "ensemble", **body, return_log_probs=True)
    assert told["cum_log_probs"] == pytest.approx(sum(told["output_log_probs"]), abs=1e-4)
    sampled = {f"sampling_param_{name}": value for name, value in SAMPLED.items()} | {"sampling_param_max_tokens": 24}
    other = ask(server, "llmapi", text_input=PROMPT, return_cumulative_logprob=True, **sampled)
    assert told["cum_log_probs"] == pytest.approx(other["cumulative_logprob"], abs=1e-4)
    assert told["arrival_time_ns"] < told["first_scheduled_time_ns"] < told["last_token_time_ns"]
    assert told["kv_cache_alloc_total_blocks"] > 0


def test_bls_ends_behind_a_stop_word(server: Server, own_text: str) -> None:
    body = {"text_input": PROMPT, "max_tokens": LENGTH, "stop_words": [own_text[3:5]], **SAMPLED}
    wanted = own_text[: own_text.index(own_text[3:5]) + 2]
    assert ask(server, "tensorrt_llm_bls", **body)["text_output"] == wanted
    parts = events(server, "tensorrt_llm_bls", **body, stream=True)
    assert "".join(part["text_output"] for part in parts) == wanted
    refused = ask(server, "tensorrt_llm_bls", 400, **body, num_draft_tokens=4)
    assert "input 'num_draft_tokens' is not supported" in refused["error"]


def test_several_answers_stream_side_by_side(server: Server, own_text: str) -> None:
    body = {"text_input": PROMPT, "max_tokens": LENGTH, "num_return_sequences": 2} | SAMPLED
    texts = ["", ""]
    for part in events(server, "tensorrt_llm_bls", **body, stream=True):
        texts[part["sequence_index"]] += part["text_output"]
    whole = ask(server, "tensorrt_llm_bls", **body)["text_output"]
    assert texts == whole
    assert texts[0] == own_text != texts[1]
    stopped = body | {"stop_words": [own_text[3:5]]}
    parts = events(server, "tensorrt_llm_bls", **stopped, stream=True)
    first = "".join(part["text_output"] for part in parts if part["sequence_index"] == 0)
    assert first == own_text[: own_text.index(own_text[3:5]) + 2]


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_a_guide_is_held_to(server: Server, model: str) -> None:
    constraint = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "(yes|no){2}"}
    answer = ask(server, model, text_input=PROMPT, max_tokens=20, **constraint)
    assert re.fullmatch("(yes|no){2}", str(answer["text_output"]).strip())


def test_leaving_bls_frees_the_sequence(server: Server) -> None:
    body = {"text_input": PROMPT, "max_tokens": 200, "stream": True, "end_id": -1}
    url = f"{server.url}/v2/models/slow_bls/generate_stream"
    with httpx.stream("POST", url, json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        server.until(lambda: running(server, "slow") == 1)
    server.until(lambda: running(server, "slow") == 0)


def test_what_is_not_there_is_refused_by_name(server: Server) -> None:
    body = {"text_input": PROMPT, "max_tokens": 4}
    for field, value in (
        ("beam_width", 2),
        ("prompt_vocab_size", 9),
        ("return_context_logits", True),
        ("guided_decoding_guide_type", "yaml"),
        ("IMAGE", 1),
    ):
        refused = ask(server, "ensemble", 400, **body, **{field: value})
        assert field in refused["error"], refused
    nothing = {"beam_width": 1, "lora_task_id": 0, "guided_decoding_guide_type": "", "decoder_text_input": ""}
    assert ask(server, "ensemble", **body, **nothing)["text_output"]


def test_an_adapter_that_a_client_brings_is_the_one_that_was_converted(server: Server, loras: Path) -> None:
    tensors = load_file(loras / "a" / "adapter_model.safetensors")
    modules = {"self_attn.q_proj": 1, "mlp.down_proj": 6}
    rows, config = [], []
    for name, down in tensors.items():
        if name.endswith("lora_A.weight"):
            up = tensors[name.replace("lora_A", "lora_B")]
            layer, _, module = name.removeprefix("base_model.model.model.layers.").partition(".")
            config.append((modules[module.removesuffix(".lora_A.weight")], int(layer), len(down)))
            rows.append(np.concatenate([down.ravel(), up.ravel()]))
    weights = np.zeros((1, len(rows), max(map(len, rows))), np.float16)
    for row, values in zip(weights[0], rows, strict=True):
        row[: len(values)] = values
    brought = {"lora_weights": weights, "lora_config": np.array([config], np.int32)}
    task = {"lora_task_id": np.array([[7]], np.uint64)}
    base = tokens(server)
    with pytest.raises(InferenceServerException, match=r"LoRA task 7 not found in cache\. Please send LoRA weights"):
        tokens(server, **task)
    assert tokens(server, **task, **brought) == tokens(server, **task) == tokens(server, lora_name="named") != base


def tokens(server: Server, lora_name: str = "", **inputs: NDArray[Any]) -> list[int]:
    """What `tensorrt_llm` answers to a prompt, greedily."""
    inputs |= {
        "input_ids": np.array([[20, 30, 40]], np.int32),
        "input_lengths": np.array([[3]], np.int32),
        "request_output_len": np.array([[12]], np.int32),
        "end_id": np.array([[-1]], np.int32),
    }
    heard: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with triton.InferenceServerClient(server.grpc_address) as client:
        client.start_stream(lambda result, error: heard.put((result, error)))
        sent = [given(triton, name, array) for name, array in inputs.items()]
        client.async_stream_infer("tensorrt_llm", sent, parameters={"lora_name": lora_name} if lora_name else None)
        result, error = heard.get(timeout=60)
        if error is not None:
            raise error
        answer: list[int] = result.as_numpy("output_ids").ravel().tolist()
        return answer


def running(server: Server, model: str) -> float:
    """Sequences that the model computes now."""
    lines = httpx.get(server.metrics_url).text.splitlines()
    [value] = [
        line.split()[-1]
        for line in lines
        if line.startswith("charonia_requests_running{") and f'model="{model}"' in line
    ]
    return float(value)


class TokenStream:
    """Requests of tritonclient's stream to one model of token ids."""

    def __init__(self, server: Server, model: str) -> None:
        self.answers: queue.Queue[Any] = queue.Queue()
        self._model = model
        self._client = triton.InferenceServerClient(server.grpc_address)
        self._client.start_stream(lambda result, error: self.answers.put(error or result))

    def send(self, request_id: str, **inputs: Any) -> None:
        tensors = [given(triton, name, np.asarray(value)) for name, value in inputs.items()]
        self._client.async_stream_infer(self._model, tensors, request_id=request_id, enable_empty_final_response=True)

    def __enter__(self) -> "TokenStream":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.stop_stream(cancel_requests=True)
        self._client.close()


def token_request(ids: list[int], length: int, **others: Any) -> dict[str, Any]:
    return {
        "input_ids": np.array([ids], np.int32),
        "input_lengths": np.array([[len(ids)]], np.int32),
        "request_output_len": np.array([[length]], np.int32),
        **others,
    }


def test_a_batch_of_token_ids(server: Server) -> None:
    rows = {
        "input_ids": np.array([[3, 4, 5], [8, 9, 0]], np.int32),
        "input_lengths": np.array([[3], [2]], np.int32),
        "request_output_len": np.array([[4], [2]], np.int32),
        "end_id": np.array([[-1], [-1]], np.int32),
        "stop_words_list": np.array([[[6, 7], [2, -1]], [[0, 0], [-1, -1]]], np.int32),
    }
    with TokenStream(server, "slow") as stream:
        stream.send("", **rows)
        result = stream.answers.get(timeout=60)
        assert result.as_numpy("output_ids").tolist() == [[[3, 4, 5, 6, 7]], [[8, 9, 10, 11, 0]]]
        assert result.as_numpy("sequence_length").tolist() == [[5], [4]]
        stream.send("", **token_request([3], 2, num_return_sequences=np.array([[2]], np.int32)))
        assert stream.answers.get(timeout=60).as_numpy("output_ids").tolist() == [[[3, 4, 5]] * 2]
        stream.send("", **(token_request([3], 2) | {"input_lengths": np.array([[2]], np.int32)}))
        assert "input_lengths must be between 1 and the 1" in str(stream.answers.get(timeout=60))


def test_a_second_request_stops_the_first(server: Server) -> None:
    endless = token_request([3], 200, streaming=[[True]], end_id=np.array([[-1]], np.int32))
    with TokenStream(server, "slow") as stream:
        stream.send("one", **endless)
        assert stream.answers.get(timeout=60).as_numpy("output_ids").tolist() == [[[4]]]
        stream.send("one", **token_request([3], 1, stop=[[True]]))
        while not isinstance(answer := stream.answers.get(timeout=60), InferenceServerException):
            pass
        assert "Request cancelled by client" in str(answer)
        server.until(lambda: running(server, "slow") == 0)
        stream.send("", **token_request([3], 1, stop=[[True]]))
        while not isinstance(answer := stream.answers.get(timeout=60), InferenceServerException):
            pass
        assert "A request id must be provided" in str(answer)
        stream.send("two", **endless)
        server.until(lambda: running(server, "slow") == 1)
    server.until(lambda: running(server, "slow") == 0)
