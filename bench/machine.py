"""This machine's table for docs/performance.md, by one command.

    python -m charonia.bench.machine --scratch DIR
    python -m charonia.bench.machine --scratch DIR --peer openvino=ov/bin/python --trace trace.csv

The engine without a server beside its limit and peers, products of few rows over those of one, a server's start, a
long prompt beside streams, and a trace: in at most `--minutes`, and `--peer-minutes` more where there are peers. What
has been measured is kept in DIR/machine.json after each part: started again, it goes on with the rest. The table is
printed, and written to DIR/machine.md.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Annotated, TypeVar

import msgspec
import torch
from cyclopts import App, Parameter
from cyclopts.validators import Number

from .. import __version__
from ..core.errors import CharoniaError
from ..engine.checkpoint.hf_checkpoint import open_checkpoint
from ..engine.cpu import library
from ..processes.host import processor_name, usable_cores
from .checkpoint import ShapeName, prepare_checkpoint
from .command import Count, Log, Positive, exit_on_error, log_to, report_console, run_command
from .engine_speed import OfflineOptions, play_round, warm_contenders
from .engine_speed_report import OfflineComparison
from .kernels import row_seconds
from .load.figures import Slo, Spread, compute_figures
from .load.worker import run as put_load
from .peer_process import OURS
from .roofline import OfflineJob, Precision
from .serve import LoadFlags, ServerFlags, build_load
from .server_bars import SERVER_FLAGS, run_trials
from .server_process import own_server
from .server_start import start
from .server_trials import TrialSizes
from .trial import TrialVerdict


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What figures must have in common to stand in one table."""

    processor: str
    cores: str
    kernels: str
    version: str
    checkpoint: str
    precisions: tuple[Precision, ...]
    peers: tuple[str, ...]
    trace: str


class ServedTrace(msgspec.Struct, frozen=True, kw_only=True):
    """A trace over HTTP: seconds. None where no request ended well."""

    ttft: Spread | None
    itl: Spread | None
    end_to_end: Spread | None


class MachineRecord(msgspec.Struct, kw_only=True):
    """Everything measured, over all runs. `spent`: their seconds. `products`: seconds of a step's by rows. `starts`:
    seconds until a server is ready, with nothing kept and with packed weights kept."""

    facts: MachineFacts
    spent: float = 0.0
    offline: OfflineComparison | None = None
    products: dict[Precision, dict[int, float]] = {}
    beside: dict[Precision, list[TrialVerdict]] = {}
    traces: dict[Precision, ServedTrace] = {}
    starts: dict[Precision, tuple[float, float]] = {}

    def turns(self, job: OfflineJob) -> int:
        """How often every contender has done the job."""
        turns = self.offline.turns if self.offline else []
        done = [(turn.name, turn.precision) for turn in turns if turn.job == job]
        return min((done.count(item) for item in set(done)), default=0)


def read_record(path: Path, facts: MachineFacts) -> MachineRecord | None:
    """What an earlier run left there; None if it is of another machine or version, or not whole."""
    with suppress(OSError, msgspec.DecodeError):
        record = msgspec.json.decode(path.read_bytes(), type=MachineRecord)
        return record if record.facts == facts else None
    return None


def write_record(path: Path, record: MachineRecord) -> None:
    """An interruption leaves the record before this one."""
    part = path.with_suffix(".part")
    part.write_bytes(msgspec.json.encode(record))
    os.replace(part, path)


def as_markdown(record: MachineRecord) -> str:
    """The table, with what has been measured."""
    facts = record.facts
    lines = [
        f"### {facts.processor}, {facts.cores}",
        "",
        f"{facts.checkpoint}, charonia {facts.version}, {facts.kernels}.",
    ]
    rows = [*_offline(record), *_products(record), *_starts(record), *_served(record)]
    return "\n".join([*lines, "", "| | |", "|---|---|", *(f"| {what} | {figures} |" for what, figures in rows)]) + "\n"


def _offline(record: MachineRecord) -> Iterator[tuple[str, str]]:
    seen = record.offline
    if seen is None:
        return
    at = " / ".join(str(job.sequences) for job in seen.jobs) + " sequences"
    job = seen.jobs[0]
    yield f"{job.prompt} + {job.new} tokens, tokens/s at", at
    for name, precision in seen.rows:
        cells = [seen.cell(name, precision, job) for job in seen.jobs]
        if name == OURS:
            yield f"the machine's limit, {precision}", _each([cell.limit for cell in cells], ".1f")
        shares = _each([100 * cell.share for cell in cells], ".0f")
        yield f"{name} {precision}, of its limit", f"{_each([cell.speed for cell in cells], '.1f')}, {shares} %"
    for name, precision in seen.rows:
        if name != OURS:
            ratios = [seen.ratio(name, precision, job) for job in seen.jobs]
            yield f"{OURS} over {name}, {precision}", _each(ratios, ".2f")
    for precision in record.facts.precisions[1:]:
        if (OURS, precision) in seen.rows:
            first = record.facts.precisions[0]
            ratios = [seen.cell(OURS, precision, job).speed / seen.cell(OURS, first, job).speed for job in seen.jobs]
            yield f"{OURS}, {precision} over {first}", _each(ratios, ".2f")
    reads = [turn.machine.read / 1e9 for turn in seen.turns]
    peaks = "".join(
        f", {precision} {_range([turn.machine.peak / 1e9 for turn in seen.turns if turn.precision == precision])} GOP/s"
        for precision in seen.ways
    )
    yield "bandwidth and best products beside them", f"{_range(reads)} GB/s{peaks}"


