"""Repositories that people have, served as they are: the layout of Triton's vLLM backend, and what `charonia import`
makes of checkpoints and files of each kind."""

import json
import queue
import re
import subprocess
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import httpx
import numpy as np
import onnx
import pytest
import torch
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from charonia.cli.model_import import import_model

from .models import FAKE, write_config
from .serving import Server, served_well
from .tensors import given

PROMPT = "def fibonacci"
SAMPLING = {"temperature": 0.8, "seed": 7, "max_tokens": 24, "ignore_eos": True, "top_k": 50}
ENGINE = {"max_model_len": 256, "num_gpu_blocks_override": 64, "gpu_memory_utilization": 0.5, "swap_space": 4}


class Imported(NamedTuple):
    """A repository, and the last line that `charonia import` printed for each model."""

    repository: Path
    lines: dict[str, str]


@pytest.fixture(scope="module")
def imported(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: Path, sibling: Callable[[str], ModuleType]
) -> Imported:
    repository, lines = tmp_path_factory.mktemp("imported") / "models", {}
    sources = {"own": checkpoint, **write_sources(sibling, tmp_path_factory.mktemp("sources"))}
    for name, source in sources.items():
        with redirect_stdout(StringIO()) as said:
            import_model(str(source), repository, name, copied=name == "identity")
        assert "\n  check           good: " in said.getvalue()
        lines[name] = said.getvalue().splitlines()[-1].strip()
    return Imported(repository, lines)


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory,
    imported: Imported,
    checkpoint: Path,
    tokenizer_only: Path,
    loras: Path,
) -> Iterator[Server]:
    repository = imported.repository
    version = write_config(repository, "vllm", 'backend: "vllm" instance_group [ { count: 1 kind: KIND_MODEL } ]')
    (version / "model.json").write_text(json.dumps({"model": str(checkpoint), **ENGINE}))
    parameters = "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
        for key, value in {**FAKE, "fake_step_seconds": 0.05, "kv_cache_blocks": 160}.items()
    )
    version = write_config(repository, "slow", f'backend: "vllm" {parameters}')
    (version / "model.json").write_text(json.dumps({"model": str(tokenizer_only), "enable_lora": "true"}))
    (version / "multi_lora.json").write_text(json.dumps({"alpaca": str(loras / "a")}))
    with served_well(tmp_path_factory.mktemp("v") / "t", "--model-repository", str(repository)) as running:
        yield running


class Halved(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4, bias=False)
        torch.nn.init.eye_(self.linear.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) / 2


