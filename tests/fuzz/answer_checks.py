"""What becomes of requests under fuzzing: the outcome of a malformed one, over HTTP on a connection of its own or over
gRPC, and whether it is a fault; and the whole answer to one whose client stays to the end."""

import asyncio
import gc
from typing import Any, NamedTuple

import orjson

from charonia.bench.load.http_client import HttpClient, HttpResponseReader
from charonia.bench.server_process import ServerAddress

from .disconnecting_clients import StreamQuestion
from .grpc_mutations import RpcMutant
from .http_mutations import HttpMutant

_BOUND_SECONDS = 30.0
"""No answer may take longer."""
_PATIENCE = 0.3
"""Seconds in which a request whose end nobody knows may be answered before we hang up."""
_SERVICE = "/inference.GRPCInferenceService/"
_REFUSALS = ("OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED")
"""Statuses that say it is the request: UNIMPLEMENTED is Triton's for a stream asked of ModelInfer."""
QUEUE_FULL = "429"
_EXPIRED = "Request timeout expired"
"""Triton's 503 for a request whose own `timeout`, mutated to almost nothing, was over: asked for, and given."""
_TRITONS = (
    _EXPIRED,
    "hape does not match true shape",
    "HTTP end point doesn't support models with decoupled transaction policy",
    "Unsupported compression type",
    "can not be updated through network protocol",
    "failed to poll from model repository",
)
"""What Triton's protocol answers with 5xx although it is the request's fault."""


class MutantVerdict(NamedTuple):
    """The outcome of one mutant as one word; `fault`: the reason why it is wrong."""

    kind: str
    answer: str
    fault: str = ""


async def ask_http(place: ServerAddress, asked: HttpMutant) -> MutantVerdict:
    """Send a request on a connection of its own, and read the answer."""
    try:
        async with asyncio.timeout(_BOUND_SECONDS):
            answer = await _exchange(place, asked)
    except TimeoutError:
        return MutantVerdict(asked.kind, "hung", f"no answer within {_BOUND_SECONDS:g} s: {asked.wire[:300]!r}")
    except (ValueError, LookupError) as error:
        return MutantVerdict(asked.kind, "strange", f"not HTTP ({error}): {asked.wire[:300]!r}")
    fault = _fault_of(asked, answer)
    word = f"{answer.status // 100}xx" if answer.status else "hung up"
    word = QUEUE_FULL if answer.status == 429 else word
    return MutantVerdict(asked.kind, word, f"{fault}: {asked.wire[:300]!r}" if fault else "")


async def _exchange(place: ServerAddress, asked: HttpMutant) -> HttpResponseReader:
    answer = HttpResponseReader()
    reader, writer = await asyncio.open_connection(place.host, place.http_port)
    try:
        writer.write(asked.wire)
        try:
            async with asyncio.timeout(_PATIENCE if asked.unframed else None):
                await _hear(reader, answer)
        except TimeoutError:
            # Whoever hangs up is heard no more: what the server waits for will not come.
            writer.write_eof()
            await _hear(reader, answer)
    except OSError:  # gone in the middle of anything
        pass
    finally:
        writer.transport.abort()
    return answer


async def _hear(reader: asyncio.StreamReader, answer: HttpResponseReader) -> None:
    while not answer.complete and (data := await reader.read(1 << 16)):
        answer.feed(data, 0.0)


def _fault_of(asked: HttpMutant, answer: HttpResponseReader) -> str:
    if answer.status >= 500:
        listed = any(text.encode() in answer.body for text in _TRITONS)
        return "" if listed else f"{answer.status} {answer.body[:200]!r}"
    if not (asked.unframed or answer.complete):
        return f"hung up on, {answer.status or 'without an answer'}"
    for event in answer.events:
        if error := _error_in(event.data):
            return f"error in a stream: {error}"
    return ""


def _error_in(event: bytes) -> str:
    content = event.removeprefix(b"data:").strip()
    if content == b"[DONE]":
        return ""
    error = orjson.loads(content).get("error", "")
    return "" if _EXPIRED in str(error) else str(error)


