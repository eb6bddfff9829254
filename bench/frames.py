"""What a frame costs on its way to the wire: the server's CPU time for each event of many streams, beside a bare
handler of uvicorn, or a bare stream of grpc.aio, that sends frames of the same size in the same rhythm.

    python -m charonia.bench.frames
    python -m charonia.bench.frames --doors completions grpc --kinds plain logprobs --repeats 5 --before DIR
    python -m charonia.bench.frames --doors completions --frontends 4 --step-ms 8 --stages
    python -m charonia.bench.frames --doors completions --beside

The model's tokens are counted, not computed, out of a vocabulary of 150 k that makes text of them: words of several
bytes a token, characters that two tokens share. Contenders take turns. CPU seconds are those of /proc while all streams
run, but for the engine core's, by process: the server's own, which is the hub where there are several frontends, and
theirs; `kernel` is what of them the kernel's calls are, writes above all. `--stages` tells where in our code it goes.
`--beside` measures the time to the first token of one request beside the streams, and alone. Ends with status 1 if a
bar is missed.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from cyclopts import App, Parameter
from cyclopts.validators import Number
from rich.console import Console

from ..core.errors import Unavailable
from .command import Count, Log, Positive, Several, exit_on_error, log_to, report_console, run_command, table_of
from .load import bare_frames, fake_model, fake_text, stage_sampler
from .load.driver import EndpointName, LoopMode, RequestOptions
from .load.figures import compute_figures
from .load.frames_meter import SAMPLING_SECONDS, FramesMeter, FramesRun
from .load.plan import Prompts
from .load.planned_requests import uniform_jobs
from .load.worker import LoadRun, LoadTarget, run
from .server_process import ServerAddress, own_server
from .trial import TrialVerdict, median_of, ratio_of, show_verdicts, take_turns

FrameKind: TypeAlias = Literal["plain", "usage", "stop", "logprobs", "tools"]

_OURS, _BEFORE, _BARE = "charonia", "before", "bare"
_PROMPT = 16
_PROBES, _PROBE_SECONDS = 60, 4.0
"""Requests whose first token is waited for, at most for so long."""
_FUNCTION = {"name": "look_up", "parameters": {"type": "object", "properties": {"word": {"type": "string"}}}}
_MEMBERS: dict[FrameKind, dict[str, Any]] = {
    "plain": {},
    "usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "stop": {"stop": ["\n\nUser:", "###", "</answer>", "STOP"]},
    "logprobs": {"logprobs": 2},
    "tools": {"tools": [{"type": "function", "function": _FUNCTION}]},
}
"""Of a request's body, where the door calls them so."""
_CHAT_LOGPROBS = {"logprobs": True, "top_logprobs": 2}
_RESPONSES_LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
KINDS: dict[EndpointName, dict[FrameKind, dict[str, Any]]] = {
    "completions": {kind: _MEMBERS[kind] for kind in ("plain", "usage", "stop", "logprobs")},
    "chat": _MEMBERS | {"logprobs": _CHAT_LOGPROBS},
    "generate": {"plain": {}, "stop": _MEMBERS["stop"], "logprobs": {"return_log_probs": True}},
    "messages": {"plain": {}, "tools": {"tools": [{"name": "look_up", "input_schema": _FUNCTION["parameters"]}]}},
    "responses": {
        "plain": {},
        "logprobs": _RESPONSES_LOGPROBS,
        "tools": {"tools": [{"type": "function", **_FUNCTION}]},
    },
    "grpc": {"plain": {}},
}
"""What each door can be asked for, and how."""
_BARS: dict[FrameKind, float] = {"plain": 1.5, "usage": 2.0, "stop": 1.5, "logprobs": 2.0, "tools": 1.5}
_GRPC_BAR = 1 / 0.75
_BESIDE_BAR = 2.0

app = App(name="python -m charonia.bench.frames", help=__doc__)
_Switch = Parameter(negative=())


@dataclass(frozen=True, slots=True, kw_only=True)
class FramesTrial:
    """The load of every turn of every contender."""

    doors: Annotated[tuple[EndpointName, ...], Several] = tuple(KINDS)
    """Protocols."""
    kinds: Annotated[tuple[FrameKind, ...], Several] = ("plain",)
    """What requests ask for beside text; a door that has no such thing is left out."""
    streams: Count = 256
    """Streams at a time."""
    step_ms: Annotated[float, Positive] = 25.0
    """Milliseconds of a step that makes a token for every stream."""
    tokens: Count = 240
    """Of each stream. What is measured is the time in which all of them run."""
    repeats: Count = 3
    """Turns of each contender."""
    frontends: Count = 1
    """Of our servers."""
    vocab: Annotated[int, Parameter(validator=Number(gte=4096))] = fake_text.VOCAB
    """Tokens of the vocabulary."""


