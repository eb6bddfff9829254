"""Python models whose requests are sequences: generated step by step in shared batches, or one after another."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_aio
import tritonclient.http as triton

from .models import write_config
from .serving import Server, served_well
from .tensors import given

GENERATE = """
import json, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "text_input", "data_type": "TYPE_STRING", "dims": [1]})
        config.add_output({"name": "text_output", "data_type": "TYPE_STRING", "dims": [1]})
        config.set_model_transaction_policy({"decoupled": True})
        config.set_max_batch_size(16)
        return config

    def initialize(self, args):
        self.state = {}

    def execute(self, requests):
        time.sleep(0.002)
        for request in requests:
            key = pb_utils.get_input_tensor_by_name(request, "correlation_id").as_numpy().item()
            if pb_utils.get_input_tensor_by_name(request, "start").as_numpy().item():
                prompt = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().item().decode()
                self.state[key] = prompt, 0
            prompt, number = self.state[key]
            self.state[key] = prompt, number + 1
            flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            if number + 1 < json.loads(request.parameters())["max_tokens"]:
                flags = 0
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            output = pb_utils.Tensor("text_output", np.array([[prompt + str(number)]], dtype=np.object_))
            request.get_response_sender().send(pb_utils.InferenceResponse([output]), flags=flags)
"""
ITERATIVE = """
backend: "python"
sequence_batching {
  iterative_sequence: true
  control_input [
    { name: "correlation_id" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] },
    { name: "start" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } ] }
  ]
  oldest {}
}
"""
SUM = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for r in requests:
            before, x = (pb_utils.get_input_tensor_by_name(r, name).as_numpy() for name in ("BEFORE", "X"))
            who = np.array([f"{r.correlation_id()!r} {r.flags()}"], dtype=object)
            after = before + x
            tensors = {"AFTER": after, "SUM": after, "WHO": who.reshape(1, 1)}
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor(*each) for each in tensors.items()]))
        return answers
"""
TENSORS = """
max_batch_size: 8
input { name: "X" data_type: TYPE_INT32 dims: [ 1 ] }
output [ { name: "SUM" data_type: TYPE_INT32 dims: [ 1 ] }, { name: "WHO" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
STATE = """
sequence_batching {
  state { input_name: "BEFORE" output_name: "AFTER" data_type: TYPE_INT32 dims: [ 1 ]
          initial_state { name: "zero" data_type: TYPE_INT32 dims: [ 1 ] zero_data: true } }
}
"""
STEP = """
platform: "ensemble"
ensemble_scheduling { step { model_name: "sum" model_version: -1 input_map { key: "X" value: "X" }
  output_map { key: "SUM" value: "SUM" } output_map { key: "WHO" value: "WHO" } } }