class RpcSender:
    """Sends bytes in place of messages, over one channel."""

    def __init__(self, place: ServerAddress) -> None:
        import grpc

        self._rpc_error = grpc.RpcError
        self._channel = grpc.aio.insecure_channel(f"{place.host}:{place.grpc_port}")
        self._infer = self._channel.unary_unary(f"{_SERVICE}ModelInfer")
        self._stream = self._channel.stream_stream(f"{_SERVICE}ModelStreamInfer")

    async def ask(self, asked: RpcMutant) -> MutantVerdict:
        """Send bytes as the one message of a call, and read the answer."""
        status = await self._status(asked)
        code, _, detail = status.partition(": ")
        expired = code == "UNAVAILABLE" and detail == _EXPIRED
        right = code in _REFUSALS or expired
        return MutantVerdict(asked.kind, code, "" if right else f"{status[:300]}: {asked.data[:300]!r}")

    async def _status(self, asked: RpcMutant) -> str:
        try:
            if not asked.streaming:
                await self._infer(asked.data, timeout=_BOUND_SECONDS)
                return "OK"
            call = self._stream(iter([asked.data]), timeout=_BOUND_SECONDS)
            return _said([response async for response in call])
        except self._rpc_error as error:
            return f"{error.code().name}: {error.details()}"

    async def close(self) -> None:
        await self._channel.close()


def _said(responses: list[bytes]) -> str:
    from tritonclient.grpc import service_pb2 as pb

    errors = [pb.ModelStreamInferResponse.FromString(response).error_message for response in responses]
    if any("Internal Server Error" in error for error in errors):
        return f"INTERNAL: {errors}"
    return "INVALID_ARGUMENT" if any(errors) else "OK"


_DATA = b"data: "
_DONE = b"[DONE]"


class StreamAnswer(NamedTuple):
    """The responses' values of one output, in their order; `error` is empty where there was none."""

    values: tuple[Any, ...]
    error: str = ""


class WholeAnswers:
    """Asks one server. `output` is the tensor that is read, as it stands in generate's events."""

    def __init__(self, place: ServerAddress, output: str) -> None:
        import grpc

        self.http = HttpClient(place.host, place.http_port)
        # A connection of its own, that ends with it.
        options = (("grpc.use_local_subchannel_pool", 1),)
        self._channel = grpc.aio.insecure_channel(f"{place.host}:{place.grpc_port}", options)
        self._output = output

    async def ask(self, question: StreamQuestion, door: str, new: int) -> StreamAnswer:
        """Ask for so many responses. Raises `OSError` where the server hangs up before the end."""
        if door == "grpc":
            return await self._ask_grpc(question, new)
        answer = await self.http.post(*question.http(door, new))
        if answer.status != 200:
            return StreamAnswer((), read_error(answer))
        return self._read_events(answer)

    async def close(self) -> None:
        self.http.close()
        await self._channel.close()
        gc.collect()  # calls that failed hold their connection until then

    def _read_events(self, answer: HttpResponseReader) -> StreamAnswer:
        values: list[Any] = []
        for event in answer.events:
            data = event.data.partition(_DATA)[2]
            if data == _DONE:
                break
            fields = orjson.loads(data)
            if "error" in fields:
                return StreamAnswer(tuple(values), str(fields["error"]))
            values.append(fields["choices"][0]["text"] if "choices" in fields else fields[self._output])
        return StreamAnswer(tuple(values))

    async def _ask_grpc(self, question: StreamQuestion, new: int) -> StreamAnswer:
        import grpc
        from tritonclient.grpc import InferResult
        from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

        values: list[Any] = []
        call = GRPCInferenceServiceStub(self._channel).ModelStreamInfer()
        try:
            await call.write(question.grpc(new))
            await call.done_writing()
            async for message in call:
                if message.error_message:
                    return StreamAnswer(tuple(values), message.error_message)
                array = InferResult(message.infer_response).as_numpy(self._output)
                if array is not None:
                    values += [each.decode() if isinstance(each, bytes) else each for each in array.ravel().tolist()]
        except grpc.RpcError as error:
            return StreamAnswer(tuple(values), f"gRPC {error.code().name}: {error.details()}")
        finally:
            call.cancel()
        return StreamAnswer(tuple(values))


def read_error(answer: HttpResponseReader) -> str:
    """What an answer that is no event stream says."""
    try:
        error = orjson.loads(answer.body)["error"]
    except (ValueError, LookupError):
        return f"HTTP {answer.status}: {answer.body[:200]!r}"
    return str(error["message"] if isinstance(error, dict) else error)
