"""The cost of ensembles: the same load to a model alone and through a graph around it, in turns.

    python -m charonia.bench.ensemble
    python -m charonia.bench.ensemble --trials tokens chain --quick
    python -m charonia.bench.ensemble --trials throughput --scratch DIR --script

`tokens`: microseconds of frontend CPU for each token through a graph of three steps, less those of the language model
alone, which is a fake that only counts. `chain`: requests a second through three identity models, as a share of one's.
`throughput`: tokens a second of a language model that computes (random weights, int8) through three steps, as a share
of its own; `--script` adds a graph with a Python step per token. Ends with status 1 if a bar is missed.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal, TypeAlias

import msgspec
from cyclopts import App, Parameter

from ..core.errors import Unavailable
from .checkpoint import ShapeName, prepare_checkpoint
from .command import Count, Log, Positive, Several, exit_on_error, log_to, report_console, run_command
from .load import fake_model
from .load.driver import OK, LoopMode, RequestOptions
from .load.infer_load import InferLoad, run_load
from .load.plan import Prompts
from .load.planned_requests import uniform_jobs
from .load.worker import LoadRun, LoadTarget, WorkerOutcome, run
from .server_process import CpuMeter, ServerAddress, own_server
from .server_trials import speed
from .trial import TrialVerdict, median_of, show_verdicts, take_turns

TrialName: TypeAlias = Literal["tokens", "chain", "throughput"]
_TRIALS: tuple[TrialName, ...] = ("tokens", "chain", "throughput")
_MOST_MICROSECONDS = 60.0
_LEAST_CHAIN = 0.4
_LEAST_THROUGHPUT = 0.9
_Switch = Annotated[bool, Parameter(negative=())]

app = App(name="python -m charonia.bench.ensemble", help=__doc__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphLoad:
    """The load of every turn."""

    streams: Count = 64
    """Requests at a time of `tokens` and `throughput`."""
    prompt: Count = 16
    """Tokens of each prompt, about."""
    new: Count = 128
    """New tokens of each request."""
    step_ms: Annotated[float, Positive] = 15.0
    """Milliseconds that a step of the fake engine takes: at less, tokens merge."""
    connections: Count = 32
    """Requests at a time of `chain`."""
    seconds: Annotated[float, Positive] = 3.0
    """Of each turn of `chain`."""
    repeats: Count = 3
    """Turns of each side."""
    script: _Switch = False
    """In `throughput`, a graph with a Python step as well."""
    quick: _Switch = False
    """A turn or two of a fraction of the load, to see that it runs; the figures mean nothing."""

    def sized(self) -> "GraphLoad":
        return replace(self, streams=4, new=8, repeats=1, seconds=1.0, connections=4) if self.quick else self


class GraphTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of one side: `per_second` tokens or requests, and microseconds of frontend CPU for each."""

    trial: TrialName
    model: str
    per_second: float
    microseconds: float


Turns: TypeAlias = dict[str, list[GraphTurn]]
"""By model."""


def describe(turn: GraphTurn) -> str:
    return f"{turn.trial}, {turn.per_second:.1f}/s, {turn.microseconds:.1f} µs of frontend CPU each"


def tokens_trial(load: GraphLoad, log: Log) -> tuple[Turns, list[TrialVerdict]]:
    longest = load.prompt * 8 + load.new + fake_model.BLOCK
    parameters = fake_model.stream_parameters(load.streams, load.step_ms, longest)
    with TemporaryDirectory(prefix="charonia-bench-") as scratch:
        repository = fake_model.write_repository(Path(scratch) / "models", parameters)
        write_graphs(repository)
        with own_server("--model-repository", str(repository)) as place:
            contenders = {model: partial(_stream, "tokens", place, model, load) for model in (LLM, GRAPH)}
            turns = take_turns(contenders, load.repeats, log, describe)
    alone, through = (median_of(runs, lambda turn: turn.microseconds) for runs in turns.values())
    what = f"frontend CPU of a token, µs: {through:.1f} through three steps, {alone:.1f} alone"
    return turns, [TrialVerdict(what, through - alone, _MOST_MICROSECONDS, at_least=False)]


