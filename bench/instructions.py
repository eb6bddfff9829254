"""What a frame and a request cost a server in instructions, as valgrind's callgrind counts them: the same on a loaded
machine as on a quiet one, and so what a change is judged by before its CPU time is measured.

    python -m charonia.bench.instructions --before DIR
    python -m charonia.bench.instructions --doors chat unary --kinds plain logprobs

Counted is what the server's own process, and no engine core, executes beside the kernel: for frames what a longer load
has over a shorter one of as many streams, in steps that are slow enough for a server fifty times as slow as usual; for
requests what many have over few.
"""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from http.client import HTTPResponse
from pathlib import Path
from socket import create_connection
from tempfile import TemporaryDirectory
from typing import Annotated, Literal, TypeAlias

from cyclopts import App

from ..core.errors import Unavailable
from .command import Log, Several, exit_on_error, log_to, report_console, run_command, table_of
from .frames import KINDS, FrameKind, FramesTrial, stream_load, write_repository
from .load.driver import EndpointName
from .load.infer_load import METHOD, InferLoad, grpc_request, http_request
from .load.worker import run
from .server_process import LOOPBACK, ServerAddress, own_server
from .tensors import write_identity

InferDoor: TypeAlias = Literal["binary", "json", "unary"]
"""Of identity requests; `unary` is a ModelInfer over gRPC."""
CountedDoor: TypeAlias = EndpointName | InferDoor

_VALGRIND = """\
#!/bin/sh
exec valgrind --tool=callgrind --instr-atstart=no --callgrind-out-file={counts} {python} "$@"
"""
_TOTAL = re.compile(r"^totals: (\d+)", re.MULTILINE)
_TRIAL = FramesTrial(streams=32, step_ms=300, tokens=40)
_TOKENS, _REQUESTS = (8, 40), (20, 220)
"""Of a stream, and of a connection: few, and many."""

app = App(name="python -m charonia.bench.instructions", help=__doc__)


class CountedServer:
    """A server under callgrind, whose counts are files that begin with `counts`."""

    def __init__(self, place: ServerAddress, counts: Path) -> None:
        self.place = place
        self._counts = counts
        self._dumps = 0
        self._control("--instr=on")

    def cost_of_one(self, load: Callable[[int], object], few: int, many: int) -> float:
        """The instructions of each of those that the load of `many` has over that of `few`, behind one that is not
        counted: what is sent for the first time costs more."""
        load(many)
        counts = []
        for size in (few, many):
            self._dump()
            load(size)
            counts.append(self._dump())
        return (counts[1] - counts[0]) / (many - few)

    def _dump(self) -> int:
        """The instructions since the last dump."""
        self._control("--dump")
        self._dumps += 1
        total = _TOTAL.search(Path(f"{self._counts}.{self._dumps}").read_text())
        if total is None:
            raise Unavailable("callgrind wrote no count")
        return int(total[1])

    def _control(self, order: str) -> None:
        command = ["callgrind_control", order, str(self.place.pid)]
        told = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout
        if "Error" in told:
            raise Unavailable(f"{' '.join(command)}: {told}")


@contextmanager
def counted_server(models: Path, checkout: Path | None) -> Iterator[CountedServer]:
    """The server of this code, or of the `charonia` in `checkout`, under callgrind. Raises `Unavailable`."""
    with TemporaryDirectory(prefix="charonia-bench-") as folder:
        counts = Path(folder) / "counts"
        python = Path(folder) / "python"
        python.write_text(_VALGRIND.format(counts=counts, python=sys.executable))
        python.chmod(0o755)
        flags = "--model-repository", str(models), "--frontends", "1"
        environment = {"PYTHONHASHSEED": "0"}
        with own_server(*flags, python=str(python), environment=environment, checkout=checkout) as place:
            yield CountedServer(place, counts)


def count_frame(server: CountedServer, trial: FramesTrial, door: EndpointName, kind: FrameKind) -> float:
    """The instructions of one frame."""

    def stream(tokens: int) -> None:
        run(stream_load(replace(trial, tokens=tokens), server.place, door, KINDS[door][kind]))

    return server.cost_of_one(stream, *_TOKENS) / trial.streams


def count_request(server: CountedServer, door: InferDoor) -> float:
    """The instructions of one identity request, with no other beside it."""
    with ExitStack() as stack:
        ask = _connect(stack, server.place, door)

        def ask_often(times: int) -> None:
            for _ in range(times):
                ask()

        return server.cost_of_one(ask_often, *_REQUESTS)


def _connect(stack: ExitStack, place: ServerAddress, door: InferDoor) -> Callable[[], object]:
    """What sends a request over one connection, and waits for its answer."""
    if door == "unary":
        import grpc

        load = InferLoad(door="grpc", port=place.grpc_port, connections=1)
        channel = stack.enter_context(grpc.insecure_channel(f"{LOOPBACK}:{load.port}"))
        return partial(channel.unary_unary(METHOD), grpc_request(load))
    load = InferLoad(door=door, port=place.http_port, connections=1)
    request, connection = http_request(load), stack.enter_context(create_connection((LOOPBACK, load.port)))

    def ask() -> None:
        connection.sendall(request)
        answer = HTTPResponse(connection)
        answer.begin()
        if answer.status != HTTPStatus.OK:
            raise Unavailable(f"a request failed: {answer.read()!r}")
        answer.read()

    return ask


def count(
    checkout: Path | None, doors: Sequence[CountedDoor], kinds: Sequence[FrameKind], log: Log
) -> dict[tuple[str, str], float]:
    """The instructions of a server's frames and requests, by door and kind. Raises `Unavailable`."""
    counts: dict[tuple[str, str], float] = {}
    with TemporaryDirectory(prefix="charonia-bench-") as folder:
        write_identity(Path(folder))
        write_repository(Path(folder), _TRIAL)
        with counted_server(Path(folder), checkout) as server:
            for door in doors:
                if door == "binary" or door == "json" or door == "unary":
                    counts[door, "identity"] = count_request(server, door)
                    log(f"{door}: {counts[door, 'identity']:,.0f}")
                    continue
                for kind in (kind for kind in kinds if kind in KINDS[door]):
                    counts[door, kind] = count_frame(server, _TRIAL, door, kind)
                    log(f"{door}, {kind}: {counts[door, kind]:,.0f}")
    return counts


@app.default
def main(
    *,
    doors: Annotated[tuple[CountedDoor, ...], Several] = (*KINDS, "binary", "json", "unary"),
    kinds: Annotated[tuple[FrameKind, ...], Several] = ("plain",),
    before: Path | None = None,
) -> int:
    """Count instructions.

    Parameters
    ----------
    doors
        Protocols of streams of text; and of identity requests: binary, json, and unary over gRPC.
    kinds
        What streams ask for beside text; a door that has no such thing is left out.
    before
        Directory with another `charonia` in it, whose server is counted too.
    """
    console = report_console()
    with exit_on_error():
        now = count(None, doors, kinds, log_to(console))
        old = {} if before is None else count(before, doors, kinds, log_to(console))
    table = table_of(("door", "kind"), ("instructions", "before", "ratio"))
    for (door, kind), instructions in now.items():
        earlier = old.get((door, kind))
        cells = ("", "") if earlier is None else (f"{earlier:,.0f}", f"{instructions / earlier:.3f}")
        table.add_row(door, kind, f"{instructions:,.0f}", *cells)
    console.print(table)
    return 0


if __name__ == "__main__":
    run_command(app)
