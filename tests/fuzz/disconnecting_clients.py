"""Clients that disconnect: each asks one streaming endpoint for a long answer, and leaves at its own moment.

A client is drawn from (seed, number) alone. Knows the moments to leave, and nothing of the server.
"""

import asyncio
import json
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from random import Random
from typing import Any, NamedTuple

from charonia.bench.server_process import ServerAddress

from .http_mutations import head, request

_CONNECT_SECONDS = 30.0
_ANSWER_SECONDS = 60.0
"""After which an answer, or its next piece, does not come any more."""
_LONGEST_WAIT = 0.25
"""Seconds a visitor waits at most before the first event."""
_MOST_EVENTS = 12
_NEW = 200
"""Responses asked for, where a question does not say how many: more than anybody stays for, but who stays to the
end."""
DOORS = ("generate_stream", "completions", "chat", "grpc")


class LeaveMoment(StrEnum):
    """The moment when a client leaves."""

    CONNECTED = "connected, nothing sent"
    HEAD = "in the middle of the head"
    BODY = "in the middle of the body"
    SENT = "as soon as all is sent"
    WAITING = "a moment later, with or without an event"
    STREAMING = "after some events"
    END = "after the end"


class ClientPlan(NamedTuple):
    """`abrupt`: with a reset or a cancelled call instead of a clean close. `events`: read before it leaves mid-stream;
    `wait`: seconds to stay after sending; `share`: of head or body that it sends."""

    door: str
    moment: LeaveMoment
    abrupt: bool
    events: int
    wait: float
    share: float


class StreamQuestion(NamedTuple):
    """A request to `model` for a stream of responses. `tensors`: its inputs by name, of int, bool or str; `parameters`
    beside them; `length`: the name of the one that says how many responses to make, an input or a parameter; `many`:
    as many ask those for who leave. At the door `generate` it asks for one response, if its model knows `stream`."""

    model: str
    tensors: Mapping[str, Any]
    parameters: Mapping[str, Any]
    length: str
    many: int = _NEW

    def http(self, door: str, new: int) -> tuple[str, bytes]:
        """The path and body of a POST for so many responses."""
        own = {**self.tensors, **self.parameters, self.length: new}
        path, body = {
            "generate_stream": (f"/v2/models/{self.model}/generate_stream", own),
            "generate": (
                f"/v2/models/{self.model}/generate",
                {**own, **({"stream": False} if "stream" in own else {})},
            ),
            "completions": ("/v1/completions", {"model": self.model, "prompt": "def f(x): return", **self.parameters}),
            "chat": ("/v1/chat/completions", {"model": self.model, "messages": _CHAT, **self.parameters}),
        }[door]
        streamed = {} if door.startswith("generate") else {"stream": True, "max_tokens": new}
        return path, json.dumps({**body, **streamed}).encode()

    def grpc(self, new: int) -> Any:
        """The message of a gRPC stream for so many responses."""
        from tritonclient.grpc import service_pb2 as pb

        message = pb.ModelInferRequest(model_name=self.model)
        fields = {**self.tensors, **self.parameters, self.length: new}
        for name, value in fields.items():
            if name in self.tensors:
                _add_tensor(message, name, value if isinstance(value, list) else [value])
            else:
                kind = "bool_param" if isinstance(value, bool) else "int64_param"
                setattr(message.parameters[name], kind, value)
        return message


_CHAT = [{"role": "user", "content": "Hello, you!"}]


def _add_tensor(message: Any, name: str, values: list[Any]) -> None:
    datatype, field = {bool: ("BOOL", "bool"), int: ("INT32", "int"), str: ("BYTES", "bytes")}[type(values[0])]
    tensor = message.inputs.add(name=name, datatype=datatype, shape=[len(values)])
    encoded = [value.encode() if isinstance(value, str) else value for value in values]
    getattr(tensor.contents, f"{field}_contents").extend(encoded)


def llm_question(model: str) -> StreamQuestion:
    """For a language model."""
    prompt = {"input_ids": list(range(1, 40)), "stream": True}
    return StreamQuestion(model, prompt, {"ignore_eos": True}, "max_tokens")