def throughput_trial(
    checkpoint: Path, load: GraphLoad, parameters: Mapping[str, object], log: Log
) -> tuple[Turns, list[TrialVerdict]]:
    """`parameters`: of the model of `checkpoint`, which computes."""
    graphs = (GRAPH, SCRIPTED) if load.script else (GRAPH,)
    with TemporaryDirectory(prefix="charonia-bench-") as scratch:
        repository = Path(scratch) / "models"
        (repository / LLM).mkdir(parents=True)
        (repository / LLM / "1").symlink_to(checkpoint.resolve())
        fake_model.write_config(repository / LLM, {"max_num_seqs": load.streams, **parameters})
        write_graphs(repository, script=load.script)
        with own_server("--model-repository", str(repository)) as place:
            contenders = {model: partial(_stream, "throughput", place, model, load) for model in (LLM, *graphs)}
            turns = take_turns(contenders, load.repeats, log, describe)
    alone, *through = (median_of(runs, lambda turn: turn.per_second) for runs in turns.values())
    kinds = ("three steps", "three steps, one in Python")
    said = [
        f"tokens/s of {load.streams} streams: {rate:.1f} through {kind}, {alone:.1f} alone"
        for rate, kind in zip(through, kinds, strict=False)
    ]
    bars = (_LEAST_THROUGHPUT, 0.0)
    return turns, [
        TrialVerdict(what, rate / alone, bar, at_least=True)
        for what, rate, bar in zip(said, through, bars, strict=False)
    ]


_seeds = count()
"""Each turn has prompts of its own: none is in a prefix cache."""


def _stream(trial: TrialName, place: ServerAddress, model: str, load: GraphLoad, number: int) -> GraphTurn:
    """A closed loop of as many streams; every stream has all its tokens."""
    jobs = uniform_jobs([0.0] * (2 * load.streams), load.prompt, load.new)
    target = LoadTarget(
        host=place.host, port=place.http_port, door="generate", manner=RequestOptions(model, counted=False)
    )
    pace = LoopMode(concurrency=load.streams)
    meter = CpuMeter(place.pid)
    prompts = Prompts(form="text", seed=next(_seeds))
    [outcome] = run(LoadRun(target=target, jobs=jobs, prompts=prompts, pace=pace), on_start=meter.start)
    spent, tokens = meter.spent(), _tokens(model, outcome)
    microseconds = float("nan") if spent is None else spent.frontend / tokens * 1e6
    return GraphTurn(trial=trial, model=model, per_second=speed(outcome), microseconds=microseconds)


def _tokens(model: str, outcome: WorkerOutcome) -> int:
    failed = [record.status for record in outcome.records if record.status != OK]
    if failed:
        raise Unavailable(f"{len(failed)} of {len(outcome.records)} streams of '{model}' failed: {failed[0]}")
    return sum(record.tokens for record in outcome.records)


def chain_trial(load: GraphLoad, log: Log) -> tuple[Turns, list[TrialVerdict]]:
    with TemporaryDirectory(prefix="charonia-bench-") as scratch:
        write_chain(Path(scratch))
        with own_server("--model-repository", scratch) as place:
            contenders = {model: partial(_ask, place, model, load) for model in (IDENTITY, CHAIN)}
            turns = take_turns(contenders, load.repeats, log, describe)
    alone, through = (median_of(runs, lambda turn: turn.per_second) for runs in turns.values())
    what = f"requests/s: {through:.0f} through three identity models, {alone:.0f} of one"
    return turns, [TrialVerdict(what, through / alone, _LEAST_CHAIN, at_least=True)]


def _ask(place: ServerAddress, model: str, load: GraphLoad, number: int) -> GraphTurn:
    infer_load = InferLoad(
        door="binary", port=place.http_port, connections=load.connections, seconds=load.seconds, model=model
    )
    meter = CpuMeter(place.pid)
    meter.start()
    report = run_load(infer_load)
    spent = meter.spent()
    # The meter sees the warm-up too, which is answered at the same rate.
    answers = report.answers * (1 + infer_load.warm_up / report.seconds)
    microseconds = float("nan") if spent is None else spent.frontend / answers * 1e6
    return GraphTurn(trial="chain", model=model, per_second=report.rate, microseconds=microseconds)


@contextmanager
def _computing(
    load: GraphLoad, shape: ShapeName, scratch: Path | None, log: Log
) -> Iterator[tuple[Path, Mapping[str, object]]]:
    """A checkpoint that computes, and the parameters of its model."""
    chosen: ShapeName = "granite-tiny" if load.quick else shape
    parameters = {} if load.quick else {"dtype": "bfloat16", "quantization": "int8", "max_model_len": 2048}
    with prepare_checkpoint(None, chosen, scratch, log) as (checkpoint, _):
        yield checkpoint, parameters