def stream_load(
    trial: FramesTrial, place: ServerAddress, door: EndpointName, more: dict[str, Any], fixed: list[int] | None = None
) -> LoadRun:
    """The load of a turn: all streams at once. `more`: members of the bodies; `fixed`: the prompt of all."""
    manner = RequestOptions(fake_model.NAME, counted=False, more=more)
    return LoadRun(
        target=LoadTarget(host=place.host, port=place.port_of(door), door=door, manner=manner),
        jobs=uniform_jobs([0.0] * trial.streams, _PROMPT, trial.tokens),
        prompts=Prompts(form="text", fixed=fixed),
        pace=LoopMode(concurrency=trial.streams),
        warm_up=0,
    )


def write_repository(directory: Path, trial: FramesTrial) -> None:
    """Make `directory` a repository of the model that the streams are of."""
    longest = _PROMPT * fake_model.BLOCK + trial.tokens + fake_model.BLOCK
    parameters = fake_model.stream_parameters(trial.streams, trial.step_ms, longest)
    parameters |= {"executor": "fake", "fake_vocab_size": trial.vocab}
    model = directory / fake_model.NAME
    fake_text.write_text_model(model / "1", trial.vocab)
    (model / "1" / "config.json").write_text("{}")
    fake_model.write_config(model, parameters)


class FramesBench:
    """The servers of a trial, and what is measured of them."""

    def __init__(self, trial: FramesTrial, ours: dict[str, ServerAddress], bare: ServerAddress) -> None:
        self._trial = trial
        self._contenders = ours
        self._bare = bare

    @property
    def ours(self) -> ServerAddress:
        """The server of this code."""
        return self._contenders[_OURS]

    def compare(self, door: EndpointName, kind: FrameKind, log: Log) -> dict[str, list[FramesRun]]:
        """Turns of each contender at one door, behind one that is not counted: what a server does for the first time
        with a token is no cost of a frame, and each of the fake model's texts has other ones."""
        for place in self._contenders.values():
            run(stream_load(self._trial, place, door, KINDS[door][kind]))
        last: list[FramesRun] = []

        def measure_ours(place: ServerAddress, _: int) -> FramesRun:
            last[:] = [self.measure(place, door, kind)]
            return last[0]

        def measure_bare(_: int) -> FramesRun:
            return self._run(self._bare, "grpc" if door == "grpc" else "completions", {}, [last[0].sent, last[0].size])

        contenders: dict[str, Callable[[int], FramesRun]] = {
            name: partial(measure_ours, place) for name, place in self._contenders.items()
        }
        return take_turns(contenders | {_BARE: measure_bare}, self._trial.repeats, log, partial(_line, door, kind))

    def measure(self, place: ServerAddress, door: EndpointName, kind: FrameKind, stages: bool = False) -> FramesRun:
        """A turn of a server of ours."""
        return self._run(place, door, KINDS[door][kind], None, stages)

    def _run(
        self,
        place: ServerAddress,
        door: EndpointName,
        more: dict[str, Any],
        fixed: list[int] | None,
        stages: bool = False,
    ) -> FramesRun:
        meter = FramesMeter(place, stages)
        streams = stream_load(self._trial, place, door, more, fixed)
        return meter.measured(run(streams, on_start=meter.start))

    def first_tokens(self, door: EndpointName, log: Log) -> float:
        """The median time to the first token of a request beside all streams but one, over that alone."""
        place = self.ours
        alone = self._probe(place, door)
        streams = stream_load(self._trial, place, door, {})
        streams = msgspec.structs.replace(
            streams, jobs=streams.jobs[1:], pace=LoopMode(concurrency=len(streams.jobs) - 1)
        )
        started = threading.Event()
        crowd = threading.Thread(target=run, args=(streams,), kwargs={"on_start": started.set}, daemon=True)
        crowd.start()
        started.wait()
        time.sleep(SAMPLING_SECONDS)
        beside = self._probe(place, door)
        crowd.join()
        log(f"{door}: first token {alone * 1e3:.1f} ms alone, {beside * 1e3:.1f} ms beside {len(streams.jobs)} streams")
        return beside / alone

    def _probe(self, place: ServerAddress, door: EndpointName) -> float:
        probes = stream_load(self._trial, place, door, {})
        pace = LoopMode(concurrency=1, duration=_PROBE_SECONDS)
        probes = msgspec.structs.replace(probes, jobs=uniform_jobs([0.0] * _PROBES, _PROMPT, 1), pace=pace, warm_up=1)
        figures = compute_figures([record for outcome in run(probes) for record in outcome.records])
        if figures.ttft is None:
            raise Unavailable(f"no first token came: {figures.errors}")
        return figures.ttft.p50


@contextmanager
def open_bench(trial: FramesTrial, before: Path | None, stages: Path | None = None) -> Iterator[FramesBench]:
    """Servers over one repository; raises `Unavailable` if one cannot be started. `stages`: see `show_stages`."""
    with ExitStack() as stack:
        models = Path(stack.enter_context(TemporaryDirectory(prefix="charonia-bench-"))) / "models"
        write_repository(models, trial)
        flags = ["--model-repository", str(models)]
        places = {}
        if before is not None:
            places[_BEFORE] = stack.enter_context(own_server(*flags, checkout=before))
        if trial.frontends > 1:
            flags += ["--frontends", str(trial.frontends)]
        sampling = None
        if stages is not None:
            sampling = stage_sampler.write_environment(stages)
        places[_OURS] = stack.enter_context(own_server(*flags, environment=sampling))
        yield FramesBench(trial, places, stack.enter_context(bare_frames.bare_server(trial.step_ms / 1e3)))