def plan_client(seed: int, number: int, doors: Sequence[str] = DOORS) -> ClientPlan:
    """The client of this number."""
    random = Random(f"{seed}:visit:{number}")
    door, moment = random.choice(doors), random.choice(list(LeaveMoment))
    return ClientPlan(
        door, moment, random.random() < 0.5, random.randint(1, _MOST_EVENTS), random.uniform(0, _LONGEST_WAIT),
        random.random(),
    )  # fmt: skip


async def run_client(
    place: ServerAddress, question: StreamQuestion, asked: ClientPlan, channels: "GrpcChannels"
) -> None:
    """Connect, ask and leave. Raises `OSError` without a server, and `TimeoutError`, which is one, for an answer that
    does not come."""
    if asked.door == "grpc":
        await channels.visit(place, question, asked)
    else:
        await _over_http(place, question, asked)


async def _over_http(place: ServerAddress, question: StreamQuestion, asked: ClientPlan) -> None:
    async with asyncio.timeout(_CONNECT_SECONDS):
        reader, writer = await asyncio.open_connection(place.host, place.http_port)
    try:
        path, body = question.http(asked.door, _length(question, asked))
        writer.write(_sent(asked, path, body))
        async with asyncio.timeout(_ANSWER_SECONDS):
            await _stay(asked, reader)
    except ConnectionError:
        pass
    finally:
        if asked.abrupt:
            _reset(writer)
        else:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


def _length(question: StreamQuestion, asked: ClientPlan) -> int:
    return 5 if asked.moment is LeaveMoment.END else question.many


def _sent(asked: ClientPlan, path: str, body: bytes) -> bytes:
    opening = head(path, f"Content-Length: {len(body)}")
    if asked.moment is LeaveMoment.CONNECTED:
        return b""
    if asked.moment is LeaveMoment.HEAD:
        return opening[: int(asked.share * len(opening))]
    if asked.moment is LeaveMoment.BODY:
        return opening + body[: int(asked.share * len(body))]
    return request(path, body)


async def _stay(asked: ClientPlan, reader: asyncio.StreamReader) -> None:
    if asked.moment is LeaveMoment.STREAMING:
        for _ in range(asked.events):
            if not await _event(reader):
                return
    elif asked.moment is LeaveMoment.END:
        while await reader.read(1 << 16):
            pass
    elif asked.moment is not LeaveMoment.SENT:
        await asyncio.sleep(asked.wait)


async def _event(reader: asyncio.StreamReader) -> bool:
    try:
        await reader.readuntil(b"data: ")
    except asyncio.IncompleteReadError:
        return False
    return True


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST instead of FIN."""
    import socket

    connection: Any = writer.get_extra_info("socket")
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


class GrpcChannels:
    """gRPC channels with a connection each, which an abrupt client closes with its channel."""

    async def visit(self, place: ServerAddress, question: StreamQuestion, asked: ClientPlan) -> None:
        import grpc

        options = (("grpc.use_local_subchannel_pool", 1),)
        async with grpc.aio.insecure_channel(f"{place.host}:{place.grpc_port}", options) as channel:
            try:
                if asked.moment is LeaveMoment.CONNECTED:
                    await channel.channel_ready()
                    return
                await self._call(channel, question, asked)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise TimeoutError from None

    async def _call(self, channel: Any, question: StreamQuestion, asked: ClientPlan) -> None:
        from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

        call = GRPCInferenceServiceStub(channel).ModelStreamInfer(timeout=_ANSWER_SECONDS)
        if asked.moment is not LeaveMoment.HEAD:
            await call.write(question.grpc(_length(question, asked)))
        await self._listen(call, asked)
        if not asked.abrupt:
            call.cancel()

    async def _listen(self, call: Any, asked: ClientPlan) -> None:
        import grpc

        if asked.moment in (LeaveMoment.STREAMING, LeaveMoment.END):
            await call.done_writing()  # else the stream stays open behind an answer that is shorter than that
            left = asked.events if asked.moment is LeaveMoment.STREAMING else _NEW
            while left and await call.read() is not grpc.aio.EOF:
                left -= 1
        elif asked.moment is not LeaveMoment.SENT:
            await asyncio.sleep(asked.wait)
