"""This machine's table for docs/performance.md, by one command.

    python -m charonia.bench.machine --scratch DIR
    python -m charonia.bench.machine --scratch DIR --peer openvino=ov/bin/python --trace trace.csv

The engine without a server beside its limit and peers, products of few rows over those of one, a server's start, a
long prompt beside streams, and a trace: in at most `--minutes`, and `--peer-minutes` more where there are peers. What
has been measured is kept in DIR/machine.json after each part: started again, it goes on with the rest. The table is
printed, and stands in DIR/machine.md.
"""

import platform
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Annotated, TypeVar

import torch
from cyclopts import App, Parameter
from cyclopts.validators import Number
from rich.console import Console

from .. import __version__
from ..core.errors import CharoniaError
from ..engine.checkpoint.hf_checkpoint import open_checkpoint
from ..engine.cpu import library
from ..processes.host import usable_cores
from .checkpoint import ShapeName
from .cli_errors import exit_on_error
from .kernels import row_seconds
from .load.figures import Slo, compute_figures
from .load.options import LoadFlags, ServerFlags, build_load
from .load.service_trials import Log, TrialSizes, TrialVerdict
from .load.worker import run as put_load
from .machine_report import MachineFacts, MachineRecord, ServedTrace, as_markdown, read_record, write_record
from .offline import OfflineOptions, play_round, prepare_checkpoint, warm_contenders
from .roofline import Precision
from .server_process import own_server
from .service import SERVER_FLAGS, run_trials
from .start import start

ROWS, PRODUCT_SECONDS = (1, 2, 4, 8, 12), 15.0
_OFFLINE_SHARE = 0.6
"""Of the minutes; the served parts have the rest."""
_EXPECTED = {"products": 25.0, "start": 20.0, "beside": 90.0, "trace": 90.0}
"""Seconds that a part takes on two cores: with less left, it is not begun."""
_LONG = TrialSizes(long=2000, repeats=1)
_Found = TypeVar("_Found")
_Positive = Parameter(validator=Number(gt=0))

app = App(name="python -m charonia.bench.machine", help=__doc__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineOptions:
    """What is measured, and for how long."""

    precisions: Annotated[tuple[Precision, ...], Parameter(consume_multiple=True)] = ("bf16", "int8", "int4")
    """What to compute with."""
    sequences: Annotated[tuple[int, ...], Parameter(consume_multiple=True, validator=Number(gt=0))] = (1, 4, 16, 32)
    """Submitted at once."""
    repeats: Annotated[int, _Positive] = 3
    """Turns of each contender, while there is time."""
    minutes: Annotated[float, _Positive] = 15.0
    """For all runs together."""
    peer_minutes: Annotated[float, _Positive] = 20.0
    """As many more where there are peers."""
    peer: tuple[str, ...] = ()
    """transformers, openvino, llamacpp or vllm, with =PYTHON where another interpreter has it; may be repeated."""
    trace: Path | None = None
    """A CSV with arrived_at, num_prefill_tokens, num_decode_tokens; a minute of it is served."""
    speedup: Annotated[float, _Positive] = 0.25
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
        self.record, self._checkpoint, self._scratch, self._wanted, self._log = record, checkpoint, scratch, wanted, log
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
        self, kind: str, precision: Precision, found: dict[Precision, _Found], measure: Callable[[Precision], _Found]
    ) -> None:
        if precision in found:
            return
        if self._spent() + _EXPECTED[kind] > self._wanted.seconds:
            self._log(f"{kind}, {precision}: not measured, the time is over")
            return
        self._log(f"{kind}, {precision} ...")
        try:
            found[precision] = measure(precision)
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
        processor=_processor(),
        cores=str(usable_cores()),
        kernels=library.describe(),
        version=__version__,
        checkpoint=checkpoint.name,
        precisions=wanted.precisions,
        peers=wanted.peer,
        trace="" if wanted.trace is None else f"{wanted.trace.name}, {wanted.speedup:g} times as fast",
    )


def _processor(told: Path = Path("/proc/cpuinfo")) -> str:
    lines = told.read_text().splitlines() if told.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


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
    console = Console()

    def log(line: str) -> None:
        console.print(line, highlight=False)

    scratch.mkdir(parents=True, exist_ok=True)
    with exit_on_error(), prepare_checkpoint(checkpoint, shape, scratch, log) as (found, _):
        facts = machine_facts(found, wanted)
        record = read_record(record_path(scratch), facts)
        log("begun anew" if record is None else f"going on after {record.spent / 60:.1f} minutes")
        run = MachineRun(record or MachineRecord(facts=facts), found, scratch, wanted, log)
        run.run()
    table = as_markdown(run.record)
    (scratch / "machine.md").write_text(table)
    console.print(table, highlight=False, markup=False, soft_wrap=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    app()
