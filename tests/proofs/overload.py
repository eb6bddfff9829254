"""Goodput under ten times the capacity is as high as ever: `python -m tests.proofs.overload`.

A rate sweep over a real server with the fake executor finds the highest goodput; then requests arrive at ten times the
saturating rate for a minute, on the same cores. Goodput must be at least 95 % of the highest, 99 of 100 refusals take
less than 50 ms, and each takes less than 1 ms of CPU: all that the frontend spends is charged to them.
"""

import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from cyclopts import App

from charonia.bench.load.driver import OK, LoadRecord
from charonia.bench.load.figures import Slo
from charonia.bench.server_process import CpuMeter, ServerAddress

from .fake_load import RequestShape, fake_server, open_load, run_load, saturating_rate

SHAPE = RequestShape(prompt=32, new=32)
ROWS = 16
ENGINE = {
    # Some 80 requests a second: with ten times those, refusals are most of what there is to do.
    "fake_step_seconds": 0.006,
    "max_num_seqs": ROWS,
    "max_num_batched_tokens": 256,
    "prefix_caching": False,
    # What waits has started within half a second at this pace: whoever is let in keeps the objective.
    "max_queued_requests": 24,
}
OBJECTIVE = Slo(ttft_ms=2000)
SWEEP = (0.5, 0.8, 1.0, 1.2)
OVERLOAD = 10
REFUSED = "HTTP 429"
LEAST_GOODPUT, SLOWEST_REFUSAL, DEAREST_REFUSAL = 0.95, 0.05, 0.001

app = App(name="python -m tests.proofs.overload", help=__doc__)


def goodput(records: Sequence[LoadRecord], seconds: float) -> float:
    """The requests a second that met the objective and ended during the load, without its first quarter."""
    good = [record for record in records if OBJECTIVE.kept_by(record) and seconds / 4 <= record.ended <= seconds]
    return len(good) / (seconds * 3 / 4)


def refusals(records: Sequence[LoadRecord]) -> list[float]:
    """The seconds that each refusal took."""
    return [record.ended - record.sent for record in records if record.status == REFUSED]


class OverloadResult(NamedTuple):
    """Goodput in requests a second, the highest of the sweep and under overload; the requests of the latter, and the
    CPU seconds that the frontend spent on them."""

    highest: float
    reached: float
    records: Sequence[LoadRecord]
    cpu: float

    @property
    def statuses(self) -> list[str]:
        return sorted({record.status for record in self.records})

    @property
    def slowest(self) -> float:
        """The 99th percentile of the refusals' seconds."""
        return float(np.percentile(refusals(self.records), 99))

    @property
    def cost(self) -> float:
        """CPU seconds of a refusal, if the frontend did nothing else."""
        return self.cpu / len(refusals(self.records))


def overload(place: ServerAddress, seconds: float, sweep_seconds: float) -> OverloadResult:
    """Sweep the rates for `sweep_seconds` each, then overload for `seconds`."""
    rate = saturating_rate(place, SHAPE, ROWS + 8, sweep_seconds)
    print(f"saturated at {rate:.1f} requests a second")
    highest = 0.0
    for factor in SWEEP:
        reached = goodput(run_load(open_load(place, SHAPE, factor * rate, sweep_seconds, 1)), sweep_seconds)
        print(f"  {factor:g} times that: {reached:.1f} good requests a second")
        highest = max(highest, reached)
    return overloaded(place, rate, seconds, highest)


def overloaded(place: ServerAddress, rate: float, seconds: float, highest: float) -> OverloadResult:
    """The result of ten times the saturating `rate`; `highest`: goodput without that."""
    meter = CpuMeter(place.pid)
    meter.start()
    records = run_load(open_load(place, SHAPE, OVERLOAD * rate, seconds, 2))
    spent = meter.spent()
    assert spent is not None
    return OverloadResult(highest, goodput(records, seconds), records, spent.frontend)


@app.default
def main(seconds: float = 60.0, sweep_seconds: float = 15.0) -> None:
    """Overload for `seconds`; the exit code is 0 if all bounds held."""
    with fake_server(ENGINE, "--log-format", "json") as place:
        found = overload(place, seconds, sweep_seconds)
    count, slow = len(refusals(found.records)), found.slowest
    share = found.reached / found.highest
    print(f"{OVERLOAD} times that for {seconds:g} s: {found.reached:.1f} good requests a second, {share:.0%}")
    told = f"p99 {slow * 1e3:.1f} ms, {found.cost * 1e3:.2f} ms of CPU"
    print(f"{count} of {len(found.records)} refused, {told}; statuses {found.statuses}")
    dear = found.cost > DEAREST_REFUSAL
    sys.exit(share < LEAST_GOODPUT or slow > SLOWEST_REFUSAL or dear or found.statuses != [REFUSED, OK])


if __name__ == "__main__":
    app()
