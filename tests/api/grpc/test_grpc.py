"""The gRPC endpoint: every code and text a client may rely on, over a real port and a gateway that needs no model."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc
import pytest
from grpc import StatusCode
from tritonclient.grpc import service_pb2 as pb

from charonia.api.grpc.inference_rpcs import StreamInferCall
from charonia.api.grpc.settings import Caller
from charonia.api.grpc.wire_format import deserialize_infer
from charonia.api.metadata import EXTENSIONS
from charonia.core.errors import Internal, InvalidArgument, NotReady, QueueFull, Unavailable, Unsupported
from charonia.core.request_context import Outcome

from ...waiting import until
from ..grpc_serving import Served, refused, serving

STOPPING = "GRPC server is shutting down and has stopped accepting new requests."
DECOUPLED = "ModelInfer RPC doesn't support models with decoupled transaction policy"


@pytest.fixture
async def served(gateway: Any) -> AsyncIterator[Served]:
    async with serving(gateway) as server:
        yield server


@pytest.fixture
def stub(served: Served) -> Any:
    return served.stub


def text_input(text: bytes = b"hi", name: str = "text_input") -> Any:
    return {"name": name, "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": [text]}}


def request(model: str = "llm", **fields: Any) -> Any:
    return pb.ModelInferRequest(model_name=model, **{"inputs": [text_input()], **fields})


async def test_server_and_model_say_what_they_are(stub: Any) -> None:
    assert (await stub.ServerLive(pb.ServerLiveRequest())).live
    assert (await stub.ServerReady(pb.ServerReadyRequest())).ready
    assert (await stub.ModelReady(pb.ModelReadyRequest(name="llm", version="1"))).ready
    assert not (await stub.ModelReady(pb.ModelReadyRequest(name="llm", version="7"))).ready
    assert not (await stub.ModelReady(pb.ModelReadyRequest(name="no"))).ready
    server = await stub.ServerMetadata(pb.ServerMetadataRequest())
    assert (server.name, server.version, list(server.extensions)) == ("triton", "9.9", [*EXTENSIONS])
    model = await stub.ModelMetadata(pb.ModelMetadataRequest(name="numbers", version=" 3"))
    assert (model.name, list(model.versions), model.platform) == ("numbers", ["3"], "identity_platform")
    assert (model.inputs[0].name, model.inputs[0].datatype, list(model.inputs[0].shape)) == (
        "MATRIX",
        "FP32",
        [-1, 2, -1],
    )
    assert [tensor.name for tensor in model.outputs] == ["OUT"]


async def test_not_ready(stub: Any, gateway: Any) -> None:
    gateway.is_ready = False
    assert not (await stub.ServerReady(pb.ServerReadyRequest())).ready
    assert not (await stub.ModelReady(pb.ModelReadyRequest(name="llm"))).ready


async def test_health(served: Served, gateway: Any) -> None:
    check = served.channel.unary_unary("/grpc.health.v1.Health/Check")
    assert await check(b"") == b"\x08\x01"
    gateway.is_ready = False
    assert await check(b"\x0a\x01x") == b"\x08\x02"
    code, _ = await refused(served.channel.unary_unary("/grpc.health.v1.Health/Watch")(b""))
    assert code is StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("name", "version", "code", "text"),
    [
        ("no", "", StatusCode.NOT_FOUND, "Request for unknown model: 'no' is not found"),
        ("llm", "7", StatusCode.NOT_FOUND, "Request for unknown model: 'llm' version 7 is not found"),
        (
            "llm",
            "x",
            StatusCode.INVALID_ARGUMENT,
            "failed to get model version from specified version string 'x' (details: stol), "
            "version should be an integral value > 0",
        ),
        (
            "llm",
            "-1",
            StatusCode.INVALID_ARGUMENT,
            "invalid model version specified '-1' , version should be an integral value > 0",
        ),
        (
            "llm",
            "9" * 30,
            StatusCode.INVALID_ARGUMENT,
            f"failed to get model version from specified version string '{'9' * 30}' (details: stol), "
            "version should be an integral value > 0",
        ),
    ],
)
async def test_lookups(stub: Any, gateway: Any, name: str, version: str, code: StatusCode, text: str) -> None:
    asked = request(name, model_version=version)
    for call in (
        stub.ModelConfig(pb.ModelConfigRequest(name=name, version=version)),
        stub.ModelMetadata(pb.ModelMetadataRequest(name=name, version=version)),
        stub.ModelInfer(asked),
    ):
        assert await refused(call) == (code, text)
    [answer] = await streamed(stub, asked)
    assert answer.error_message == text
    assert not gateway.asked


async def test_readiness_of_a_version_that_is_no_number_is_refused(stub: Any) -> None:
    code, text = await refused(stub.ModelReady(pb.ModelReadyRequest(name="llm", version="new")))
    assert (code, "'new'" in text) == (StatusCode.INVALID_ARGUMENT, True)


async def test_infer(stub: Any, gateway: Any) -> None:
    gateway.texts = ("hé",)
    parameters = {
        "max_tokens": pb.InferParameter(int64_param=3),
        "seed": pb.InferParameter(uint64_param=2**64 - 1),
        "temperature": pb.InferParameter(double_param=0.5),
        "ignore_eos": pb.InferParameter(bool_param=True),
        "cache_salt": pb.InferParameter(string_param="s"),
        "triton_enable_empty_final_response": pb.InferParameter(bool_param=True),
    }
    answer = await stub.ModelInfer(request(id="42", parameters=parameters, outputs=[{"name": "text_output"}]))
    assert (answer.model_name, answer.model_version, answer.id) == ("llm", "1", "42")
    [output] = answer.outputs
    assert (output.name, output.datatype, list(output.shape), output.HasField("contents")) == (
        "text_output",
        "BYTES",
        [1],
        False,
    )
    assert list(answer.raw_output_contents) == [b"\x03\0\0\0h\xc3\xa9"]
    assert not answer.parameters
    [asked] = gateway.asked
    assert (asked.id, asked.outputs) == ("42", ("text_output",))
    assert asked.inputs["text_input"].scalar == b"hi"
    assert asked.parameters == {
        "max_tokens": 3,
        "seed": 2**64 - 1,
        "temperature": 0.5,
        "ignore_eos": True,
        "cache_salt": "s",
    }


STREAM = {"name": "stream", "datatype": "BOOL", "shape": [1]}


@pytest.mark.parametrize(
    "fields",
    [
        {"inputs": [text_input(), {**STREAM, "contents": {"bool_contents": [True]}}]},
        {"parameters": {"stream": pb.InferParameter(bool_param=True)}},
        {"parameters": {"streaming": pb.InferParameter(string_param="true")}},
    ],
)
async def test_a_stream_is_no_single_answer(stub: Any, gateway: Any, fields: Any) -> None:
    code, text = await refused(stub.ModelInfer(request(**fields)))
    assert (code, text.startswith(DECOUPLED)) == (StatusCode.UNIMPLEMENTED, True)
    assert not gateway.asked


@pytest.mark.parametrize("texts", [(), ("a", "b"), ("a", "b", "c")])
async def test_infer_wants_exactly_one_response(stub: Any, gateway: Any, texts: tuple[str, ...]) -> None:
    gateway.texts = texts
    stream = {**STREAM, "contents": {"bool_contents": [False]}}
    asked = request(inputs=[text_input(), stream])
    assert await refused(stub.ModelInfer(asked)) == (StatusCode.UNIMPLEMENTED, DECOUPLED)
    assert gateway.open_streams == 0


ERRORS = [
    (InvalidArgument("bad"), StatusCode.INVALID_ARGUMENT, "bad"),
    (InvalidArgument("odd \ud800"), StatusCode.INVALID_ARGUMENT, "odd \\ud800"),
    (InvalidArgument("ü" * 5000), StatusCode.INVALID_ARGUMENT, "ü" * 1000 + " ..."),
    (Unavailable("gone"), StatusCode.UNAVAILABLE, "gone"),
    (NotReady("restarts"), StatusCode.UNAVAILABLE, "restarts"),
    (Unsupported("never"), StatusCode.UNIMPLEMENTED, "never"),
    (Internal("oops"), StatusCode.INTERNAL, "oops"),
    (QueueFull("full", retry_after=1.2), StatusCode.RESOURCE_EXHAUSTED, "full"),
    (RuntimeError("a secret"), StatusCode.INTERNAL, "Internal Server Error"),
]


@pytest.mark.parametrize(("error", "code", "text"), ERRORS)
async def test_errors(stub: Any, gateway: Any, error: Exception, code: StatusCode, text: str) -> None:
    gateway.texts, gateway.error = (), error
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.ModelInfer(request())
    assert (caught.value.code(), caught.value.details()) == (code, text)
    wait = dict(caught.value.trailing_metadata()).get("retry-after")
    assert wait == {QueueFull: "2", NotReady: "1"}.get(type(error))
    [answer, after] = await streamed(stub, request(id="a"), request("no", id="b"))
    assert (answer.error_message, answer.infer_response.id) == (text, "a")
    assert answer.infer_response.parameters["triton_final_response"].bool_param
    assert (answer.infer_response.model_name, after.infer_response.id) == ("llm", "b")


def numbers(shape: list[int], **fields: Any) -> Any:
    return {"name": "MATRIX", "datatype": "FP32", "shape": shape, **fields}


WRONG = [
    (
        {"inputs": [numbers([1], contents={"fp32_contents": [1]})], "raw_input_contents": [b"1234"]},
        "contents field must not be specified when using raw_input_contents for 'MATRIX' for model 'numbers'",
    ),
    ({"inputs": [numbers([1])]}, "unable to find data for input tensor 'MATRIX' for model 'numbers' in request."),
    (
        {"inputs": [numbers([1]), text_input(name="B") | {"contents": None}], "raw_input_contents": [b"1234"]},
        "unable to find data for input tensor 'B' for model 'numbers' in request.",
    ),
    (
        {"inputs": [numbers([1], contents={"int_contents": [1]})]},
        "unexpected explicit tensor data for input tensor 'MATRIX' for model 'numbers' of type 'INT32', "
        "expected datatype 'FP32'",
    ),
    (
        {"inputs": [numbers([1], contents={"fp32_contents": [1], "int64_contents": [1]})]},
        "unexpected explicit tensor data for input tensor 'MATRIX' for model 'numbers' of type 'INT64', "
        "expected datatype 'FP32'",
    ),
    (
        {"id": "7", "inputs": [numbers([2], contents={"fp32_contents": [1]})]},
        "[request id: 7] input byte size mismatch for input 'MATRIX' for model 'numbers'. Expected 8, got 4",
    ),
    (
        {"inputs": [numbers([2])], "raw_input_contents": [b"12345"]},
        "[request id: <id_unknown>] input byte size mismatch for input 'MATRIX' for model 'numbers'. Expected 8, got 5",
    ),
    (
        {"inputs": [numbers([2, -1])], "raw_input_contents": [b""]},
        "invalid shape for input 'MATRIX': shape [2,-1] contains one or more invalid dimensions",
    ),
    (
        {"inputs": [numbers([2**40, 2**40])], "raw_input_contents": [b""]},
        f"invalid shape for input 'MATRIX': shape [{2**40},{2**40}] causes total element count to exceed maximum size "
        "of 9223372036854775807",
    ),
    (
        {"inputs": [numbers([2**31, 2**31])], "raw_input_contents": [b""]},
        "byte size overflow for input 'MATRIX': shape [2147483648,2147483648] exceeds 9223372036854775807 bytes",
    ),
    (
        {"inputs": [numbers([1]), numbers([1])], "raw_input_contents": [b"1234", b"1234"]},
        "input 'MATRIX' already exists in request",
    ),
    (
        {"parameters": {"triton_x": pb.InferParameter(int64_param=1)}},
        "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys starting with "
        "'triton_' are allowed: triton_enable_empty_final_response",
    ),
    (
        {"parameters": {"sequence_id": pb.InferParameter(bool_param=True)}},
        "invalid value type for 'sequence_id' parameter, expected int64_param or string_param.",
    ),
    (
        {"parameters": {"sequence_start": pb.InferParameter(int64_param=1)}},
        "invalid value type for 'sequence_start' parameter, expected bool_param.",
    ),
    (
        {"parameters": {"priority": pb.InferParameter(string_param="1")}},
        "invalid value type for 'priority' parameter, expected int64_param or uint64_param.",
    ),
    (
        {"parameters": {"priority": pb.InferParameter(int64_param=-1)}},
        "invalid value for 'priority', expected value >= 0.",
    ),
    (
        {"parameters": {"timeout": pb.InferParameter(uint64_param=1)}},
        "invalid value type for 'timeout' parameter, expected int64_param.",
    ),
    (
        {"parameters": {"triton_enable_empty_final_response": pb.InferParameter(int64_param=1)}},
        "invalid value type for 'triton_enable_empty_final_response' parameter, expected bool_param.",
    ),
    (
        {"parameters": {"x": pb.InferParameter()}},
        "invalid value type for 'x' parameter, expected int64_param, bool_param, or string_param.",
    ),
]
BYTES = {"name": "T", "datatype": "BYTES", "shape": [2]}
WHOSE = "for inference input 'T' for model 'numbers',"
WRONG_BYTES = [
    (
        b"\1\0\0",
        f"incomplete string length indicator {WHOSE} expecting 4 bytes but only 3 bytes available. "
        "Please make sure the string length indicator is in one buffer.",
    ),
    (b"\1\0\0\0a", f"expected 2 string elements {WHOSE} got 1"),
    (b"\0\0\0\0" * 3, f"unexpected number of string elements 3 {WHOSE} expecting 2"),
    (b"\xff\xff\xff\xffa", f"incomplete string data {WHOSE} the last element is cut off"),
]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        *WRONG,
        *(
            ({"inputs": [BYTES], "raw_input_contents": [raw]}, f"[request id: <id_unknown>] {t}")
            for raw, t in WRONG_BYTES
        ),
    ],
)
async def test_wrong_requests(stub: Any, gateway: Any, fields: Any, text: str) -> None:
    asked = request("numbers", **fields)
    assert await refused(stub.ModelInfer(asked)) == (StatusCode.INVALID_ARGUMENT, text)
    [answer] = await streamed(stub, asked)
    assert answer.error_message == text
    assert not gateway.asked


TYPED = [
    ("BOOL", "bool_contents", [True, False], b"\1\0"),
    ("INT8", "int_contents", [-1, 2], b"\xff\2"),
    ("INT16", "int_contents", [-1, 2], b"\xff\xff\2\0"),
    ("INT32", "int_contents", [-1, 2], b"\xff\xff\xff\xff\2\0\0\0"),
    ("INT64", "int64_contents", [-1], b"\xff" * 8),
    ("UINT8", "uint_contents", [255], b"\xff"),
    ("UINT16", "uint_contents", [256], b"\0\1"),
    ("UINT32", "uint_contents", [2**32 - 1], b"\xff" * 4),
    ("UINT64", "uint64_contents", [2**64 - 1], b"\xff" * 8),
    ("FP32", "fp32_contents", [1.0], b"\0\0\x80\x3f"),
    ("FP64", "fp64_contents", [1.0], b"\0\0\0\0\0\0\xf0\x3f"),
    ("BYTES", "bytes_contents", [b"a", b"\xff\0"], b"\1\0\0\0a\2\0\0\0\xff\0"),
]


@pytest.mark.parametrize(("datatype", "field", "values", "raw"), TYPED)
async def test_typed_and_raw_data_are_the_same(
    stub: Any, gateway: Any, datatype: str, field: str, values: list[Any], raw: bytes
) -> None:
    gateway.texts = ("x",)
    tensor = {"name": "T", "datatype": datatype, "shape": [len(values), 1]}
    await stub.ModelInfer(request("numbers", inputs=[tensor | {"contents": {field: values}}]))
    await stub.ModelInfer(request("numbers", inputs=[tensor], raw_input_contents=[raw, b"surplus"]))
    for asked in gateway.asked:
        read = asked.inputs["T"]
        assert (read.datatype, read.shape, read.data.tolist()) == (datatype, (len(values), 1), values)


@pytest.mark.parametrize("datatype", ["BF16", "wondrous"])
async def test_datatypes_nobody_knows_are_left_to_the_gateway(stub: Any, gateway: Any, datatype: str) -> None:
    gateway.texts = ("x",)
    tensor = {"name": "T", "datatype": datatype, "shape": [1]}
    await stub.ModelInfer(request("numbers", inputs=[tensor], raw_input_contents=[b"ab"]))
    assert gateway.asked[0].inputs["T"].datatype == datatype


async def test_no_elements(stub: Any, gateway: Any) -> None:
    gateway.texts = ("x",)
    empty = [numbers([0]), {"name": "T", "datatype": "BYTES", "shape": [0]}]
    await stub.ModelInfer(request("numbers", inputs=empty, raw_input_contents=[b"", b""]))
    await stub.ModelInfer(request("numbers", inputs=[each | {"contents": {}} for each in empty]))
    assert all(tensor.data.size == 0 for asked in gateway.asked for tensor in asked.inputs.values())


async def test_garbage_is_refused_and_the_server_lives(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    infer = served.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    stream = served.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
    for garbage in (b"\xff\xff\xff", b"\x0a\x05ab", b"\x0a\x02\xff\xff"):
        for call in (infer(garbage), stream(iter([garbage])).read()):
            code, text = await refused(call)
            assert code is StatusCode.INVALID_ARGUMENT
            assert "inference.ModelInferRequest" in text
    assert not caplog.records, "a client's garbage is no fault of ours"
    assert (await served.stub.ServerLive(pb.ServerLiveRequest())).live


async def test_a_client_that_leaves_is_noticed(stub: Any, gateway: Any) -> None:
    gateway.texts, gateway.hang = (), True
    call = stub.ModelInfer(request())
    await asyncio.wait_for(gateway.waiting.wait(), 60)
    call.cancel()
    await until(lambda: gateway.open_streams == 0)
    gateway.waiting.clear()
    stream = stub.ModelStreamInfer(iter([request(), request()]))
    await until(lambda: gateway.open_streams == 2)
    stream.cancel()
    await until(lambda: gateway.open_streams == 0)


class Gone:
    """The context of a call whose client asked, and is gone by the time the answer is written."""

    def __init__(self, *requests: Any) -> None:
        self._requests = iter([*requests, grpc.aio.EOF])

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def read(self) -> Any:
        return next(self._requests)

    async def write(self, message: Any) -> None:
        raise grpc.aio.UsageError("RPC already finished.")


async def test_who_left_a_stream_has_cancelled_its_requests(gateway: Any, caplog: pytest.LogCaptureFixture) -> None:
    await StreamInferCall(gateway, Gone(request()), asyncio.Event(), Caller()).run()
    (context,) = gateway.contexts
    assert context.end.outcome is Outcome.CANCELLED
    assert not caplog.records


class Reading(Gone):
    """The context of a call whose client is there."""

    async def write(self, message: Any) -> None: ...


async def test_requests_of_a_sequence_are_handed_over_in_their_order(gateway: Any) -> None:
    """However long one takes to decode, which a thread does where its strings are long."""
    long, short = ({"inputs": [text_input(b"x" * size)]} for size in (1 << 22, 1))
    in_raw = {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1]}]}
    in_raw["raw_input_contents"] = [(1 << 22).to_bytes(4, "little") + b"x" * (1 << 22)]  # type: ignore[list-item]
    misfit = {"inputs": [text_input(b"x" * (1 << 22)) | {"shape": [2]}]}
    sequence = {"sequence_id": pb.InferParameter(int64_param=7)}
    other = {"sequence_id": pb.InferParameter(string_param="7")}
    sent = [("a", long), ("b", short), ("no", misfit), ("c", in_raw), ("d", short), ("e", short)]
    asked = [request(id=name, parameters=sequence, **fields) for name, fields in sent]
    asked += [request(id="x", parameters=other, **long), request(id="y", parameters=other, **short)]
    encoded = [deserialize_infer(each.SerializeToString()) for each in asked]
    await StreamInferCall(gateway, Reading(*encoded), asyncio.Event(), Caller()).run()
    names = [each.id for each in gateway.asked]
    assert [name for name in names if name in "abcde"] == ["a", "b", "c", "d", "e"]
    assert [name for name in names if name in "xy"] == ["x", "y"]


async def test_a_deadline_cancels(stub: Any, gateway: Any) -> None:
    gateway.texts, gateway.hang = (), True
    code, _ = await refused(stub.ModelInfer(request(), timeout=0.5))
    assert code is StatusCode.DEADLINE_EXCEEDED
    await until(lambda: gateway.open_streams == 0)


async def streamed(stub: Any, *requests: Any, **options: Any) -> list[Any]:
    """All answers to these requests, until the stream ends."""
    async with asyncio.timeout(60):
        return [answer async for answer in stub.ModelStreamInfer(iter(requests), **options)]


def final(answer: Any) -> bool:
    return bool(answer.infer_response.parameters["triton_final_response"].bool_param)


EMPTY_FINAL = {"triton_enable_empty_final_response": pb.InferParameter(bool_param=True)}


async def test_a_stream_ends_after_its_answers(stub: Any) -> None:
    answers = await streamed(stub, request(id="a"))
    assert [answer.infer_response.raw_output_contents[0][4:] for answer in answers] == [b"one", b" two"]
    assert [final(answer) for answer in answers] == [False, False]
    assert {answer.infer_response.id for answer in answers} == {"a"}


async def test_an_empty_final_response_on_request(stub: Any) -> None:
    *answers, last = await streamed(stub, request(id="a", parameters=EMPTY_FINAL))
    assert [final(answer) for answer in answers] == [False, False]
    assert (final(last), len(last.infer_response.outputs), last.infer_response.id) == (True, 0, "a")
    assert (last.infer_response.model_name, last.infer_response.model_version) == ("llm", "1")


async def test_a_final_response_needs_no_empty_one(stub: Any, gateway: Any) -> None:
    gateway.final = True
    answers = await streamed(stub, request(parameters=EMPTY_FINAL))
    assert [final(answer) for answer in answers] == [False, True]


async def test_plain_models_answer_in_order_and_finally(stub: Any, gateway: Any) -> None:
    gateway.texts = ("x",)
    ids = [str(number) for number in range(20)]
    answers = await streamed(stub, *(request("numbers", id=each) for each in ids))
    assert [answer.infer_response.id for answer in answers] == ids
    assert all(final(answer) for answer in answers)


async def test_a_refusal_while_exiting_keeps_the_order(stub: Any, gateway: Any) -> None:
    release = asyncio.Event()

    async def answers() -> AsyncGenerator[str, None]:
        gateway.waiting.set()
        await release.wait()
        yield "x"

    gateway.answers = answers
    stream = stub.ModelStreamInfer()
    await stream.write(request("numbers", id="first"))
    await gateway.waiting.wait()
    gateway.is_exiting = True
    await stream.write(request("numbers", id="second"))
    await until(lambda: len(gateway.contexts) == 2)
    release.set()
    assert [(await stream.read()).infer_response.id for _ in range(2)] == ["first", "second"]
    stream.cancel()


async def test_requests_of_a_stream_run_side_by_side(stub: Any, gateway: Any) -> None:
    gateway.hang = True
    stream = stub.ModelStreamInfer()
    for each in "abc":
        await stream.write(request(id=each))
    answers = [await stream.read() for _ in range(6)]
    assert sorted(answer.infer_response.id for answer in answers) == list("aabbcc")
    assert gateway.open_streams == 3
    await stream.write(request("no", id="d"))
    assert (await stream.read()).infer_response.id == "d"
    assert gateway.open_streams == 3
    stream.cancel()
    await until(lambda: gateway.open_streams == 0)


async def test_a_strict_stream_ends_with_its_first_error(stub: Any, gateway: Any) -> None:
    gateway.hang = True
    stream = stub.ModelStreamInfer(metadata=(("triton_grpc_error", "true"),))
    await stream.write(request(id="a"))
    await stream.read()
    await stream.read()
    await stream.write(request("no", id="b"))
    assert await refused(stream.read()) == (StatusCode.NOT_FOUND, "Request for unknown model: 'no' is not found")
    await until(lambda: gateway.open_streams == 0)


async def test_exiting(stub: Any, gateway: Any) -> None:
    gateway.is_exiting = True
    assert await refused(stub.ServerReady(pb.ServerReadyRequest())) == (StatusCode.UNAVAILABLE, "Server exiting")
    assert await refused(stub.ModelInfer(request())) == (StatusCode.UNAVAILABLE, STOPPING)
    [answer] = await streamed(stub, request(id="a"))
    assert (answer.error_message, answer.infer_response.id) == (STOPPING, "a")


async def test_stopping_ends_idle_streams(served: Served, gateway: Any) -> None:
    stream = served.stub.ModelStreamInfer()
    await stream.write(request())
    await stream.read()
    await stream.read()
    stopping = asyncio.create_task(served.server.stop())
    assert await refused(stream.read()) == (StatusCode.UNAVAILABLE, STOPPING)
    await asyncio.wait_for(stopping, 60)


async def test_a_reader_that_does_not_read_holds_up_only_itself(stub: Any, gateway: Any) -> None:
    gateway.texts = ("x" * 100_000,) * 1000
    slow, quick = stub.ModelStreamInfer(iter([request()])), stub.ModelStreamInfer(iter([request()]))
    await slow.read()
    async with asyncio.timeout(60):
        assert sum([1 async for _ in quick]) == 1000
    assert gateway.open_streams == 1
    slow.cancel()
    await until(lambda: gateway.open_streams == 0)
