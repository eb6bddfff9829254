"""The gRPC endpoint of a real server, driven by tritonclient: sync with callbacks, and aio."""

import asyncio
import queue
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

from .tensors import given

FLAGS = ["--executor", "fake", "--fake-vocab-size", "384", "--served-model-name", "m"]
STOPPING = "GRPC server is shutting down and has stopped accepting new requests."


@pytest.fixture
def client(server: Any) -> Iterator[Any]:
    with triton.InferenceServerClient(server.grpc_address) as connected:
        yield connected


def text(prompt: str) -> list[Any]:
    return [given(triton, "text_input", np.array([prompt.encode()], np.object_))]


def ids(*prompt: int) -> list[Any]:
    return [given(triton, "input_ids", np.array(prompt, np.int32))]


def streaming(inputs: list[Any]) -> list[Any]:
    return [*inputs, given(triton, "stream", np.array([True]))]


class Answers:
    """What a stream's callback heard, in order."""

    def __init__(self) -> None:
        self._heard: queue.Queue[tuple[Any, Any]] = queue.Queue()

    def hear(self, result: Any, error: Any) -> None:
        self._heard.put((result, error))

    def next(self) -> tuple[Any, Any]:
        return self._heard.get(timeout=60)

    def of_one_request(self) -> list[Any]:
        """Responses up to the final one."""
        responses = []
        while not responses or not final(responses[-1]):
            result, error = self.next()
            assert error is None
            responses.append(result)
        return responses


@contextmanager
def stream(client: Any) -> Iterator[Answers]:
    answers = Answers()
    client.start_stream(answers.hear)
    try:
        yield answers
    finally:
        client.stop_stream(cancel_requests=True)


def final(result: Any) -> bool:
    return bool(result.get_response().parameters["triton_final_response"].bool_param)


def words(results: list[Any]) -> str:
    return b"".join(result.as_numpy("text_output")[0] for result in results if result.get_response().outputs).decode()


def test_health_and_metadata(server: Any, client: Any) -> None:
    assert client.is_server_live()
    assert not client.is_server_ready(), "a known model is broken, and readiness is strict"
    assert client.is_model_ready("tiny")
    assert not client.is_model_ready("broken")
    assert not client.is_model_ready("no")
    over_http = httpx.get(f"{server.url}/v2").json()
    metadata = client.get_server_metadata(as_json=True)
    assert {**over_http, **metadata} == over_http
    over_http = httpx.get(f"{server.url}/v2/models/tiny").json()
    metadata = client.get_model_metadata("tiny")
    assert [tensor.name for tensor in metadata.inputs] == [tensor["name"] for tensor in over_http["inputs"]]
    assert [list(tensor.shape) for tensor in metadata.outputs] == [tensor["shape"] for tensor in over_http["outputs"]]


def test_grpc_says_what_http_says(server: Any, client: Any) -> None:
    settings = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    body = {"text_input": "def fibonacci", **settings}
    over_http = httpx.post(f"{server.url}/v2/models/tiny/generate", json=body).json()["text_output"]
    assert words([client.infer("tiny", text("def fibonacci"), parameters=settings)]) == over_http
    with stream(client) as answers:
        client.async_stream_infer("tiny", streaming(text("def fibonacci")), parameters=settings)
        responses = answers.of_one_request()
    assert len(responses) > 1
    assert words(responses) == over_http


def test_outputs_and_ids_come_back(client: Any) -> None:
    outputs = [triton.InferRequestedOutput("output_ids"), triton.InferRequestedOutput("finish_reason")]
    settings = {"max_tokens": 3}
    answer = client.infer("fake", ids(5, 6), request_id="a-7", outputs=outputs, parameters=settings)
    assert answer.get_response().id == "a-7"
    assert answer.as_numpy("output_ids").tolist() == [7, 8, 9]
    assert answer.as_numpy("finish_reason").tolist() == [b"length"]
    with pytest.raises(InferenceServerException, match=r"UNIMPLEMENTED.*decoupled transaction policy"):
        client.infer("fake", streaming(ids(5)))


def test_requests_of_one_stream_interleave(client: Any) -> None:
    with stream(client) as answers:
        client.async_stream_infer("slow", streaming(ids(1)), request_id="long", parameters={"max_tokens": 1000})
        result, _ = answers.next()
        assert result.get_response().id == "long"
        client.async_stream_infer("no", ids(1), request_id="wrong")
        client.async_stream_infer("fake", streaming(ids(1)), request_id="short", parameters={"max_tokens": 3})
        heard: dict[str, str] = {}
        while "short" not in heard:
            result, error = answers.next()
            if error is not None:
                heard["wrong"] = error.message()
            elif final(result):
                heard[result.get_response().id] = "done"
        assert heard == {"wrong": "Request for unknown model: 'no' is not found", "short": "done"}


