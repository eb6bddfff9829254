"""Engine throughput without a server, as a share of the machine's limit, and beside peers in turns (A B A B).

    python -m charonia.bench.engine_speed --scratch DIR
    python -m charonia.bench.engine_speed --scratch DIR --peer transformers --peer openvino=venv/bin/python
    python -m charonia.bench.engine_speed --checkpoint DIR --precisions int8 --prompt 2048 --json FILE --plot FILE
    python -m charonia.bench.engine_speed --checkpoint model.gguf --precisions bf16 --peer llamacpp=venv/bin/python

A GGUF file is computed as it is, by us and by llama.cpp; a precision then says what is computed beside its weights.
Prompts are distinct, eos is ignored, nothing is cached. The machine's limits are measured before and after every turn
(the better of the two counts): the figures of a shared machine mean little without them.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import numpy as np
from cyclopts import App, Parameter
from cyclopts.validators import Number

from ..core.errors import Unavailable
from ..engine.checkpoint.hf_checkpoint import open_checkpoint
from ..engine.checkpoint.model_spec import ModelSpec
from ..processes.host import usable_cores
from .checkpoint import ShapeName, prepare_checkpoint
from .command import Count, Log, exit_on_error, log_to, report_console, run_command
from .engine_speed_report import OfflineComparison, OfflineRun, show, write_json, write_plot
from .load.figures import require_matplotlib
from .machine_peaks import PeakMeter
from .peer_process import OURS, GenerationTime, PeerProcess, parse_peer_specs
from .peer_runner import PeerSetup
from .roofline import MachinePeaks, ModelDemand, OfflineJob, Precision, roofline_speed

_Several = Parameter(consume_multiple=True, validator=Number(gt=0))

app = App(name="python -m charonia.bench.engine_speed", help=__doc__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineOptions:
    """The work of a comparison."""

    sequences: Annotated[tuple[int, ...], _Several] = (1, 4, 16, 32)
    """Submitted at once; one column each."""
    prompt: Count = 128
    """Prompt tokens of each sequence."""
    new: Count = 64
    """New tokens of each sequence."""
    precisions: Annotated[tuple[Precision, ...], Parameter(consume_multiple=True)] = ("bf16", "int8")
    """What to compute with; one part of the table each."""
    repeats: Count = 3
    """Turns of each contender at each column."""
    chunk: Count = 512
    """Most tokens in a step."""
    device: str = "cpu"
    """cpu or cuda."""

    @property
    def jobs(self) -> list[OfflineJob]:
        return [OfflineJob(sequences, self.prompt, self.new) for sequences in self.sequences]

    @property
    def length(self) -> int:
        return self.prompt + self.new


@dataclass(frozen=True, slots=True)
class WarmContenders:
    """The contenders, warm, and the probes of their machine's limits."""

    spec: ModelSpec
    stored_bytes: int | None
    gauge: PeakMeter
    contenders: Sequence[PeerProcess]

    def demand(self, precision: Precision) -> ModelDemand:
        """A checkpoint that stores integers is read as it is; its `stored_bytes` are those of its files."""
        demand = ModelDemand.of(self.spec, precision)
        return demand if self.stored_bytes is None else replace(demand, weight_bytes=self.stored_bytes)

    def peaks(self) -> dict[Precision, MachinePeaks]:
        """The machine's, now: products with stored integers are computed in int8."""
        peaks = self.gauge.measure()
        return {precision: peaks["int8" if self.stored_bytes else precision] for precision in self.precisions}

    @property
    def precisions(self) -> list[Precision]:
        return list(dict.fromkeys(contender.spec.precision for contender in self.contenders))

    def comparison(self, checkpoint: str, turns: list[OfflineRun]) -> OfflineComparison:
        about = {contender.spec.label: contender.about for contender in self.contenders}
        ways = {precision: self.gauge.ways["int8" if self.stored_bytes else precision] for precision in self.precisions}
        return OfflineComparison(checkpoint=checkpoint, threads=self.gauge.threads, about=about, ways=ways, turns=turns)


def compare(checkpoint: Path, scratch: Path, work: OfflineOptions, peers: Sequence[str], log: Log) -> OfflineComparison:
    """Every contender at every job, in turns.

    Raises:
        InvalidArgument, Unavailable: a peer is unknown, or a contender cannot run.
    """
    with warm_contenders(checkpoint, scratch, work, peers, log) as field:
        turns = [
            turn
            for job in work.jobs
            for repeat in range(work.repeats)
            for turn in play_round(field, job, seed=1 + repeat, log=log)
        ]
        return field.comparison(checkpoint.name, turns)