def write_sources(sibling: Callable[[str], ModuleType], directory: Path) -> dict[str, Path]:
    """Models of files by the names that they are to have; encoders are imported in test_encoders.py."""
    sibling("onnx_models.py").write_identity(directory / "identity.onnx", onnx.TensorProto.FLOAT, ("n", 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(Halved()).save(str(directory / "halved.pt"))
    return {path.stem: path for path in directory.iterdir()}


def generate(server: Server, model: str, **body: Any) -> Any:
    response = httpx.post(f"{server.url}/v2/models/{model}/generate", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture(scope="module")
def own_text(server: Server) -> str:
    """What `backend: "charonia"` makes of the prompt."""
    text: str = generate(server, "own", text_input=PROMPT, **SAMPLING)["text_output"]
    assert text
    return text


def test_the_tensors_are_the_backends(server: Server) -> None:
    metadata = httpx.get(f"{server.url}/v2/models/vllm").json()
    assert metadata["inputs"][0] == {"name": "text_input", "datatype": "BYTES", "shape": [1]}
    assert len(metadata["inputs"]) == 11
    assert {output["name"]: output["datatype"] for output in metadata["outputs"]} == {
        "text_output": "BYTES",
        "finish_reason": "BYTES",
        "cumulative_logprob": "FP32",
        "logprobs": "BYTES",
        "num_input_tokens": "UINT32",
        "num_output_tokens": "UINT32",
    }
    config = httpx.get(f"{server.url}/v2/models/vllm/config").json()
    assert (config["backend"], config["max_batch_size"]) == ("vllm", 0)
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert "engine arguments of vLLM without effect here: swap_space (what has no room" in server.said


def test_a_whole_answer_begins_with_the_prompt(server: Server, own_text: str) -> None:
    body = {"text_input": PROMPT, "parameters": {"stream": False, **SAMPLING}}
    assert generate(server, "vllm", **body)["text_output"] == PROMPT + own_text
    alone = generate(server, "vllm", text_input=PROMPT, exclude_input_in_output=True, **SAMPLING)
    assert alone["text_output"] == own_text
    as_json = json.dumps(SAMPLING | {"n": 2, "stop": ["never said"]})
    both = generate(server, "vllm", text_input=PROMPT, sampling_parameters=as_json, return_num_output_tokens=True)
    assert both["text_output"][0] == PROMPT + own_text
    assert both["num_output_tokens"] == [24, 24]


def test_logprobs_are_json_beside_each_token(server: Server) -> None:
    body = {"text_input": PROMPT, "return_logprobs": True, "return_cumulative_logprob": True, **SAMPLING, "logprobs": 2}
    answer = generate(server, "vllm", **body)
    tokens = json.loads(answer["logprobs"])
    assert len(tokens) == SAMPLING["max_tokens"]
    chosen = [next(iter(token.values())) for token in tokens]
    assert sum(each["logprob"] for each in chosen) == pytest.approx(answer["cumulative_logprob"], abs=1e-4)
    assert all(each["rank"] >= 1 for each in chosen)
    assert {value["rank"] for token in tokens for value in token.values()} > {1, 2}
    assert generate(server, "vllm", text_input=PROMPT, return_logprobs=True, **SAMPLING)["logprobs"] == "null"


def test_a_stream_has_the_same_text_without_the_prompt(server: Server, own_text: str) -> None:
    url = f"{server.url}/v2/models/vllm/generate_stream"
    body = {"text_input": PROMPT, "stream": True, "return_finish_reason": True, **SAMPLING}
    with httpx.stream("POST", url, json=body, timeout=60) as response:
        events = [json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line]
    assert "".join(event["text_output"] for event in events) == own_text
    assert [event["finish_reason"] for event in events] == ["None"] * (len(events) - 1) + ["length"]
    with httpx.stream("POST", url, json={"text_input": PROMPT, **SAMPLING}, timeout=60) as response:
        [event] = [json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line]
    assert event["text_output"] == PROMPT + own_text, "unlike our own models, this one streams only when it is told to"


def streamed(server: Server, **inputs: Any) -> list[Any]:
    """The responses that tritonclient's stream gets, up to the final one or an error."""
    answers: queue.Queue[Any] = queue.Queue()
    tensors = [
        given(triton, name, np.array([value], bool if isinstance(value, bool) else object))
        for name, value in inputs.items()
    ]
    found = []
    with triton.InferenceServerClient(server.grpc_address) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        client.async_stream_infer("vllm", tensors, enable_empty_final_response=True)
        while True:
            answer = answers.get(timeout=60)
            found.append(answer)
            if isinstance(answer, Exception) or answer.get_response().parameters["triton_final_response"].bool_param:
                return found


def test_tritonclient_streams(server: Server, own_text: str) -> None:
    wanted = dict.fromkeys(("return_num_output_tokens", "return_num_input_tokens", "return_cumulative_logprob"), True)
    answers = streamed(
        server, text_input=PROMPT.encode(), stream=True, sampling_parameters=json.dumps(SAMPLING).encode(), **wanted
    )
    told = [answer for answer in answers if answer.get_response().outputs]
    assert b"".join(answer.as_numpy("text_output")[0] for answer in told).decode() == own_text
    assert sum(int(answer.as_numpy("num_output_tokens")[0]) for answer in told) == SAMPLING["max_tokens"]
    assert {answer.as_numpy("num_input_tokens").dtype for answer in told} == {np.dtype(np.uint32)}
    sums = [float(answer.as_numpy("cumulative_logprob")[0]) for answer in told]
    assert sums == sorted(sums, reverse=True)


def test_each_imported_model_answers_the_line_that_was_printed(server: Server, imported: Imported) -> None:
    answers = {}
    for name, line in imported.lines.items():
        code = line.replace("localhost:8000", server.http_address)
        run = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True, timeout=60)
        answers[name] = run.stdout
    assert answers.pop("own").startswith('data: {"model_name":"own"')
    found = {name: json.loads(answer) for name, answer in answers.items()}
    assert found["halved"]["outputs"][0]["data"] == [0.0] * 4
    assert found["identity"]["outputs"][0]["data"] == [0.0] * 4


def test_refusals_name_what_and_have_their_status(server: Server) -> None:
    url = f"{server.url}/v2/models/vllm/generate"
    for extra, text in (
        ({"image": ["aGk="]}, "image[0]: this model takes no image"),
        ({"lora_name": "alpaca"}, "LoRA feature is not enabled."),
        ({"sampling_parameters": '{"lora_name": "alpaca"}'}, "LoRA feature is not enabled."),
        ({"guided_decoding": '{"regexp": "a"}'}, "'guided_decoding.regexp' is unknown"),
        ({"sampling_parameters": "{"}, "sampling_parameters is not JSON"),
        ({"stream": True, "exclude_input_in_output": False}, "`exclude_input_in_output` = False is not allowed."),
        ({"max_tokens": "many"}, "'max_tokens' must be an integer"),
    ):
        response = httpx.post(url, json={"text_input": PROMPT, **extra}, timeout=60)
        assert response.status_code == 400, response.text
        assert text in response.json()["error"]
    [refusal] = streamed(server, text_input=PROMPT.encode(), image=b"aGk=")
    assert isinstance(refusal, InferenceServerException)
    assert "image[0]: this model takes no image" in str(refusal)


def test_adapters_are_those_of_multi_lora_json(server: Server) -> None:
    assert generate(server, "slow", text_input=PROMPT, lora_name="alpaca", max_tokens=1)["text_output"]
    sampling = json.dumps({"lora_name": "dolly", "max_tokens": 1})
    body = {"text_input": PROMPT, "sampling_parameters": sampling}
    refusal = httpx.post(f"{server.url}/v2/models/slow/generate", json=body, timeout=60)
    assert (refusal.status_code, "adapter 'dolly' is not found" in refusal.text) == (404, True)
    listed = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert [(each["id"], each["parent"]) for each in listed if each["parent"]] == [("alpaca", "slow")]


def test_a_client_that_leaves_frees_its_cache(server: Server) -> None:
    body = {"text_input": PROMPT, "stream": True, "max_tokens": 2000}
    with httpx.stream("POST", f"{server.url}/v2/models/slow/generate_stream", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        server.until(lambda: held(server) > 0)
    server.until(lambda: held(server) == 0)
    server.until(lambda: "model=slow version=1 outcome=cancelled" in server.said)


def held(server: Server) -> float:
    """The share of the slow model's cache that running sequences hold."""
    metrics = httpx.get(server.metrics_url).text
    [line] = re.findall(r'^charonia_kv_cache_usage_ratio{.*model="slow".*} (.*)$', metrics, re.MULTILINE)
    return float(line)
