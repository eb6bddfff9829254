"""The least that sends frames: a handler of uvicorn and a method of grpc.aio with frames of a given size in a given
rhythm, for all streams from one timer.

    python -m charonia.bench.load.bare_frames HTTP_PORT GRPC_PORT STEP_MS

A request's prompt says what to send: how many frames, and the bytes of each. Knows nothing of Charonia.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import orjson

from ..server_process import LOOPBACK, ServerAddress, free_ports, run_process, until_open

_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8")]
_EVENT = b'data: {"choices":[{"text":"%s"}]}\n\n'
"""Of completions, so that its reader counts it."""


class _OpenStream(NamedTuple):
    """A response of uvicorn that the timer writes. `done` when `left` frames are sent."""

    send: Any
    message: dict[str, Any]
    left: list[None]
    done: asyncio.Future[None]


class BareFrames:
    """Both handlers, and their timer of `step` seconds."""

    def __init__(self, step: float) -> None:
        self._step = step
        self._open: list[_OpenStream] = []
        self._tick: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Never returns."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + self._step, loop.time())
            await asyncio.sleep(due - loop.time())
            self._tick.set_result(None)  # gRPC's handlers write by themselves: a write of theirs waits
            self._tick = loop.create_future()
            for stream in self._open:
                await stream.send(stream.message)
                stream.left.pop()
                if not stream.left:
                    stream.done.set_result(None)
            self._open = [stream for stream in self._open if stream.left]

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        """The ASGI handler."""
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        number, size = orjson.loads(body)["prompt"]
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        frame = _EVENT % (b"x" * max(1, size - len(_EVENT % b"")))
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        part = {"type": "http.response.body", "body": frame, "more_body": True}
        self._open.append(_OpenStream(send, part, [None] * number, done))
        await done
        await send({"type": "http.response.body", "body": b""})

    async def stream_infer(self, requests: AsyncIterator[Any], context: Any) -> None:
        """The method of ModelStreamInfer."""
        async for request in requests:
            number, size = (int.from_bytes(request.raw_input_contents[0][at : at + 4], "little") for at in (0, 4))
            frame = _response(size)
            for _ in range(number):
                await self._tick
                await context.write(frame)


def _response(size: int) -> bytes:
    """A ModelStreamInferResponse of about `size` bytes, encoded."""
    from tritonclient.grpc import service_pb2

    response = service_pb2.ModelStreamInferResponse()
    answer = response.infer_response
    answer.outputs.add(name="text_output", datatype="BYTES", shape=[1])
    text = max(1, size - answer.ByteSize() - 6)
    answer.raw_output_contents.append(text.to_bytes(4, "little") + b"x" * text)
    encoded: bytes = response.SerializeToString()
    return encoded


async def _serve(http_port: int, grpc_port: int, step: float) -> None:
    import grpc
    import uvicorn
    from tritonclient.grpc import service_pb2

    frames = BareFrames(step)
    method = grpc.stream_stream_rpc_method_handler(
        frames.stream_infer, request_deserializer=service_pb2.ModelInferRequest.FromString, response_serializer=None
    )
    server = grpc.aio.server()
    service = grpc.method_handlers_generic_handler("inference.GRPCInferenceService", {"ModelStreamInfer": method})
    server.add_generic_rpc_handlers([service])
    server.add_insecure_port(f"{LOOPBACK}:{grpc_port}")
    await server.start()
    config = uvicorn.Config(
        frames.app, host=LOOPBACK, port=http_port, http="httptools", ws="none", lifespan="off", log_config=None,
        access_log=False, server_header=False, proxy_headers=False, interface="asgi3",
    )  # fmt: skip
    timer = asyncio.create_task(frames.run())
    await uvicorn.Server(config).serve()
    timer.cancel()
    await server.stop(0)


@contextmanager
def bare_server(step: float) -> Iterator[ServerAddress]:
    """A process with both handlers."""
    http_port, grpc_port = free_ports(2)
    command = [sys.executable, "-m", __name__, str(http_port), str(grpc_port), str(step * 1e3)]
    with run_process(command) as (pid, alive):
        place = ServerAddress(LOOPBACK, http_port, grpc_port, pid)
        until_open(place, alive)
        yield place


def main() -> None:
    import uvloop

    http_port, grpc_port, step_ms = sys.argv[1:]
    uvloop.run(_serve(int(http_port), int(grpc_port), float(step_ms) / 1e3))


if __name__ == "__main__":
    main()