@contextmanager
def warm_contenders(
    checkpoint: Path, scratch: Path, work: OfflineOptions, peers: Sequence[str], log: Log
) -> Iterator[WarmContenders]:
    """Every contender that takes part, started and warm. A peer that dies of its first prompts is left out, and told.

    Raises:
        InvalidArgument, Unavailable: a peer is unknown or does not start, or our own engine cannot run.
    """
    specs, opened = parse_peer_specs(work.precisions, peers), open_checkpoint(checkpoint)
    stored = sum(file.stat().st_size for file in _files(checkpoint)) if opened.stored_as else None
    with ExitStack() as stack:
        started = []
        for entry in specs:
            log(f"starting {entry.label} ...")
            setup = PeerSetup(
                checkpoint=str(checkpoint),
                precision=entry.precision,
                sequences=max(work.sequences),
                length=work.length,
                chunk=work.chunk,
                threads=usable_cores().threads,
                device=work.device,
                folder=str(scratch / f"{checkpoint_digest(checkpoint)}-{entry.name}-{entry.precision}"),
            )
            started.append(stack.enter_context(PeerProcess(entry, setup)))
        contenders = [contender for contender in started if _warm(contender, work, opened.spec.vocab_size, log)]
        gauge = PeakMeter(["int8"] if stored else work.precisions, work.device, usable_cores().threads)
        yield WarmContenders(opened.spec, stored, gauge, contenders)


def checkpoint_digest(checkpoint: Path) -> str:
    """A name that no other checkpoint has, nor this one once its files have changed."""
    state = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in _files(checkpoint)]
    return f"{checkpoint.name}-{sha256(repr(state).encode()).hexdigest()[:12]}"


def _files(checkpoint: Path) -> list[Path]:
    path = checkpoint.resolve()
    return [path] if path.is_file() else sorted(path.glob("*"))


def _warm(contender: PeerProcess, work: OfflineOptions, vocab: int, log: Log) -> bool:
    """Whether it generates: a build of a peer may start and then die of the processor it is on."""
    new = min(work.new, 2)
    try:
        for sequences in (1, max(work.sequences)):
            contender.generate(prompts(OfflineJob(sequences, work.prompt, new), vocab, seed=0), new)
    except Unavailable as error:
        if contender.spec.name == OURS:
            raise
        log(f"left out: {error.message}")
        return False
    return True


def play_round(field: WarmContenders, job: OfflineJob, seed: int, log: Log) -> Iterator[OfflineRun]:
    """One turn of every contender, with the machine's limits measured between them."""
    prompt_ids = prompts(job, field.spec.vocab_size, seed)
    before, ours = field.peaks(), GenerationTime((), 0.0)
    for contender in field.contenders:
        spent = contender.generate(prompt_ids, job.new)
        after, entry = field.peaks(), contender.spec
        ours = spent if entry.name == OURS else ours
        machine = best_peaks(before[entry.precision], after[entry.precision])
        turn = OfflineRun(
            name=entry.name,
            precision=entry.precision,
            job=job,
            speed=spent.speed,
            machine=machine,
            limit=roofline_speed(field.demand(entry.precision), job, machine),
            agreement=agreement(spent.tokens, ours.tokens),
        )
        log(f"{job.sequences} sequences, {entry.label}: {turn.speed:.1f} tokens/s, {turn.speed / turn.limit:.0%}")
        yield turn
        before = after


def agreement(tokens: Sequence[Sequence[int]], ours: Sequence[Sequence[int]]) -> float:
    """Share of the prompts whose first new token is ours. Later ones follow from it: a near tie that rounding decides
    another way takes all that come after it along."""
    return sum(one[0] == other[0] for one, other in zip(tokens, ours, strict=True)) / len(ours)


def best_peaks(one: MachinePeaks, other: MachinePeaks) -> MachinePeaks:
    """The best of two measurements: neighbours only ever take away."""
    return MachinePeaks(max(one.read, other.read), max(one.peak, other.peak))


def prompts(job: OfflineJob, vocab: int, seed: int) -> list[list[int]]:
    """Distinct ones, the same for the same seed."""
    drawn: list[list[int]] = np.random.default_rng(seed).integers(0, vocab, (job.sequences, job.prompt)).tolist()
    return drawn


@app.default
def main(
    *,
    checkpoint: Path | None = None,
    shape: ShapeName = "qwen2.5-0.5b",
    scratch: Path | None = None,
    peer: tuple[str, ...] = (),
    work: Annotated[OfflineOptions, Parameter("*")] = OfflineOptions(),
    json: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Print the table.

    Parameters
    ----------
    checkpoint
        Directory of a checkpoint, or a GGUF file; by default random weights are made.
    shape
        Whose shape random weights have.
    scratch
        Keep made checkpoints and peers' exports here; by default they are made anew each time.
    peer
        transformers, openvino, llamacpp or vllm, with =PYTHON where another interpreter has it; may be repeated.
    json
        Write every turn to this file.
    plot
        Draw speeds and limits into this PNG.
    """
    console = report_console()

    log = log_to(console)
    with exit_on_error():
        if plot:
            require_matplotlib()
        with prepare_checkpoint(checkpoint, shape, scratch, log) as (source, folder):
            seen = compare(source, folder, work, peer, log)
    show(console, seen)
    if json:
        write_json(json, seen)
    if plot:
        write_plot(plot, seen)


if __name__ == "__main__":
    run_command(app)