def _products(record: MachineRecord) -> Iterator[tuple[str, str]]:
    for precision, seconds in record.products.items():
        one, *more = seconds
        ratios = _each([seconds[rows] / seconds[one] for rows in more], ".2f")
        yield f"Qwen2.5-0.5B's products of {' / '.join(map(str, more))} rows over one row's time, {precision}", ratios


def _starts(record: MachineRecord) -> Iterator[tuple[str, str]]:
    for precision, (cold, kept) in record.starts.items():
        yield f"start to ready, then with packed weights kept, {precision}", f"{cold:.1f} s, {kept:.1f} s"


def _served(record: MachineRecord) -> Iterator[tuple[str, str]]:
    for precision, verdicts in record.beside.items():
        for verdict in verdicts:
            yield f"{verdict.what}, {precision}", f"{verdict.value:.2f}"
    for precision, trace in record.traces.items():
        for name, spread in (("TTFT", trace.ttft), ("ITL", trace.itl), ("end to end", trace.end_to_end)):
            quantiles = (spread.p50, spread.p90, spread.p99) if spread else ()
            milliseconds = _each([1e3 * quantile for quantile in quantiles], ",.0f") or "none"
            yield f"{record.facts.trace}, {precision}: {name} p50 / p90 / p99, ms", milliseconds


def _each(values: Sequence[float], form: str) -> str:
    return " / ".join(format(value, form) for value in values)


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.0f} to {max(values):.0f}"


ROWS, PRODUCT_SECONDS = (1, 2, 4, 8, 12), 15.0
_OFFLINE_SHARE = 0.6
"""Of the minutes; the served parts have the rest."""
_EXPECTED = {"products": 25.0, "start": 20.0, "beside": 90.0, "trace": 90.0}
"""Seconds that a part takes on two cores: with less left, it is not begun."""
_LONG = TrialSizes(long=2000, repeats=1)
_Found = TypeVar("_Found")

