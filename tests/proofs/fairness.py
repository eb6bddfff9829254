"""A tenant that floods a server hardly slows another: `python -m tests.proofs.fairness`.

Two tenants with a key each ask a real server over the fake executor. First each offers half of the saturating rate,
then one of them offers ten times that rate; the other's median time to the first token may grow by half.
"""

import sys
from statistics import median

from cyclopts import App

from charonia.bench.load.driver import OK, LoadRecord
from charonia.bench.load.figures import ttft
from charonia.bench.server_process import ServerAddress

from .fake_load import RequestShape, fake_server, open_load, run_concurrently, saturating_rate

SHAPE = RequestShape(prompt=48, new=24)
ROWS = 16
# A step has room for one prompt beside what decodes: rows then become free one by one, not all at once.
ENGINE = {"fake_step_seconds": 0.04, "max_num_seqs": ROWS, "max_num_batched_tokens": 64, "prefix_caching": False}
QUIET, FLOODING = "k-quiet", "k-flooding"
FLAGS = ("--api-key", f"quiet:{QUIET}", "--api-key", f"flooding:{FLOODING}", "--log-format", "json")
FLOOD = 10
BOUND = 1.5

app = App(name="python -m tests.proofs.fairness", help=__doc__)


def quiet_tenant_ttft(place: ServerAddress, rate: float, other: float, seconds: float) -> float:
    """The quiet tenant's median time to the first token in seconds, at `rate` requests a second beside `other` a second
    of the other tenant."""
    quiet, flooding = (
        open_load(place, SHAPE, each, seconds, seed, key)
        for each, seed, key in ((rate, 1, QUIET), (other, 2, FLOODING))
    )
    mine, theirs = run_concurrently([quiet, flooding])
    print(f"  {rate:.1f} a second beside {other:.1f}: {_told(mine)}; the other: {_told(theirs)}")
    return median(ttft(record) for record in mine if record.status == OK)


def _told(records: list[LoadRecord]) -> str:
    firsts = [ttft(record) for record in records if record.status == OK]
    middle = f", p50 to the first token {median(firsts) * 1e3:.0f} ms" if firsts else ""
    return f"{len(firsts)} of {len(records)} served{middle}"


@app.default
def main(seconds: float = 30.0) -> None:
    """Measure each load for `seconds`; the exit code is 0 if the bound held."""
    with fake_server(ENGINE, *FLAGS) as place:
        rate = saturating_rate(place, SHAPE, 3 * ROWS, seconds / 3, QUIET)
        print(f"saturated at {rate:.1f} requests a second")
        equal = quiet_tenant_ttft(place, rate / 2, rate / 2, seconds)
        flooded = quiet_tenant_ttft(place, rate / 2, FLOOD * rate, seconds)
    print(f"p50 to the first token: {equal * 1e3:.0f} ms beside an equal, {flooded * 1e3:.0f} ms beside a flood")
    print(f"{flooded / equal:.2f} times as long (bound {BOUND})")
    sys.exit(flooded > BOUND * equal)


if __name__ == "__main__":
    app()