def _line(door: str, kind: str, turn: FramesRun) -> str:
    rate = turn.frames / turn.seconds
    return f"{door} {kind}: {turn.cpu:.1f} µs of CPU for each of {rate:,.0f} frames/s of {turn.size} bytes"


def judge(door: EndpointName, kind: FrameKind, runs: dict[str, list[FramesRun]]) -> TrialVerdict:
    """A frame's cost beside the bare handler's, and its bar."""
    bar = _GRPC_BAR if door == "grpc" else _BARS[kind]
    return TrialVerdict(
        f"{door}, {kind}: CPU over bare", ratio_of(runs[_OURS], runs[_BARE], _cpu), round(bar, 2), False
    )


def _cpu(turn: FramesRun) -> float:
    return turn.cpu


def show(console: Console, compared: dict[tuple[EndpointName, FrameKind], dict[str, list[FramesRun]]]) -> None:
    """Print the medians of all turns."""
    columns = ("frames/s", "bytes", "CPU µs a frame", "own", "frontends", "kernel", "over bare", "cores")
    table = table_of(("door", "asked for", ""), columns)
    for (door, kind), runs in compared.items():
        for name, turns in runs.items():
            figures = (
                f"{median_of(turns, lambda turn: turn.frames / turn.seconds):,.0f}",
                f"{median_of(turns, lambda turn: turn.size):.0f}",
                f"{median_of(turns, _cpu):.1f}",
                f"{median_of(turns, lambda turn: turn.own):.1f}",
                f"{median_of(turns, lambda turn: turn.frontends):.1f}",
                f"{median_of(turns, lambda turn: turn.kernel):.1f}",
                f"{ratio_of(turns, runs[_BARE], _cpu):.2f}",
                f"{median_of(turns, lambda turn: turn.cores):.2f}",
            )
            table.add_row(door, kind, name, *figures)
    console.print(table)


def show_stages(console: Console, trial: FramesTrial, log: Log) -> None:
    """Measure where in our code the CPU time goes, and print it, by process."""
    for door, kind in _wanted(trial):
        with TemporaryDirectory(prefix="charonia-bench-") as folder:
            with open_bench(trial, None, Path(folder)) as bench:
                turn = bench.measure(bench.ours, door, kind, stages=True)
            log(_line(door, kind, turn) + ", with the samples'")
            table = table_of(("process", "module"), ("samples", "share"), f"{door}, {kind}")
            for process, counts in stage_sampler.read_stages(Path(folder)).items():
                total = counts.total()
                for module, count in counts.most_common(16):
                    table.add_row(process, module, f"{count:,}", f"{count / total:.0%}")
            console.print(table)


def _wanted(trial: FramesTrial) -> list[tuple[EndpointName, FrameKind]]:
    return [(door, kind) for door in trial.doors for kind in trial.kinds if kind in KINDS[door]]


@app.default
def main(
    *,
    trial: Annotated[FramesTrial, Parameter("*")] = FramesTrial(),
    before: Path | None = None,
    stages: Annotated[bool, _Switch] = False,
    beside: Annotated[bool, _Switch] = False,
    json: Path | None = None,
) -> int:
    """Measure frames.

    Parameters
    ----------
    before
        Directory with another `charonia` in it, whose server takes its turns too, with one frontend.
    stages
        Tell where in our code CPU time goes, instead of comparing.
    beside
        Measure a request's first token beside the streams and alone, instead of frames.
    json
        Write the turns to this file.
    """
    console = report_console()
    log = log_to(console)
    verdicts: list[TrialVerdict] = []
    with exit_on_error():
        if stages:
            show_stages(console, trial, log)
            return 0
        with open_bench(trial, before) as bench:
            if beside:
                ratios = {door: [bench.first_tokens(door, log) for _ in range(trial.repeats)] for door in trial.doors}
                verdicts = [
                    TrialVerdict(f"{door}: first token beside over alone", median_of(turns, float), _BESIDE_BAR, False)
                    for door, turns in ratios.items()
                ]
            else:
                compared = {(door, kind): bench.compare(door, kind, log) for door, kind in _wanted(trial)}
                show(console, compared)
                verdicts = [judge(door, kind, runs) for (door, kind), runs in compared.items()]
                if json:
                    named = {f"{door} {kind}": runs for (door, kind), runs in compared.items()}
                    json.write_bytes(msgspec.json.encode(named))
    show_verdicts(console, verdicts)
    return 0 if all(verdict.met for verdict in verdicts) else 1


if __name__ == "__main__":
    run_command(app)
