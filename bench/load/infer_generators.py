"""Which generator drives a load of v2's infer requests: wrk or h2load where they are installed, our own elsewhere.

The compiled ones leave the server more of the cores. They send what `infer_load` sends, for whole seconds and without a
warm-up.
"""

import math
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...core.errors import Unavailable
from ..server_process import LOOPBACK
from .infer_load import METHOD, Door, InferLoad, InferReport, connections, grpc_request, http_request

Generator: TypeAlias = Literal["auto", "own", "wrk"]
"""Of HTTP; what drives gRPC beside wrk is h2load."""
Driver: TypeAlias = Literal["own", "wrk", "h2load"]


def find_generator(door: Door, generator: Generator) -> Driver:
    """The load generator for this endpoint.

    Raises:
        Unavailable: it is not installed.
    """
    tool: Driver = "h2load" if door == "grpc" else "wrk"
    if generator == "own" or (generator == "auto" and shutil.which(tool) is None):
        return "own"
    if shutil.which(tool) is None:
        raise Unavailable(f"{tool} is not installed; --generator own needs nothing")
    return tool


def describe_generators(doors: Iterable[Door], generator: Generator) -> str:
    """The load generators of these endpoints as text. Raises as `find_generator`."""
    return ", ".join(f"{door} by {_WORDS[find_generator(door, generator)]}" for door in doors)


_WORDS: Mapping[Driver, str] = {"own": "our own generator", "wrk": "wrk", "h2load": "h2load"}


def run_load(load: InferLoad, by: Driver) -> InferReport:
    """Put a load to a server from a process of its own.

    Raises:
        Unavailable: the generator failed, or nothing was answered.
    """
    report = _GENERATORS[by](load)
    if not report.answers:
        raise Unavailable(
            f"no {load.door} request of {load.connections} connections was answered in {load.seconds:g} s"
        )
    return report


def _by_own(load: InferLoad) -> InferReport:
    command = [sys.executable, "-m", "charonia.bench.load.infer_load"]
    run = subprocess.run(command, input=msgspec.json.encode(load), capture_output=True, timeout=load.seconds + 60)
    if run.returncode:
        raise Unavailable(f"a generator failed:\n{run.stderr.decode(errors='replace')[-2000:]}")
    return msgspec.json.decode(run.stdout, type=InferReport)


_PATIENCE = 30
"""Seconds that an answer may take."""

_SUMMARY = """\
done = function(summary, latency, requests)
  local failed = summary.errors
  io.write(string.format(
    '{"answers":%d,"microseconds":%d,"refused":%d,"broken":%d,"p50":%f,"p99":%f}\\n',
    summary.requests, summary.duration, failed.status,
    failed.connect + failed.read + failed.write + failed.timeout, latency:percentile(50), latency:percentile(99)
  ))
end
"""
_TRAFFIC = re.compile(
    r"^requests: .* (\d+) done, .*^status codes: (\d+) 2xx, .*, \S+ \((\d+)\) data$", re.MULTILINE | re.DOTALL
)
_HEAD = struct.Struct(">BI")
"""Of a gRPC message: whether it is compressed, and its length."""


class WrkSummary(msgspec.Struct, frozen=True):
    """The summary that our script makes wrk print. `refused`: answers with a status above 399; `broken`: requests
    without an answer; times in microseconds."""

    answers: int
    microseconds: int
    refused: int
    broken: int
    p50: float
    p99: float


class H2loadTraffic(msgspec.Struct, frozen=True):
    """The summary of h2load: requests that ended, those with status 200, and the bytes of their bodies."""

    done: int
    succeeded: int
    data: int


def by_wrk(load: InferLoad) -> InferReport:
    """Put an HTTP load to a server.

    Raises:
        Unavailable: wrk failed.
    """
    head, _, body = http_request(load).partition(b"\r\n\r\n")
    with TemporaryDirectory(prefix="charonia-bench-") as directory:
        sent, script = Path(directory, "body"), Path(directory, "infer.lua")
        sent.write_bytes(body)
        script.write_text(_script(head, sent))
        url = f"http://{LOOPBACK}:{load.port}/v2/models/{load.model}/infer"
        options = ("-t1", f"-c{load.connections}", f"-d{math.ceil(load.seconds)}s", f"--timeout={_PATIENCE}s")
        said, cpu = _run("wrk", *options, "-s", str(script), url)
    return wrk_report(read_wrk(said), cpu)