@app.default
def ensemble(
    *,
    trials: Annotated[tuple[TrialName, ...], Several] = _TRIALS,
    load: Annotated[GraphLoad, Parameter("*")] = GraphLoad(),
    shape: ShapeName = "qwen2.5-0.5b",
    scratch: Path | None = None,
    json: Path | None = None,
) -> int:
    """Compare models alone with graphs around them.

    Parameters
    ----------
    trials
        Which of them.
    shape
        Whose shape the random weights of `throughput` have.
    scratch
        Keep made checkpoints here; by default they are made anew each time.
    json
        Write all turns and the verdicts to this file.
    """
    console, load = report_console(), load.sized()

    log = log_to(console)
    turns: list[GraphTurn] = []
    verdicts: list[TrialVerdict] = []
    with exit_on_error():
        for trial in trials:
            if trial == "throughput":
                with _computing(load, shape, scratch, log) as (checkpoint, parameters):
                    taken, reached = throughput_trial(checkpoint, load, parameters, log)
            else:
                taken, reached = (tokens_trial if trial == "tokens" else chain_trial)(load, log)
            turns += chain.from_iterable(taken.values())
            verdicts += reached
    show_verdicts(console, verdicts)
    if json:
        json.write_bytes(msgspec.json.encode({"load": load, "turns": turns, "verdicts": verdicts}))
    return 0 if load.quick or all(verdict.met for verdict in verdicts) else 1


LLM = "fake"
GRAPH = "graph"
"""The language model, then two steps in the server's process, for each of its responses."""
SCRIPTED = "scripted"
"""The same with a Python step in place of the second."""
IDENTITY = "identity"
CHAIN = "chain"
"""Three identity models."""

_TEXT_STEP = """
backend: "{backend}"
input {{ name: "TEXT" data_type: TYPE_STRING dims: [ -1 ] }}
output {{ name: "SAME" data_type: TYPE_STRING dims: [ -1 ] }}
"""
_NUMBERS = """
backend: "identity"
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: 16 }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: 16 }
"""
_SCRIPT = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        texts = [pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("SAME", text)]) for text in texts]
"""
_GRAPH = """
platform: "ensemble"
model_transaction_policy { decoupled: true }
input { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }
input { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true }
output { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] }
"""
_CHAIN = """
platform: "ensemble"
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: 16 }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: 16 }
"""


def write_graphs(directory: Path, llm: str = LLM, script: bool = False) -> None:
    """Add the ensembles and their steps to the repository `directory`, around its language model `llm`."""
    _write(directory, "first", _TEXT_STEP.format(backend="identity"))
    _write(directory, "second", _TEXT_STEP.format(backend="identity"))
    _write(directory, GRAPH, _GRAPH + _steps(_llm_step(llm), *_text_steps("first", "second")))
    if script:
        (_write(directory, "script", _TEXT_STEP.format(backend="python")) / "model.py").write_text(_SCRIPT)
        _write(directory, SCRIPTED, _GRAPH + _steps(_llm_step(llm), *_text_steps("first", "script")))


def write_chain(directory: Path) -> None:
    """Add `identity` and `chain` to the repository `directory`."""
    _write(directory, IDENTITY, _NUMBERS)
    tensors = ("INPUT0", "one", "two", "OUTPUT0")
    steps = [_step(IDENTITY, {"INPUT0": taken}, {"OUTPUT0": made}) for taken, made in pairwise(tensors)]
    _write(directory, CHAIN, _CHAIN + _steps(*steps))


def _write(directory: Path, name: str, config: str) -> Path:
    (directory / name / "1").mkdir(parents=True)
    (directory / name / "config.pbtxt").write_text(config)
    return directory / name / "1"


def _llm_step(llm: str) -> str:
    return _step(llm, {"text_input": "text_input", "stream": "stream"}, {"text_output": "text"})


def _text_steps(first: str, second: str) -> Sequence[str]:
    return _step(first, {"TEXT": "text"}, {"SAME": "same"}), _step(second, {"TEXT": "same"}, {"SAME": "text_output"})


def _step(model: str, taken: dict[str, str], made: dict[str, str]) -> str:
    maps = [("input_map", taken), ("output_map", made)]
    lines = [f'{kind} {{ key: "{key}" value: "{value}" }}' for kind, pairs in maps for key, value in pairs.items()]
    return f'step {{ model_name: "{model}" model_version: -1 {" ".join(lines)} }}'


def _steps(*steps: str) -> str:
    return "ensemble_scheduling {\n" + "\n".join(steps) + "\n}\n"


if __name__ == "__main__":
    run_command(app)
