"""What a quick analysis finds, beside an exhaustive one: `python -m tests.proofs.analyze [--models mlp]`.

Over a grid of 48 configurations of a large network in ONNX, and of a language model of half a billion random weights,
`charonia analyze` runs as a user runs it, once exhaustively and once quickly. The two configurations that it prints are
then served and measured A B A B. Exits with 1 where the quick one took more than a fifth of the sweep's time, or its
configuration is more than 5 % below the other's.

    python -m tests.proofs.analyze --scratch DIR
    python -m tests.proofs.analyze --models mlp --seconds 2
    python -m tests.proofs.analyze --models llm --checkpoint examples/model_repository/demo/1 --seconds 2
"""

import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Annotated, Literal, NamedTuple, TypeAlias

import msgspec
from cyclopts import App, Parameter
from rich.console import Console

from charonia.bench.checkpoint import write_shape
from charonia.bench.command import Count, Log, Positive, exit_on_error, log_to, run_command
from charonia.bench.load.driver import LoopMode, RequestOptions
from charonia.bench.load.infer_load import InferLoad, run_load
from charonia.bench.load.plan import Prompts
from charonia.bench.load.planned_requests import uniform_jobs
from charonia.bench.load.worker import LoadRun, LoadTarget, run
from charonia.bench.server_process import own_server
from charonia.core.errors import Unavailable
from charonia.extras.optimizer.search_goal import ConfigurationTrial

from ..onnx_models import write_mlp

MOST_TIME, LEAST_SPEED = 0.2, 0.95
GRID_POINTS = 48

ModelKind: TypeAlias = Literal["mlp", "llm"]

app = App(name="python -m tests.proofs.analyze", help=__doc__)

_MLP_SIZES = (256, 4096, 4096, 4096, 32)
_MLP_CONFIG = 'backend: "onnxruntime"\nmax_batch_size: 32\n'
_LLM_CONFIG = """\
backend: "charonia"
parameters {{ key: "cache_dir" value {{ string_value: "{cache}" }} }}
parameters {{ key: "kv_cache_bytes" value {{ string_value: "268435456" }} }}
"""
_ENDLESS = 100_000


class AnalysisGrid(NamedTuple):
    """A model to analyze: its sweeps, of `GRID_POINTS` together, and its load."""

    name: ModelKind
    sweeps: Sequence[str]
    concurrency: int
    prompt: int = 64
    new: int = 16

    def flags(self) -> list[str]:
        """Those of `charonia analyze`."""
        load = ["--concurrency", str(self.concurrency), "--prompt", str(self.prompt), "--new", str(self.new)]
        return ["--model", self.name, *load, *(f"--sweep={sweep}" for sweep in self.sweeps)]


GRIDS = {
    "mlp": AnalysisGrid(
        "mlp",
        (
            "instances=1,2",
            "max_batch_size=4,8,16,32",
            "max_queue_delay_microseconds=0,2000,20000",
            "intra_op_thread_count=1,2",
        ),
        concurrency=32,
    ),
    "llm": AnalysisGrid(
        "llm",
        (
            "max_num_seqs=2,4,8,16",
            "max_num_batched_tokens=128,256,512",
            "quantization=none,int8",
            "kv_cache_dtype=auto,int8",
        ),
        concurrency=16,
    ),
}


class AnalysisRun(NamedTuple):
    """What a run of the command gave. `sweep`: seconds of the exploration, `whole` of all measurements; `config`: the
    text of config.pbtxt that it printed."""

    sweep: float
    whole: float
    measured: int
    config: str


class _Line(msgspec.Struct):
    trial: ConfigurationTrial