app = App(name="python -m charonia.bench.machine", help=__doc__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineOptions:
    """What is measured, and for how long."""

    precisions: Annotated[tuple[Precision, ...], Parameter(consume_multiple=True)] = ("bf16", "int8", "int4")
    """What to compute with."""
    sequences: Annotated[tuple[int, ...], Parameter(consume_multiple=True, validator=Number(gt=0))] = (1, 4, 16, 32)
    """Submitted at once."""
    repeats: Count = 3
    """Turns of each contender, while there is time."""
    minutes: Annotated[float, Positive] = 15.0
    """For all runs together."""
    peer_minutes: Annotated[float, Positive] = 20.0
    """As many more where there are peers."""
    peer: tuple[str, ...] = ()
    """transformers, openvino, llamacpp or vllm, with =PYTHON where another interpreter has it; may be repeated."""
    trace: Path | None = None
    """A CSV with arrived_at, num_prefill_tokens, num_decode_tokens; a minute of it is served."""
    speedup: Annotated[float, Positive] = 0.25
    """How much faster than recorded the trace is played."""

    @property
    def seconds(self) -> float:
        return 60 * (self.minutes + (self.peer_minutes if self.peer else 0.0))

    @property
    def offline_seconds(self) -> float:
        return self.seconds - 60 * self.minutes * (1 - _OFFLINE_SHARE)


class MachineRun:
    """Measures, part by part, what a record lacks."""

    def __init__(
        self, record: MachineRecord, checkpoint: Path, scratch: Path, wanted: MachineOptions, log: Log
    ) -> None:
        self.record = record
        self._checkpoint = checkpoint
        self._scratch = scratch
        self._wanted = wanted
        self._log = log
        self._saved = perf_counter()

    def run(self) -> None:
        """Every part that is missing, as long as there is time. One that fails says why, and is tried again next time.

        Raises:
            InvalidArgument, Unavailable: a peer is unknown, or a contender cannot run.
        """
        for precision in self._wanted.precisions:
            self._part("products", precision, self.record.products, self._products)
        self._offline()
        for precision in self._wanted.precisions:
            self._part("start", precision, self.record.starts, self._start)
        for precision in self._wanted.precisions[::-1]:
            self._part("beside", precision, self.record.beside, self._beside)
            if self._wanted.trace is not None:
                self._part("trace", precision, self.record.traces, self._trace)

    def _part(
        self, kind: str, precision: Precision, results: dict[Precision, _Found], measure: Callable[[Precision], _Found]
    ) -> None:
        if precision in results:
            return
        if self._spent() + _EXPECTED[kind] > self._wanted.seconds:
            self._log(f"{kind}, {precision}: not measured, the time is over")
            return
        self._log(f"{kind}, {precision} ...")
        try:
            results[precision] = measure(precision)
        except CharoniaError as error:
            self._log(f"{kind}, {precision}: {error.message}")
        self._save()

    def _spent(self) -> float:
        return self.record.spent + perf_counter() - self._saved

    def _save(self) -> None:
        self.record.spent, self._saved = self._spent(), perf_counter()
        write_record(record_path(self._scratch), self.record)

    def _offline(self) -> None:
        record, wanted = self.record, self._wanted
        work = OfflineOptions(sequences=wanted.sequences, precisions=wanted.precisions, repeats=wanted.repeats)
        missing = [(turn, job) for turn in range(wanted.repeats) for job in work.jobs if record.turns(job) <= turn]
        if not missing:
            return
        if self._spent() > wanted.offline_seconds:
            self._log("the engine without a server: not measured, the time is over")
            return
        with warm_contenders(self._checkpoint, self._scratch, work, wanted.peer, self._log) as field:
            for turn, job in missing:
                if self._spent() > wanted.offline_seconds:
                    self._log(f"{job.sequences} sequences, turn {turn + 1}: not measured, the time is over")
                    continue
                turns = record.offline.turns if record.offline else []
                played = list(play_round(field, job, seed=1 + turn, log=self._log))
                record.offline = field.comparison(record.facts.checkpoint, [*turns, *played])
                self._save()

    def _products(self, precision: Precision) -> dict[int, float]:
        torch.set_num_threads(usable_cores().threads)
        return row_seconds(precision, ROWS, PRODUCT_SECONDS)

    def _start(self, precision: Precision) -> tuple[float, float]:
        with TemporaryDirectory(dir=self._scratch) as kept:
            flags = [str(self._checkpoint), *SERVER_FLAGS[precision], "--cache-dir", kept]
            return start(*flags).seconds, start(*flags).seconds

    def _beside(self, precision: Precision) -> list[TrialVerdict]:
        return run_trials(self._checkpoint, precision, ("beside",), _LONG, "", self._log)

    def _trace(self, precision: Precision) -> ServedTrace:
        wanted, vocab = self._wanted, open_checkpoint(self._checkpoint).spec.vocab_size
        work = LoadFlags(trace=wanted.trace, speedup=wanted.speedup, duration=60.0, longest=2048, vocab=vocab)
        with own_server(str(self._checkpoint), *SERVER_FLAGS[precision]) as place:
            (outcome,) = put_load(build_load(place, ServerFlags(), work))
        figures = compute_figures(outcome.records, Slo())
        return ServedTrace(ttft=figures.ttft, itl=figures.itl, end_to_end=figures.end_to_end)


def record_path(scratch: Path) -> Path:
    return scratch / "machine.json"


def machine_facts(checkpoint: Path, wanted: MachineOptions) -> MachineFacts:
    return MachineFacts(
        processor=processor_name(),
        cores=str(usable_cores()),
        kernels=library.describe(),
        version=__version__,
        checkpoint=checkpoint.name,
        precisions=wanted.precisions,
        peers=wanted.peer,
        trace="" if wanted.trace is None else f"{wanted.trace.name}, {wanted.speedup:g} times as fast",
    )


@app.default
def main(
    *,
    scratch: Path,
    checkpoint: Path | None = None,
    shape: ShapeName = "qwen2.5-0.5b",
    wanted: Annotated[MachineOptions, Parameter("*")] = MachineOptions(),
) -> None:
    """Measure what is missing, and print the table.

    Parameters
    ----------
    scratch
        What is measured and made stays here.
    checkpoint
        Directory of a checkpoint; by default random weights are made.
    shape
        Whose shape random weights have.
    """
    console = report_console()

    log = log_to(console)
    scratch.mkdir(parents=True, exist_ok=True)
    with exit_on_error(), prepare_checkpoint(checkpoint, shape, scratch, log) as (source, _):
        facts = machine_facts(source, wanted)
        record = read_record(record_path(scratch), facts)
        log("begun anew" if record is None else f"going on after {record.spent / 60:.1f} minutes")
        run = MachineRun(record or MachineRecord(facts=facts), source, scratch, wanted, log)
        run.run()
    table = as_markdown(run.record)
    (scratch / "machine.md").write_text(table)
    console.print(table, highlight=False, markup=False, soft_wrap=True)


if __name__ == "__main__":
    run_command(app)