def _script(head: bytes, body: Path) -> str:
    lines = [line.split(": ", 1) for line in head.decode().split("\r\n")[1:]]
    headers = [f'wrk.headers["{name}"] = "{value}"' for name, value in lines if name not in ("host", "content-length")]
    read = f'local file = io.open("{body}", "rb")\nwrk.body = file:read("*a")\nfile:close()'
    return "\n".join(['wrk.method = "POST"', *headers, read, _SUMMARY])


def read_wrk(said: str) -> WrkSummary:
    """Raises `Unavailable` where there is no summary."""
    try:
        return msgspec.json.decode(said.rstrip().rpartition("\n")[2], type=WrkSummary)
    except msgspec.MsgspecError as error:
        raise Unavailable(f"wrk ended without a summary ({error}):\n{said[-2000:]}") from None


def wrk_report(summary: WrkSummary, cpu: float) -> InferReport:
    return InferReport(
        answers=summary.answers - summary.refused,
        seconds=summary.microseconds / 1e6,
        cpu=cpu,
        p50=summary.p50 / 1e3,
        p99=summary.p99 / 1e3,
        errors=summary.refused + summary.broken,
    )


def by_h2load(load: InferLoad) -> InferReport:
    """Put a gRPC load to a server.

    Raises:
        Unavailable: h2load failed, or a first request did.
    """
    count, message = connections(load), grpc_request(load)
    with TemporaryDirectory(prefix="charonia-bench-") as directory:
        sent, times = Path(directory, "message"), Path(directory, "times")
        sent.write_bytes(_HEAD.pack(0, len(message)) + message)
        url = f"http://{LOOPBACK}:{load.port}{METHOD}"
        always = (f"-d{sent}", "-H", "content-type: application/grpc", "-H", "te: trailers", url)
        first = read_h2load(_run("h2load", "-n1", "-c1", *always)[0])
        if not first.data:
            raise Unavailable(f"model '{load.model}' refused a first request over gRPC")
        seconds, streams = math.ceil(load.seconds), math.ceil(load.connections / count)
        options = (f"-c{count}", f"-m{streams}", f"-D{seconds}", f"--log-file={times}")
        said, cpu = _run("h2load", *options, *always)
        taken = np.loadtxt(times, np.int64, usecols=2, ndmin=1)
    return h2load_report(read_h2load(said), first.data, H2loadTimes(seconds, cpu, taken))


class H2loadTimes(NamedTuple):
    """The seconds and CPU seconds of h2load, and [answers] the microseconds of each answer."""

    seconds: float
    cpu: float
    taken: NDArray[np.int64]


def read_h2load(said: str) -> H2loadTraffic:
    """Raises `Unavailable` where there is no summary."""
    found = _TRAFFIC.search(said)
    if found is None:
        raise Unavailable(f"h2load ended without a summary:\n{said[-2000:]}")
    return H2loadTraffic(*map(int, found.groups()))


def h2load_report(traffic: H2loadTraffic, size: int, span: H2loadTimes) -> InferReport:
    """`size`: bytes of an answer. A call that fails has status 200 too, and no body."""
    good = min(traffic.data // size, traffic.succeeded)
    p50, p99 = np.percentile(span.taken, [50, 99]).tolist() if span.taken.size else (0.0, 0.0)
    return InferReport(good, span.seconds, span.cpu, p50 / 1e3, p99 / 1e3, traffic.done - good)


def _run(*command: str) -> tuple[str, float]:
    """The output of the command, and its CPU seconds.

    Raises:
        Unavailable: it failed.
    """
    before = _cpu()
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if run.returncode:
        raise Unavailable(f"{command[0]} failed:\n{(run.stderr or run.stdout)[-2000:]}")
    return run.stdout, _cpu() - before


def _cpu() -> float:
    """The CPU seconds of children that have ended."""
    used = getrusage(RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


_GENERATORS: Mapping[Driver, Callable[[InferLoad], InferReport]] = {"own": _by_own, "wrk": by_wrk, "h2load": by_h2load}