def run_analysis(repository: Path, grid: AnalysisGrid, search: str, seconds: float, report: Path) -> AnalysisRun:
    """Run `charonia analyze`, as a user does.

    Raises:
        Unavailable: it failed; the message holds its last words.
    """
    command = [sys.executable, "-m", "charonia", "analyze", str(repository), *grid.flags(), "--search", search]
    command += ["--seconds", f"{seconds:g}", "--budget", "6h", "--report", str(report)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Unavailable(f"charonia analyze failed:\n{(done.stderr or done.stdout)[-2000:]}")
    lines = report.with_suffix(".jsonl").read_bytes().splitlines()[1:]
    trials = [msgspec.json.decode(line, type=_Line).trial for line in lines]
    swept = [trial for trial in trials if trial.seconds == seconds][:GRID_POINTS]
    config = done.stdout.partition(f"{grid.name}/config.pbtxt:\n")[2].rpartition("report: ")[0]
    return AnalysisRun(
        sum(trial.wall for trial in swept),
        sum(trial.wall for trial in trials),
        len({trial.configuration for trial in trials}),
        config,
    )


def measure_config(repository: Path, grid: AnalysisGrid, config: str, seconds: float) -> float:
    """Inferences or output tokens a second of the model with this config, in a server of its own."""
    with TemporaryDirectory(prefix="charonia-proof-") as directory:
        model = Path(directory) / grid.name
        model.mkdir()
        (model / "1").symlink_to((repository / grid.name / "1").resolve())
        (model / "config.pbtxt").write_text(config)
        with own_server("--model-repository", directory) as place:
            if grid.name == "mlp":
                load = InferLoad(
                    door="binary",
                    port=place.http_port,
                    connections=grid.concurrency,
                    seconds=seconds,
                    model=grid.name,
                    name="INPUT",
                    shape=(1, _MLP_SIZES[0]),
                )
                return run_load(load).rate
            target = LoadTarget(
                host=place.host, port=place.http_port, door="completions", manner=RequestOptions(grid.name)
            )
            jobs = uniform_jobs([0.0] * _ENDLESS, grid.prompt, grid.new)
            pace = LoopMode(concurrency=grid.concurrency, duration=seconds)
            (outcome,) = run(LoadRun(target=target, jobs=jobs, prompts=Prompts(), pace=pace))
            # Requests at a time, over the mean time of one: what has only begun at the end counts as little as it is.
            whole = fmean(record.ended - record.sent for record in outcome.records)
            return grid.concurrency * fmean(record.tokens for record in outcome.records) / whole


def write_model(repository: Path, kind: ModelKind, checkpoint: Path | None) -> None:
    """Write the model into the repository; nothing where it is already. Without a `checkpoint` a language model has
    random weights."""
    folder = repository / kind
    if (folder / "config.pbtxt").exists():
        return
    folder.mkdir(parents=True)
    if kind == "mlp":
        write_mlp(folder / "1" / "model.onnx", _MLP_SIZES)
        config = _MLP_CONFIG
    else:
        if checkpoint is None:
            write_shape(folder / "1")
        else:
            (folder / "1").symlink_to(checkpoint.resolve())
        config = _LLM_CONFIG.format(cache=repository.parent / "packed")
    (folder / "config.pbtxt").write_text(config)


def prove(scratch: Path, kind: ModelKind, checkpoint: Path | None, seconds: float, repeats: int, log: Log) -> bool:
    """Whether the quick analysis of a model keeps both bounds."""
    grid, repository = GRIDS[kind], scratch / f"{kind if checkpoint is None else checkpoint.name}-models"
    write_model(repository, kind, checkpoint)
    runs = {}
    for search in ("exhaustive", "quick"):
        log(f"{kind}: {search} ...")
        report = scratch / f"{kind}-{search}.html"
        report.with_suffix(".jsonl").unlink(missing_ok=True)
        runs[search] = run_analysis(repository, grid, search, seconds, report)
    sweep, quick = runs["exhaustive"], runs["quick"]
    share = quick.whole / sweep.sweep
    log(
        f"{kind}: the sweep of {sweep.measured} configurations took {sweep.sweep:.0f} s, the quick search"
        f" {quick.whole:.0f} s over {quick.measured}, {share:.0%} (at most {MOST_TIME:.0%})"
    )
    turns: dict[str, list[float]] = {search: [] for search in runs}
    for _ in range(repeats):
        for search, rates in turns.items():
            rates.append(measure_config(repository, grid, runs[search].config, seconds))
    one, other = (median(rates) for rates in turns.values())
    for search, rates in turns.items():
        log(f"{kind}: {search}'s best again: {median(rates):.1f}/s ({', '.join(f'{rate:.1f}' for rate in rates)})")
    log(f"{kind}: quick over exhaustive {other / one:.3f} (at least {LEAST_SPEED})")
    return share <= MOST_TIME and other / one >= LEAST_SPEED


@app.default
def main(
    *,
    models: Annotated[tuple[ModelKind, ...], Parameter(consume_multiple=True, negative=())] = ("mlp", "llm"),
    checkpoint: Path | None = None,
    seconds: Annotated[float, Positive] = 6.0,
    repeats: Count = 3,
    scratch: Path | None = None,
) -> int:
    """Run both searches over each model, and measure what they found.

    Parameters
    ----------
    models
        Which.
    checkpoint
        Directory of a language model, instead of random weights of Qwen2.5-0.5B's shape.
    seconds
        Of load of a full measurement, and of a turn of what was found.
    repeats
        Turns of each of the two.
    scratch
        Keep models and reports here.
    """
    log = log_to(Console())
    with exit_on_error(), ExitStack() as stack:
        folder = scratch or Path(stack.enter_context(TemporaryDirectory(prefix="charonia-proof-")))
        kept = [prove(folder.resolve(), kind, checkpoint, seconds, repeats, log) for kind in models]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    run_command(app)
