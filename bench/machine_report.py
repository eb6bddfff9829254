"""What `bench.machine` has measured so far, in a file, and the Markdown table that it becomes."""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from .load.figures import Spread
from .load.service_trials import TrialVerdict
from .offline_report import OfflineComparison
from .peer_process import OURS
from .roofline import OfflineJob, Precision


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
        return min((done.count(each) for each in set(done)), default=0)


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
        cells = [seen.cell(name, precision, each) for each in seen.jobs]
        if name == OURS:
            yield f"the machine's limit, {precision}", _each([cell.limit for cell in cells], ".1f")
        shares = _each([100 * cell.share for cell in cells], ".0f")
        yield f"{name} {precision}, of its limit", f"{_each([cell.speed for cell in cells], '.1f')}, {shares} %"
    for name, precision in seen.rows:
        if name != OURS:
            ratios = [seen.ratio(name, precision, each) for each in seen.jobs]
            yield f"{OURS} over {name}, {precision}", _each(ratios, ".2f")
    for precision in record.facts.precisions[1:]:
        if (OURS, precision) in seen.rows:
            first = record.facts.precisions[0]
            ratios = [seen.cell(OURS, precision, each).speed / seen.cell(OURS, first, each).speed for each in seen.jobs]
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
            told = _each([1e3 * each for each in (spread.p50, spread.p90, spread.p99)], ",.0f") if spread else "none"
            yield f"{record.facts.trace}, {precision}: {name} p50 / p90 / p99, ms", told


def _each(values: Sequence[float], form: str) -> str:
    return " / ".join(format(value, form) for value in values)


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.0f} to {max(values):.0f}"
