"""The least a server can do: frames of a given size, as many as asked for, straight into uvicorn or grpc.aio.

    python -m charonia.bench.load.bare_streams HTTP_PORT GRPC_PORT

What any server of this language on these libraries is measured against. The prompt says what to send: its token ids
are the frames, the bytes of each, and the pause between two (0: none; 1: other streams have a turn; else one more
than its milliseconds). Knows nothing of Charonia.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import orjson

from .bare_server import read_body, serve_bare

_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8")]
_EVENT = b'data: {"choices":[{"text":"%s"}]}\n\n'
"""A completions event, so that the door's own reader counts it."""


class FrameSpec(NamedTuple):
    """The frames of a stream: `number` of them with `size` bytes. `pause`: seconds between two, in which other streams
    run; None for no pause at all."""

    number: int
    size: int
    pause: float | None

    def prompt(self) -> list[int]:
        return [self.number, self.size, 0 if self.pause is None else 1 + round(self.pause * 1e3)]

    @classmethod
    def asked(cls, prompt: list[int]) -> "FrameSpec":
        number, size, pause = prompt
        return cls(number, size, (pause - 1) / 1e3 if pause else None)


def event_of(size: int) -> bytes:
    """An event of `size` bytes, or the smallest there is."""
    return _EVENT % (b"x" * max(1, size - len(_EVENT % b"")))


async def app(scope: Any, receive: Any, send: Any) -> None:
    """The ASGI handler."""
    frames = FrameSpec.asked(orjson.loads(await read_body(receive))["prompt"])
    frame = event_of(frames.size)
    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
    for _ in range(frames.number):
        await send({"type": "http.response.body", "body": frame, "more_body": True})
        if frames.pause is not None:
            await asyncio.sleep(frames.pause)
    await send({"type": "http.response.body", "body": b""})


def response_of(size: int) -> bytes:
    """A ModelStreamInferResponse of about `size` bytes, encoded."""
    from tritonclient.grpc import service_pb2

    response = service_pb2.ModelStreamInferResponse()
    answer = response.infer_response
    answer.outputs.add(name="text_output", datatype="BYTES", shape=[1])
    text = max(1, size - answer.ByteSize() - 6)
    answer.raw_output_contents.append(text.to_bytes(4, "little") + b"x" * text)
    encoded: bytes = response.SerializeToString()
    return encoded


async def _stream_infer(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        ids = [int.from_bytes(request.raw_input_contents[0][at : at + 4], "little") for at in (0, 4, 8)]
        frames = FrameSpec.asked(ids)
        frame = response_of(frames.size)
        for _ in range(frames.number):
            yield frame
            if frames.pause is not None:
                await asyncio.sleep(frames.pause)


def main() -> None:
    import grpc
    from tritonclient.grpc import service_pb2

    method = grpc.stream_stream_rpc_method_handler(
        _stream_infer, request_deserializer=service_pb2.ModelInferRequest.FromString, response_serializer=None
    )
    serve_bare(app, {"ModelStreamInfer": method})


if __name__ == "__main__":
    main()
