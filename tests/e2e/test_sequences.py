"""Stateful models of a Triton user's repository, asked by Triton's own client over HTTP and over gRPC streams."""

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from .models import write_config
from .serving import Server, served_well
from .tensors import given

OLDEST = "oldest { max_candidate_sequences: 3 preferred_batch_size: [ 2 ] }"
DIRECT = "direct { max_queue_delay_microseconds: 500 minimum_slot_utilization: 0.25 }"
IDLE = "max_sequence_idle_microseconds: 600000000"
INITIAL = 'dims: 1 initial_state { name: "i" data_type: TYPE_INT32 dims: 1 data_file: "hundred" }'


@pytest.fixture(scope="module")
def server(sibling: Callable[[str], ModuleType], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models, repository = sibling("onnx_models.py"), tmp_path_factory.mktemp("stateful") / "models"
    begin, words = "sequence_batching {", models.ACCUMULATOR.replace("INT64", "STRING")
    for name, config in (
        ("oldest", models.ACCUMULATOR.replace(begin, f"{begin} {IDLE} {OLDEST}")),
        ("direct", models.ACCUMULATOR.replace(begin, f"{begin} {IDLE} {DIRECT}")),
        ("words", words.replace("dims: 1 }\n}", f"{INITIAL} }}\n}}")),
    ):
        version = write_config(repository, name, config)
        models.write_accumulator(version / "model.onnx", text_ids=name == "words")
    (repository / "words" / "initial_state").mkdir()
    (repository / "words" / "initial_state" / "hundred").write_bytes(np.int32(100).tobytes())
    with served_well(repository.parent / "t", "--model-repository", str(repository)) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with triton.InferenceServerClient(server.http_address) as connected:
        yield connected


def value(number: int, module: Any = triton, rows: int = 1) -> Any:
    return given(module, "X", np.full((rows, 1), number, np.int32))


def whole(server: Server, model: str, name: int | str, numbers: list[int]) -> list[int]:
    """A sequence from its start to its end, each request after the answer to the one before."""
    sums = []
    with triton.InferenceServerClient(server.http_address) as client:
        for place, number in enumerate(numbers):
            flags = {"sequence_start": not place, "sequence_end": place == len(numbers) - 1}
            made = client.infer(model, [value(number)], sequence_id=name, **flags)
            sums.append(made.as_numpy("SUM").item())
            assert made.as_numpy("WHO").item() == name
            assert made.as_numpy("TOLD").tolist() == [[int(flags["sequence_start"]), 1, int(flags["sequence_end"])]]
    return sums


@pytest.mark.parametrize("model", ["oldest", "direct"])
def test_sequences_of_many_clients_do_not_mix(server: Server, model: str) -> None:
    """More of them than there are seats."""
    sequences = [[name + step for step in range(5 + name % 4)] for name in range(1, 21)]
    with ThreadPoolExecutor(12) as clients:
        sums = clients.map(lambda name: whole(server, model, name, sequences[name - 1]), range(1, 21))
    assert list(sums) == [np.cumsum(numbers).tolist() for numbers in sequences]
    statistics = httpx.get(f"{server.url}/v2/models/{model}/stats").json()["model_stats"][0]
    assert statistics["inference_count"] == sum(map(len, sequences))
    assert statistics["execution_count"] <= statistics["inference_count"]


@pytest.mark.parametrize("model", ["oldest", "direct"])
def test_sequences_of_one_stream_are_answered_in_the_order_of_its_requests(server: Server, model: str) -> None:
    heard: queue.Queue[Any] = queue.Queue()
    with triton_grpc.InferenceServerClient(server.grpc_address) as client:
        client.start_stream(lambda result, error: heard.put(error or result))
        for step in range(8):
            for name in range(101, 109):
                flags = {"sequence_start": step == 0, "sequence_end": step == 7}
                client.async_stream_infer(
                    model, [value(name + step, triton_grpc)], sequence_id=name, request_id=f"{name}", **flags
                )
        results = [heard.get(timeout=60) for _ in range(64)]
        client.stop_stream()
    assert [each.get_response().id for each in results] == [str(name) for name in range(101, 109)] * 8
    sums = [each.as_numpy("SUM").item() for each in results]
    for name in range(101, 109):
        assert sums[name - 101 :: 8] == np.cumsum([name + step for step in range(8)]).tolist()


def test_ids_may_be_texts_and_states_may_begin_with_a_file(server: Server) -> None:
    with triton.InferenceServerClient(server.http_address) as client:
        begun = client.infer("words", [value(1)], sequence_id="één", sequence_start=True)
        ended = client.infer("words", [value(2)], sequence_id="één", sequence_end=True)
    assert [each.as_numpy("SUM").item() for each in (begun, ended)] == [101, 103]
    assert begun.as_numpy("WHO").item() == "één".encode()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"sequence_id": 7}, "sequence 7 to model 'oldest' must specify the START flag on the first request of the se"),
        ({}, "inference request to model 'oldest' must specify a non-zero or non-empty correlation ID"),
        ({"sequence_id": "x"}, "control 'ID' data-type is 'BYTES', but model 'oldest' expects 'INT64'"),
    ],
)
def test_a_request_of_no_sequence_is_refused(server: Server, client: Any, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InferenceServerException, match=says) as refused:
        client.infer("oldest", [value(1)], **fields)
    assert refused.value.status() == "400"
    with (
        triton_grpc.InferenceServerClient(server.grpc_address) as other,
        pytest.raises(InferenceServerException, match=says) as refused,
    ):
        other.infer("oldest", [value(1, triton_grpc)], **fields)
    assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_a_batch_of_requests_is_no_request_of_a_sequence(client: Any) -> None:
    with pytest.raises(InferenceServerException, match="must specify batch-size 1 due to requirements of sequence ba"):
        client.infer("direct", [value(1, rows=2)], sequence_id=1, sequence_start=True)


def test_a_client_sees_neither_controls_nor_states(client: Any) -> None:
    metadata = client.get_model_metadata("oldest")
    assert [each["name"] for each in metadata["inputs"]] == ["X"]
    assert [output["name"] for output in metadata["outputs"]] == ["SUM", "TOLD", "WHO"]
    shown = client.get_model_config("oldest")["sequence_batching"]
    assert (shown["oldest"]["max_candidate_sequences"], shown["max_sequence_idle_microseconds"]) == (3, 600000000)
    assert "sequence" in client.get_server_metadata()["extensions"]


def test_a_sequence_outlives_the_connection_that_began_it(server: Server, client: Any) -> None:
    with triton_grpc.InferenceServerClient(server.grpc_address) as leaving:
        heard: queue.Queue[Any] = queue.Queue()
        leaving.start_stream(lambda result, error: heard.put(error or result))
        leaving.async_stream_infer("oldest", [value(5, triton_grpc)], sequence_id=900, sequence_start=True)
        assert heard.get(timeout=60).as_numpy("SUM").item() == 5
    assert 'charonia_sequences_open{model="oldest",version="1"} 1\n' in httpx.get(server.metrics_url).text
    # Nothing of it ran: the sequence is open still, and anybody may go on.
    assert client.infer("oldest", [value(1)], sequence_id=900, sequence_end=True).as_numpy("SUM").item() == 6
