"""Which generator drives a load: wrk or h2load where they are installed, our own elsewhere.

Knows nothing of what is measured.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, TypeAlias

import msgspec

from ...core.errors import Unavailable
from .infer_load import Door, InferLoad, InferReport
from .wrk_h2load import by_h2load, by_wrk

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


_GENERATORS: Mapping[Driver, Callable[[InferLoad], InferReport]] = {"own": _by_own, "wrk": by_wrk, "h2load": by_h2load}
