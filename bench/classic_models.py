"""The gain of batching where the model is the work: ONNX models behind binary HTTP, beside onnxruntime in a process.

    python -m charonia.bench.classic_models --connections 32 --seconds 5

Two networks of linear layers with random weights. A small one (50-1024-1024-1), whose requests cost the server as much
as the model, beside our own rate with the identity model. A large one of 35 M weights (139 MB), whose time goes into
reading them, with dynamic batching and without, beside onnxruntime alone at batch 32 with as many threads. Its delay is
longer than its execution: a client with an answer is back before the next batch leaves, so all go together; with a
shorter delay they form two groups, which take turns. The generator computes on the same cores; `net` is without its
share of them. Needs the packages `onnx` and `onnxruntime`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Annotated, Any

import msgspec
import numpy as np
from cyclopts import App, Parameter
from cyclopts.validators import Number
from rich.console import Console
from rich.table import Table

from ..core.errors import Unsupported
from ..processes.host import usable_cores
from .classic import IDENTITY
from .command import Count, Log, exit_on_error, log_to, report_console
from .load.bare_infer import NAME
from .load.infer_generators import Driver, Generator, describe_generators, find_generator, run_load
from .load.infer_load import InferLoad
from .load.onnx_mlp import write_mlp
from .server_process import ServerAddress, own_server

_BATCH = 32
_SMALL = (50, 1024, 1024, 1)
_LARGE = (256, 4096, 4096, 4096, 32)
_CONFIG = """\
backend: "onnxruntime"
max_batch_size: 32
instance_group { kind: KIND_CPU count: 1 }
"""
_DYNAMIC = "dynamic_batching { preferred_batch_size: 32 max_queue_delay_microseconds: 100000 }\n"
_ALONE = "onnxruntime"

app = App(name="python -m charonia.bench.classic_models", help=__doc__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingTrial:
    """The load of every contender."""

    connections: Count = 32
    """Requests at a time."""
    seconds: Annotated[float, Parameter(validator=Number(gt=0))] = 4.0
    """Of each turn."""
    repeats: Count = 3
    """Turns of each contender."""
    generator: Generator = "auto"
    """What drives them: wrk, which wants whole seconds, or our own process; auto takes wrk if it is there."""


class BatchingContender(msgspec.Struct, frozen=True):
    """A model of the repository; `beside` names the one whose rate its own is a part of."""

    name: str
    sizes: tuple[int, ...]
    config: str
    beside: str


CONTENDERS = (
    BatchingContender("small", _SMALL, _CONFIG + "dynamic_batching { }\n", NAME),
    BatchingContender("large", _LARGE, _CONFIG + _DYNAMIC, _ALONE),
    BatchingContender("large_unbatched", _LARGE, _CONFIG, _ALONE),
)


class BatchingRun(msgspec.Struct, frozen=True):
    """Requests per second, of onnxruntime alone items per second; and the part of the cores that the generator took."""

    rate: float
    generator: float = 0.0

    @property
    def net(self) -> float:
        return self.rate / (1 - self.generator)


class BatchingComparison(msgspec.Struct, frozen=True):
    """The turns of each contender."""

    trial: BatchingTrial
    turns: dict[str, list[BatchingRun]]

    def median(self, name: str) -> float:
        return median(turn.rate for turn in self.turns[name])

    def net(self, name: str) -> float:
        return median(turn.net for turn in self.turns[name])


def measure(trial: BatchingTrial, log: Log) -> BatchingComparison:
    """Run the contenders in turns.

    Raises:
        Unavailable, Unsupported: the server cannot be started, a generator failed, or a package is missing.
    """
    with TemporaryDirectory(prefix="charonia-bench-") as directory:
        repository = Path(directory)
        _write(repository)
        with own_server("--model-repository", directory) as place:
            turns: dict[str, list[BatchingRun]] = {}
            for _ in range(trial.repeats):
                for name, turn in _turns(trial, place, repository):
                    turns.setdefault(name, []).append(turn)
                    log(f"{name:16} {turn.rate:8.0f}/s")
    return BatchingComparison(trial, turns)


def _turns(trial: BatchingTrial, place: ServerAddress, repository: Path) -> Iterator[tuple[str, BatchingRun]]:
    common: Mapping[str, Any] = {
        "door": "binary",
        "port": place.http_port,
        "connections": trial.connections,
        "seconds": trial.seconds,
    }
    by = find_generator("binary", trial.generator)
    yield NAME, _put(InferLoad(**common), by)
    for each in CONTENDERS:
        yield each.name, _put(InferLoad(**common, model=each.name, name="INPUT", shape=(1, each.sizes[0])), by)
    yield _ALONE, BatchingRun(_alone(repository / "large" / "1" / "model.onnx", trial.seconds))


def _put(load: InferLoad, by: Driver) -> BatchingRun:
    report = run_load(load, by)
    return BatchingRun(report.rate, report.cpu / report.seconds / usable_cores().logical)


def _alone(file: Path, seconds: float) -> float:
    """Items per second of onnxruntime in this process, in batches as large as the server's may be."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = usable_cores().threads
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    given = {"INPUT": np.zeros((_BATCH, _LARGE[0]), np.float32)}
    session.run(None, given)
    count, begun = 0, perf_counter()
    while perf_counter() - begun < seconds:
        session.run(None, given)
        count += _BATCH
    return count / (perf_counter() - begun)


def _write(repository: Path) -> None:
    if find_spec("onnx") is None:
        raise Unsupported("this needs the package `onnx`: pip install onnx")
    (repository / NAME / "1").mkdir(parents=True)
    (repository / NAME / "config.pbtxt").write_text(IDENTITY)
    for each in CONTENDERS:
        write_mlp(repository / each.name / "1" / "model.onnx", each.sizes)
        (repository / each.name / "config.pbtxt").write_text(each.config)


def show(console: Console, rates: BatchingComparison) -> None:
    """Medians, and what part they are of those beside them."""
    console.print(f"driven: {describe_generators(['binary'], rates.trial.generator)}", highlight=False)
    table = Table("model", "per second", "beside", "part of it", "net")
    for each in CONTENDERS:
        rate, other = rates.median(each.name), rates.median(each.beside)
        parts = rate / other, rates.net(each.name) / rates.net(each.beside)
        table.add_row(each.name, f"{rate:.0f}", f"{each.beside} {other:.0f}", *(f"{part:.0%}" for part in parts))
    console.print(table)
    gain = rates.median("large") / rates.median("large_unbatched")
    console.print(f"batching makes the large one {gain:.1f} times as fast", highlight=False)


@app.default
def models(*, trial: Annotated[BatchingTrial, Parameter("*")] = BatchingTrial(), json: Path | None = None) -> None:
    """Compare what models give through the server with what they give without one.

    Parameters
    ----------
    json
        Write the turns to this file.
    """
    console = report_console()
    with exit_on_error():
        rates = measure(trial, log_to(console))
    show(console, rates)
    if json:
        json.write_bytes(msgspec.json.encode(rates))


if __name__ == "__main__":
    app()
