"""A closed loop of v2 infer requests from a process of its own: each connection sends the next when it has its answer.

    echo '{"door": "binary", "port": 8000, ...}' | python -m charonia.bench.load.infer_load

Sends the same bytes each time and reads only the status and the end of an answer: a generator must not be what it
measures.
"""

import asyncio
import subprocess
import sys
from time import perf_counter, process_time
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import orjson

from ...core.errors import Unavailable
from ..server_process import LOOPBACK

Door: TypeAlias = Literal["binary", "json", "grpc"]

METHOD = "/inference.GRPCInferenceService/ModelInfer"
_SHARE = 32
"""Calls at a time that share a gRPC connection."""


class InferLoad(msgspec.Struct, frozen=True, kw_only=True):
    """`connections` at a time for `seconds`, to `model` with one FP32 input `name` of `shape`. What is sent in the
    first `warm_up` seconds is in no figure."""

    door: Door
    port: int
    connections: int
    seconds: float = 3.0
    warm_up: float = 0.5
    model: str = "identity"
    name: str = "INPUT0"
    shape: tuple[int, ...] = (1, 16)


class InferReport(msgspec.Struct, frozen=True):
    """The result: answers, seconds, CPU seconds of the generator, and the times of the answers in milliseconds."""

    answers: int
    seconds: float
    cpu: float
    p50: float
    p99: float
    errors: int

    @property
    def rate(self) -> float:
        return self.answers / self.seconds


class LatencyRecorder:
    """The times of answers, and when to stop."""

    def __init__(self, load: InferLoad) -> None:
        self.begin = perf_counter() + load.warm_up
        self.end = self.begin + load.seconds
        self.times: list[float] = []
        self.errors = 0
        self.cpu = 0.0

    def take(self, sent: float, good: bool) -> bool:
        """An answer came to what was sent then; whether to go on."""
        now = perf_counter()
        if sent >= self.begin and now <= self.end:
            if good:
                self.times.append(now - sent)
            else:
                self.errors += 1
        return now < self.end

    def report(self) -> InferReport:
        times = np.array(self.times or [0.0]) * 1e3
        p50, p99 = np.percentile(times, [50, 99]).tolist()
        return InferReport(len(self.times), self.end - self.begin, self.cpu, p50, p99, self.errors)


class InferConnection(asyncio.Protocol):
    """One HTTP connection of the loop; `done` when it has stopped."""

    def __init__(self, request: bytes, watch: LatencyRecorder) -> None:
        self._request = request
        self._watch = watch
        self._transport: Any = None
        self._buffer = b""
        self._sent = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._send()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or Unavailable("the server closed a connection"))

    def data_received(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data
        head = self._buffer.find(b"\r\n\r\n")
        if head < 0 or len(self._buffer) < head + 4 + self._length(head):
            return
        good = self._buffer.startswith(b"HTTP/1.1 200")
        self._buffer = b""
        if self._watch.take(self._sent, good):
            self._send()
        else:
            self.done.set_result(None)
            self._transport.close()

    def _length(self, head: int) -> int:
        at = self._buffer.find(b"content-length: ", 0, head)
        while at > 0 and self._buffer[at - 1] != 10:  # the end of a longer name
            at = self._buffer.find(b"content-length: ", at + 1, head)
        end = self._buffer.find(b"\r\n", at)
        return int(self._buffer[at + 16 : end])

    def _send(self) -> None:
        self._sent = perf_counter()
        self._transport.write(self._request)


def http_request(load: InferLoad) -> bytes:
    """The whole request, as it goes over the wire."""
    data = np.arange(np.prod(load.shape), dtype=np.float32)
    tensor: dict[str, Any] = {"name": load.name, "shape": load.shape, "datatype": "FP32"}
    lines = [f"POST /v2/models/{load.model}/infer HTTP/1.1", f"host: {LOOPBACK}:{load.port}"]
    if load.door == "binary":
        tensor["parameters"] = {"binary_data_size": data.nbytes}
        header = orjson.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}})
        lines.append(f"inference-header-content-length: {len(header)}")
        body = header + data.tobytes()
    else:
        body = orjson.dumps({"inputs": [tensor | {"data": data.tolist()}]})
    lines.append(f"content-length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def connections(load: InferLoad) -> int:
    """As which its calls over gRPC go."""
    return -(-load.connections // _SHARE)


def grpc_request(load: InferLoad) -> bytes:
    """A ModelInferRequest, encoded."""
    from tritonclient.grpc import service_pb2

    request = service_pb2.ModelInferRequest(model_name=load.model)
    request.inputs.add(name=load.name, datatype="FP32", shape=load.shape)
    request.raw_input_contents.append(np.arange(np.prod(load.shape), dtype=np.float32).tobytes())
    encoded: bytes = request.SerializeToString()
    return encoded


async def _over_http(load: InferLoad, watch: LatencyRecorder) -> None:
    loop, request = asyncio.get_running_loop(), http_request(load)
    made = [
        await loop.create_connection(lambda: InferConnection(request, watch), LOOPBACK, load.port)
        for _ in range(load.connections)
    ]
    await asyncio.gather(*(protocol.done for _, protocol in made))


async def _over_grpc(load: InferLoad, watch: LatencyRecorder) -> None:
    import grpc

    request = grpc_request(load)
    options = [("grpc.use_local_subchannel_pool", 1)]
    count = connections(load)
    channels = [grpc.aio.insecure_channel(f"{LOOPBACK}:{load.port}", options=options) for _ in range(count)]
    calls = [channel.unary_unary(METHOD) for channel in channels]

    async def ask(call: Any) -> None:
        going, good = True, True
        while going:
            sent = perf_counter()
            try:
                await call(request, timeout=30)
            except grpc.aio.AioRpcError:
                good = False
            going = watch.take(sent, good)

    await asyncio.gather(*(ask(calls[number % count]) for number in range(load.connections)))
    for channel in channels:
        await channel.close()


def run_load(load: InferLoad) -> InferReport:
    """Put a load to a server from a process of its own.

    Raises:
        Unavailable: the generator failed, or nothing was answered.
    """
    command = [sys.executable, "-m", "charonia.bench.load.infer_load"]
    run = subprocess.run(command, input=msgspec.json.encode(load), capture_output=True, timeout=load.seconds + 60)
    if run.returncode:
        raise Unavailable(f"a generator failed:\n{run.stderr.decode(errors='replace')[-2000:]}")
    report = msgspec.json.decode(run.stdout, type=InferReport)
    if not report.answers:
        raise Unavailable(
            f"no {load.door} request of {load.connections} connections was answered in {load.seconds:g} s"
        )
    return report


async def drive(load: InferLoad) -> InferReport:
    """Put the load to the server, from this process."""
    watch, spent = LatencyRecorder(load), process_time()
    await (_over_grpc if load.door == "grpc" else _over_http)(load, watch)
    watch.cpu = (process_time() - spent) / (load.warm_up + load.seconds) * load.seconds
    return watch.report()


def main() -> None:
    import uvloop

    load = msgspec.json.decode(sys.stdin.buffer.read(), type=InferLoad)
    sys.stdout.buffer.write(msgspec.json.encode(uvloop.run(drive(load))))


if __name__ == "__main__":
    main()