"""
CALLER = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(pb_utils.get_input_tensor_by_name(r, "X").as_numpy().ravel()) for r in requests]

    def answer(self, numbers):
        for index, number in enumerate(numbers):
            flags = (index == 0) + 2 * (index == len(numbers) - 1)
            x = pb_utils.Tensor("X", np.array([[number]], np.int32))
            request = pb_utils.InferenceRequest(
                model_name="sum", inputs=[x], requested_output_names=["SUM", "WHO"], correlation_id="bls", flags=flags
            )
            response = request.exec()
            if response.has_error():
                return pb_utils.InferenceResponse(error=response.error())
        return pb_utils.InferenceResponse(response.output_tensors())
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("sequences") / "models"
    caller = TENSORS.replace("max_batch_size: 8", "").replace("dims: [ 1 ]", "dims: [ -1, -1 ]")
    for name, code, config in (
        ("generate", GENERATE, ITERATIVE),
        ("sum", SUM, f'backend: "python" {TENSORS} {STATE}'),
        ("caller", CALLER, f'backend: "python" {caller}'),
    ):
        (write_config(repository, name, config) / "model.py").write_text(code)
    write_config(repository, "step", STEP + TENSORS)
    with served_well(repository.parent / "t", "--model-repository", str(repository)) as running:
        yield running


def statistics(server: Server, model: str) -> Any:
    return httpx.get(f"{server.url}/v2/models/{model}/stats").json()["model_stats"][0]


def until_nothing_is_open(server: Server) -> None:
    reading = 'charonia_sequences_open{model="generate",version="1"} 0\n'
    server.until(lambda: reading in httpx.get(server.metrics_url).text)


async def stream(client: Any, prompt: str, tokens: int, stop_after: int = 0) -> list[str]:
    """The texts of a gRPC stream; with `stop_after`, it is left then."""

    async def requests() -> Any:
        text = given(triton_grpc, "text_input", np.array([[prompt]], dtype=object))
        yield {"model_name": "generate", "inputs": [text], "parameters": {"max_tokens": tokens}}

    texts: list[str] = []
    responses = client.stream_infer(requests())
    async for result, error in responses:
        assert error is None
        texts.append(result.as_numpy("text_output").item().decode())
        if len(texts) == stop_after:
            responses.cancel()
            break
    return texts


async def test_streams_of_many_clients_share_their_batches(server: Server) -> None:
    lengths = [10 + index for index in range(16)]
    async with triton_aio.InferenceServerClient(server.grpc_address) as client:
        streams = await asyncio.gather(*(stream(client, f"{n}:", length) for n, length in enumerate(lengths)))
    assert streams == [[f"{n}:{token}" for token in range(length)] for n, length in enumerate(lengths)]
    counted = statistics(server, "generate")
    assert counted["inference_count"] == 16
    assert counted["execution_count"] < sum(lengths) / 2
    assert max(each["batch_size"] for each in counted["batch_stats"]) > 4
    until_nothing_is_open(server)


async def test_streams_that_are_left_free_their_slots(server: Server) -> None:
    """More of them than there are slots, at both endpoints; the others get all that is theirs."""
    body = {"text_input": "a", "max_tokens": 10**6}

    async def leave(client: httpx.AsyncClient) -> None:
        async with (
            client.stream("POST", "/v2/models/generate/generate_stream", json=body) as response,
            aclosing(response.aiter_lines()) as lines,
        ):
            assert json.loads((await anext(lines)).removeprefix("data: "))["text_output"] == "a0"

    async with (
        httpx.AsyncClient(base_url=server.url) as http,
        triton_aio.InferenceServerClient(server.grpc_address) as client,
    ):
        leaving = [leave(http) for _ in range(10)] + [stream(client, "a", 10**6, 3) for _ in range(10)]
        _, *whole = await asyncio.gather(asyncio.gather(*leaving), *(stream(client, "b", 9) for _ in range(4)))
    assert [len(each) for each in whole] == [9] * 4
    until_nothing_is_open(server)


@pytest.mark.parametrize("model", ["sum", "step"])
def test_a_state_goes_from_request_to_request(server: Server, model: str) -> None:
    """Of the model by itself, and as a step of an ensemble."""
    for module, address, name in (
        (triton, server.http_address, 5),
        (triton, server.http_address, "five"),
        (triton_grpc, server.grpc_address, 6),
        (triton_grpc, server.grpc_address, "six"),
    ):
        with module.InferenceServerClient(address) as client:
            for number in (1, 2, 3):
                x = given(module, "X", np.array([[number]], np.int32))
                start, end = number == 1, number == 3
                made = client.infer(model, [x], sequence_id=name, sequence_start=start, sequence_end=end)
                assert made.as_numpy("SUM").item() == number * (number + 1) // 2
                assert made.as_numpy("WHO").item().decode() == f"{name!r} {start + 2 * end}"
                assert made.as_numpy("AFTER") is None


def test_a_model_asks_for_a_sequence(server: Server) -> None:
    with triton.InferenceServerClient(server.http_address) as client:
        made = client.infer("caller", [given(triton, "X", np.array([[1, 2, 3, 4]], np.int32))])
    assert made.as_numpy("SUM").item() == 10
    assert made.as_numpy("WHO").item() == b"'bls' 2"