def test_exactly_one_final_response(client: Any) -> None:
    with stream(client) as answers:
        for empty in (False, True):
            client.async_stream_infer(
                "fake", streaming(ids(1)), parameters={"max_tokens": 5}, enable_empty_final_response=empty
            )
            responses = answers.of_one_request()
            assert responses[-1].get_response().outputs
        client.async_stream_infer("fake", ids(1))
        assert len(answers.of_one_request()) == 1


BAD = [
    (text(""), {}),
    ([], {}),
    (text("x") + ids(1), {}),
    (ids(10**6), {}),
    (ids(-1), {}),
    (text("x"), {"max_tokens": -1}),
    (text("x"), {"mirostat": "y" * 100_000}),
    (text("x"), {"temperature": float("nan")}),
    (text("x " * 3000), {}),
]


@pytest.mark.parametrize(("inputs", "parameters"), BAD)
def test_bad_requests_are_refused(client: Any, inputs: Any, parameters: Any) -> None:
    with pytest.raises(InferenceServerException, match="INVALID_ARGUMENT"):
        client.infer("fake", inputs, parameters=parameters)
    with stream(client) as answers:
        client.async_stream_infer("fake", inputs, request_id="bad", parameters=parameters)
        _, error = answers.next()
        assert error is not None
        client.async_stream_infer("fake", ids(1), parameters={"max_tokens": 1})
        assert final(answers.next()[0])


def test_what_nobody_knows_is_ignored_and_named(client: Any) -> None:
    asked = {"wondrous": "y", "max_tokens": 1}
    whole = client.infer("fake", ids(1), parameters=asked).get_response()
    with stream(client) as answers:
        client.async_stream_infer("fake", ids(1), parameters=asked)
        streamed = answers.next()[0].get_response()
    for response in (whole, streamed):
        assert response.parameters["charonia_warning"].string_param == "ignored: wondrous"


def test_a_full_queue_is_refused_and_those_who_leave_make_room(server: Any, client: Any) -> None:
    def ask(max_tokens: int) -> None:
        client.async_stream_infer("slow", streaming(ids(1)), parameters={"max_tokens": max_tokens})

    with stream(client) as answers:
        ask(2000)
        answers.next()
        ask(2000)
        ask(2000)
        error = None
        while error is None:
            _, error = answers.next()
        assert "1 requests are waiting already" in error.message()
        code = "StatusCode.RESOURCE_EXHAUSTED"
        with (
            pytest.raises(InferenceServerException, match=code),
            triton.InferenceServerClient(server.grpc_address) as b,
        ):
            b.infer("slow", ids(1))
    # Those of the stream would have run for longer than anybody waits here.
    server.until(lambda: answers_now(client))


def answers_now(client: Any) -> bool:
    """Whether `slow` has a place."""
    with suppress(InferenceServerException):
        return bool(client.infer("slow", ids(1), parameters={"max_tokens": 1}))
    return False


async def test_the_aio_client(server: Any) -> None:
    async def requests() -> Any:
        for number in range(3):
            yield {
                "model_name": "fake",
                "inputs": streaming(ids(number)),
                "request_id": str(number),
                "parameters": {"max_tokens": 4},
            }

    async with triton_aio.InferenceServerClient(server.grpc_address) as connected, asyncio.timeout(60):
        assert await connected.is_server_live()
        assert words([await connected.infer("fake", ids(1))])
        answers = [answer async for answer in connected.stream_infer(requests())]
    assert all(error is None for _, error in answers)
    assert sorted(result.get_response().id for result, _ in answers if final(result)) == ["0", "1", "2"]


def test_health_check_for_probes(server: Any) -> None:
    with grpc.insecure_channel(server.grpc_address) as channel:
        assert channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=60) == b"\x08\x02"


def test_shutdown_drains(serve: Any, tokenizer_only: Path) -> None:
    with (
        serve(str(tokenizer_only), *FLAGS, "--fake-step-seconds", "0.01") as server,
        triton.InferenceServerClient(server.grpc_address) as client,
        triton.InferenceServerClient(server.grpc_address) as idle,
        stream(client) as answers,
        stream(idle) as nothing,
    ):
        client.async_stream_infer("m", streaming(ids(1)), parameters={"max_tokens": 100})
        answers.next()
        server.process.send_signal(signal.SIGTERM)
        server.until(lambda: server.status("/v2/health/ready") == 503)
        with pytest.raises(InferenceServerException, match=STOPPING):
            client.infer("m", ids(1))
        assert len(answers.of_one_request()) > 20
        _, error = nothing.next()
        assert STOPPING in error.message()
        assert server.process.wait(60) == 0
        assert "Traceback" not in server.said
        assert "ERROR" not in server.said


