"""Models are loaded and unloaded while their processes are killed: `python -m tests.proofs.processes`.

One model has an engine core, one a core with ranks, one isolated instances. Each is loaded and unloaded again and again
beside the others, while random processes of theirs get SIGKILL, which may fail a load. Every request to load or unload
must be answered; in the end each model must load and be ready; and when all are unloaded no process, zombie or
descriptor may be left, and no traceback in the log.
"""

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from urllib.error import HTTPError

from cyclopts import App

from charonia.bench.load.fake_model import NAME as COUNTING
from charonia.bench.load.fake_model import write_repository as write_counting
from charonia.bench.server_process import ServerAddress, children, fetch, own_server
from charonia.core.errors import Unavailable

from ..onnx_models import write_mlp
from ..tiny_model import NAME as SPLIT
from ..tiny_model import write_repository as write_split
from .bodies import tracebacks
from .process_stats import ServerStats, process_name, read_server_stats, settled

ISOLATED = "isolated"
MODELS = (COUNTING, SPLIT, ISOLATED)
_ISOLATED = f"""
name: "{ISOLATED}"
backend: "onnxruntime"
instance_group {{ count: 3 kind: KIND_CPU }}
parameters {{ key: "EXECUTION" value {{ string_value: "isolated" }} }}
"""
_RANKS = {"kv_cache_bytes": 16 << 20, "tensor_parallel_size": 2}
_PREY = ("charonia-core", "charonia-rank", "charonia-model")
_ORPHANS = ("EOFError", "BrokenPipeError")
"""What a process says whose core was killed while it started it."""
_PAUSE, _PEACE = 0.4, 1.0
"""Seconds that a model is left loaded, and all processes in peace, at most; in peace they are left for as long as a
load takes where that is longer, or none would succeed."""
_PATIENCE = 120.0
_POLL_SECONDS = 0.05


app = App(name="python -m tests.proofs.processes", help=__doc__)


class ProcessesResult(NamedTuple):
    """The result of a run: kills, loads that succeeded and that failed, and failed checks."""

    kills: int
    loaded: int
    failed: int
    faults: Sequence[str]


@contextmanager
def serve_models(models: Sequence[str]) -> Iterator[ServerAddress]:
    """A server that loads these of `MODELS` on request."""
    with TemporaryDirectory(prefix="charonia-proof-") as directory:
        repository = Path(directory) / "models"
        write: Mapping[str, Callable[[], object]] = {
            COUNTING: lambda: write_counting(repository, {}),
            SPLIT: lambda: write_split(repository, _RANKS),
            ISOLATED: lambda: write_mlp(repository / ISOLATED / "1" / "model.onnx", (4, 4)),
        }
        for name in models:
            write[name]()
        if ISOLATED in models:
            (repository / ISOLATED / "config.pbtxt").write_text(_ISOLATED)
        with own_server("--model-repository", str(repository), "--model-control-mode", "explicit") as place:
            yield place


def load_and_unload(place: ServerAddress, models: Sequence[str], rounds: int, seed: int = 0) -> ProcessesResult:
    """Load and unload each model so often, all concurrently, while their processes are killed."""
    peace = _PEACE
    for name in models:  # what is imported once stays
        began = time.monotonic()
        _expect(place, f"{name}/load", 200)
        peace = max(peace, time.monotonic() - began)
    for name in models:
        _expect(place, f"{name}/unload", 200)
    before = _peace(place)
    with ThreadPoolExecutor(len(models) + 1) as threads:
        changes = [threads.submit(_change, place, name, rounds, seed + index) for index, name in enumerate(models)]
        killing = threads.submit(_kill_until, place, lambda: all(each.done() for each in changes), peace, seed)
        statuses = [status for change in changes for status in change.result()]
    for name in models:
        _expect(place, f"{name}/load", 200)
        _until(lambda name=name: _ask(place, f"/v2/models/{name}/ready") == 200, f"{name} is ready")  # type: ignore[misc]
        _expect(place, f"{name}/unload", 200)
    broken = [line for line in tracebacks(place) if not line.startswith(_ORPHANS)]
    _peace(place)
    left = [*asyncio.run(settled(place, before)).beyond(before), *broken]
    return ProcessesResult(killing.result(), statuses.count(200), len(statuses) - statuses.count(200), left)


def _change(place: ServerAddress, name: str, rounds: int, seed: int) -> list[int]:
    """The HTTP statuses of all loads."""
    chance, statuses = random.Random(seed), []
    for _ in range(rounds):
        statuses.append(_ask(place, f"/v2/repository/models/{name}/load", {}))
        time.sleep(chance.random() * _PAUSE)
        _expect(place, f"{name}/unload", 200)
    return statuses


def _kill_until(place: ServerAddress, over: Callable[[], bool], peace: float, seed: int) -> int:
    chance, kills = random.Random(seed), 0
    while not over():
        time.sleep(chance.random() * peace)
        prey = [pid for pid in _descendants(place) if process_name(pid) in _PREY]
        if prey:
            with suppress(ProcessLookupError):
                os.kill(chance.choice(prey), signal.SIGKILL)
                kills += 1
    return kills


def _descendants(place: ServerAddress) -> list[int]:
    assert place.pid is not None
    below = children(place.pid)
    with suppress(FileNotFoundError):  # who ends meanwhile has none
        return below + [child for pid in below for child in children(pid)]
    return below


def _peace(place: ServerAddress) -> ServerStats:
    """The processes that are left once no model should have one, or after a while."""
    with suppress(TimeoutError):
        _until(
            lambda: (
                not any(each.name in _PREY for each in read_server_stats(place).others + read_server_stats(place).cores)
            ),
            "all ended",
        )
    return read_server_stats(place)


def _expect(place: ServerAddress, change: str, status: int) -> None:
    found = _ask(place, f"/v2/repository/models/{change}", {})
    if found != status:
        raise Unavailable(f"{change} was answered with {found}")


def _until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not so after {_PATIENCE:g} s: {what}")
        time.sleep(_POLL_SECONDS)


def _ask(place: ServerAddress, path: str, body: object = None) -> int:
    """The HTTP status. Raises `TimeoutError` without one."""
    try:
        fetch(place, path, body, timeout=_PATIENCE)
    except HTTPError as error:
        return error.code
    return 200


@app.default
def main(rounds: int = 40) -> None:
    """Load and unload each model so often; the exit code is 0 if every check held."""
    with serve_models(MODELS) as place:
        fought = load_and_unload(place, MODELS, rounds)
    faults = [*fought.faults, *(["no load succeeded"] if not fought.loaded else [])]
    for fault in faults:
        print(fault)
    print(f"{fought.kills} kills; {fought.loaded} loads succeeded, {fought.failed} failed; every unload was answered")
    sys.exit(bool(faults))


if __name__ == "__main__":
    app()
