"""Whole answers of models whose client stays to the end: what came, or the error that the client was told.

Over HTTP on connections that stay open, and over gRPC. Knows nothing of what is right.
"""

import gc
from typing import Any, NamedTuple

import orjson

from ..load.http_client import HttpClient, HttpResponseReader
from ..server_process import ServerAddress
from .disconnecting_clients import StreamQuestion

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