def test_a_port_in_use(refused: Any, tokenizer_only: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused(str(tokenizer_only), *FLAGS, "--grpc-port", str(port))
    assert said == f"charonia: cannot open port {port} on 127.0.0.1: Address already in use (--grpc-port)\n"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority `ca`, and `server` and `client` signed by it."""
    if shutil.which("openssl") is None:
        pytest.skip("certificates are made by the openssl command")
    directory = tmp_path_factory.mktemp("certificates")
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]

    def openssl(name: str, *arguments: str) -> None:
        command = [*make, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem", *arguments]
        subprocess.run(command, cwd=directory, check=True, capture_output=True)

    openssl("ca")
    signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "basicConstraints=critical,CA:FALSE"]
    for name in ("server", "client"):
        openssl(name, *signed, "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
    return directory


def pair(certificates: Path) -> list[str]:
    return [f"--grpc-server-cert={certificates}/server.pem", f"--grpc-server-key={certificates}/server.key"]


def connected(address: str, certificates: Path, *, certified: bool) -> Any:
    mine = {"private_key": f"{certificates}/client.key", "certificate_chain": f"{certificates}/client.pem"}
    options = {"ssl": True, "root_certificates": f"{certificates}/ca.pem", **(mine if certified else {})}
    return triton.InferenceServerClient(address, **options)


@pytest.mark.parametrize("mutual", [False, True])
def test_tls(serve: Any, tmp_path: Path, certificates: Path, mutual: bool) -> None:
    flags = ["--grpc-use-ssl-mutual=1", f"--grpc-root-cert={certificates}/ca.pem"] if mutual else ["--grpc-use-ssl=1"]
    (tmp_path / "r").mkdir()
    with serve("--model-repository", str(tmp_path / "r"), *flags, *pair(certificates)) as server:
        with connected(server.grpc_address, certificates, certified=mutual) as client:
            assert client.is_server_ready()
        strangers = [triton.InferenceServerClient(server.grpc_address)]
        if mutual:
            strangers.append(connected(server.grpc_address, certificates, certified=False))
        for stranger in strangers:
            with stranger, pytest.raises(InferenceServerException, match="UNAVAILABLE"):
                stranger.is_server_live()


def test_wrong_tls_flags(refused: Any, tokenizer_only: Path, certificates: Path) -> None:
    cases = [
        (["--grpc-use-ssl=1"], "charonia: TLS on gRPC needs --grpc-server-cert\n"),
        (["--grpc-use-ssl-mutual=1", *pair(certificates)], "charonia: TLS on gRPC needs --grpc-root-cert\n"),
        (
            ["--grpc-use-ssl=1", "--grpc-server-cert=/no", "--grpc-server-key=/no"],
            "charonia: cannot read --grpc-server-cert /no: No such file or directory\n",
        ),
        (
            [
                "--grpc-use-ssl=1",
                f"--grpc-server-cert={certificates}/server.pem",
                f"--grpc-server-key={certificates}/ca.key",
            ],
            "charonia: --grpc-server-cert and --grpc-server-key are not a certificate and its key: ",
        ),
    ]
    for flags, says in cases:
        said = refused(str(tokenizer_only), *FLAGS, *flags)
        assert said.startswith(says)
        assert said.count("\n") == 1


def test_one_core_that_dies_ends_its_requests_and_not_the_stream(serve: Any, tokenizer_only: Path) -> None:
    with (
        serve(str(tokenizer_only), *FLAGS, "--fake-step-seconds", "0.02") as server,
        triton.InferenceServerClient(server.grpc_address) as client,
        stream(client) as answers,
    ):
        client.async_stream_infer("m", streaming(ids(1)), request_id="lost", parameters={"max_tokens": 1000})
        answers.next()
        [core] = server.cores()
        subprocess.run(["kill", "-9", str(core)], check=True)
        error = None
        while error is None:
            _, error = answers.next()
        server.until(lambda: client.is_model_ready("m") and server.cores() not in ([], [core]))
        client.async_stream_infer("m", streaming(ids(1)), parameters={"max_tokens": 3})
        assert answers.of_one_request()
        assert "fork" not in server.said
