"""Large answers leave no memory behind: `python -m tests.proofs.large_answers`.

A Python model answers with tensors of `--mib` MiB, raw and as JSON, over HTTP and gRPC, to clients who read at once and
to one who takes his time, and with more than there may be. Each gets all of it, or the refusal. Half a minute later the
server and the model's process have no more memory than before, but for 64 MiB.
"""

import http.client
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from cyclopts import App
from rich.console import Console
from rich.table import Table

from charonia.bench.server_process import ServerAddress, children, own_server
from charonia.processes.host import resident_memory_of

MIB = 1 << 20
ALLOWED = 64 * MIB
"""Bytes that may be more than before."""
WAIT_SECONDS = 30.0
NAME = "large"
_READ_BYTES = 1 << 20
_STRING_BYTES = 12
"""Of a string with its length."""
_PAUSE_SECONDS = 3.0
_PATIENCE = 600.0
"""Seconds for an answer."""

_CONFIG = """
backend: "python"
input { name: "COUNT" data_type: TYPE_INT64 dims: 1 }
output [ { name: "NUMBERS" data_type: TYPE_FP32 dims: -1 }, { name: "STRINGS" data_type: TYPE_STRING dims: -1 } ]
"""
_MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        count = int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0])
        if "NUMBERS" in request.requested_output_names():
            tensor = pb_utils.Tensor("NUMBERS", np.arange(count, dtype=np.float32))
        else:
            tensor = pb_utils.Tensor("STRINGS", np.array([b"%08d" % number for number in range(count)], object))
        return pb_utils.InferenceResponse([tensor])
"""

app = App(name="python -m tests.proofs.large_answers", help=__doc__)


@contextmanager
def large_server(size: int) -> Iterator[ServerAddress]:
    """A server of the model, whose answers may have so many bytes."""
    with TemporaryDirectory(prefix="charonia-proof-") as directory:
        version = Path(directory) / NAME / "1"
        version.mkdir(parents=True)
        version.with_name("config.pbtxt").write_text(_CONFIG)
        (version / "model.py").write_text(_MODEL)
        with own_server("--model-repository", directory, "--max-response-bytes", str(size)) as place:
            yield place


class LargeQuestion(NamedTuple):
    """A request for one output of `size` bytes, to be answered with `status`. `pause`: seconds for which its client
    does not read."""

    name: str
    output: str
    size: int
    binary: bool
    pause: float = 0.0
    grpc: bool = False
    status: str = "200"

    @property
    def elements(self) -> int:
        """Those of the output."""
        return self.size // (4 if self.output == "NUMBERS" else _STRING_BYTES)


def questions(size: int) -> tuple[LargeQuestion, ...]:
    """Those of the proof, for outputs of so many bytes; JSON of an eighth of it, and strings of a sixteenth, for all
    else is their encoding."""
    return (
        LargeQuestion("raw numbers", "NUMBERS", size, True),
        LargeQuestion("raw numbers, gRPC", "NUMBERS", size, True, grpc=True, status="OK"),
        LargeQuestion("raw numbers, slowly", "NUMBERS", size, True, _PAUSE_SECONDS),
        LargeQuestion("numbers as JSON", "NUMBERS", size // 8, False),
        LargeQuestion("raw strings", "STRINGS", size // 16, True),
        LargeQuestion("strings as JSON", "STRINGS", size // 16, False),
        LargeQuestion("more than there may be", "NUMBERS", size // 2, False, status="400"),
    )


def ask(place: ServerAddress, question: LargeQuestion) -> str:
    """The status and the size of the answer, which is not kept."""
    if question.grpc:
        return _ask_grpc(place, question)
    body = {
        "inputs": [{"name": "COUNT", "datatype": "INT64", "shape": [1], "data": [question.elements]}],
        "outputs": [{"name": question.output, "parameters": {"binary_data": question.binary}}],
    }
    connection = http.client.HTTPConnection(place.host, place.http_port, timeout=_PATIENCE)
    try:
        connection.request("POST", f"/v2/models/{NAME}/infer", json.dumps(body))
        time.sleep(question.pause)
        response, size = connection.getresponse(), 0
        while piece := response.read(_READ_BYTES):
            size += len(piece)
        return f"{response.status}, {size:,} bytes"
    finally:
        connection.close()


def _ask_grpc(place: ServerAddress, question: LargeQuestion) -> str:
    import grpc
    from tritonclient.grpc import service_pb2 as pb
    from tritonclient.grpc import service_pb2_grpc

    request = pb.ModelInferRequest(model_name=NAME, outputs=[{"name": question.output}])
    request.inputs.add(name="COUNT", datatype="INT64", shape=[1]).contents.int64_contents.append(question.elements)
    options = [("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(f"{place.host}:{place.grpc_port}", options) as channel:
        answer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=_PATIENCE)
        return f"OK, {len(answer.raw_output_contents[0]):,} bytes"


class MemoryOf(NamedTuple):
    """Bytes of anonymous and shared memory: of the server's process, and of those that it started."""

    server: int
    models: int

    @classmethod
    def read(cls, place: ServerAddress) -> "MemoryOf":
        assert place.pid is not None
        models = resident_memory_of(children(place.pid))
        return cls(resident_memory_of([place.pid]) - models, models)

    def more_than(self, before: "MemoryOf") -> "MemoryOf":
        return MemoryOf(self.server - before.server, self.models - before.models)


class LargeAnswersResult(NamedTuple):
    """What the clients were told, the questions that were answered otherwise than they should be, and the memory:
    before, at most, and as long after as was waited."""

    told: list[str]
    wrong: list[str]
    before: MemoryOf
    most: MemoryOf
    after: MemoryOf


def run(
    place: ServerAddress,
    size: int,
    wait_seconds: float = WAIT_SECONDS,
    allowed: int = 0,
    tell: Callable[[str], None] = lambda line: None,
) -> LargeAnswersResult:
    """Ask all questions, after each once in small, and wait until no more than `allowed` is there beyond before, or so
    many seconds."""
    for question in questions(1 << 16):
        ask(place, question._replace(pause=0))
    before = most = MemoryOf.read(place)
    told, wrong = list[str](), list[str]()
    for question in questions(size):
        told.append(ask(place, question))
        wrong += [question.name] if told[-1].partition(",")[0] != question.status else []
        now = MemoryOf.read(place)
        most = MemoryOf(*map(max, most, now))
        more = now.more_than(before)
        tell(f"{question.name}: {told[-1]}; {more.server // MIB:+,} MiB, models {more.models // MIB:+,} MiB")
    deadline = time.monotonic() + wait_seconds
    while time.monotonic() < deadline:
        time.sleep(min(1.0, wait_seconds))
        if max(MemoryOf.read(place).more_than(before)) <= allowed:
            break
    return LargeAnswersResult(told, wrong, before, most, MemoryOf.read(place))


@app.default
def main(mib: int = 768, wait: float = WAIT_SECONDS) -> None:
    """Ask for outputs of `mib` MiB, and look at the memory `wait` seconds later."""
    with large_server(mib * MIB) as place:
        found = run(place, mib * MIB, wait, tell=print)
    table = Table("MiB", "before", "at most", "after", "more than before")
    more = found.after.more_than(found.before)
    for whose in MemoryOf._fields:
        row = [getattr(each, whose) / MIB for each in (found.before, found.most, found.after, more)]
        table.add_row(whose, *(f"{figure:,.0f}" for figure in row))
    Console().print(table)
    for name in found.wrong:
        print(f"answered wrongly: {name}")
    sys.exit(bool(found.wrong) or max(more) > ALLOWED)


if __name__ == "__main__":
    app()
