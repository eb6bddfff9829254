"""The bars of a server over HTTP, with this machine's real model: each trial's ratio beside its bar.

    python -m charonia.bench.server_bars --scratch DIR
    python -m charonia.bench.server_bars --checkpoint DIR --precision int8 --trials throughput prefill --json FILE

One server, and beside it the engine without a server, which is stopped outside its turns. Ends with status 1 if a bar
is missed.
"""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec
from cyclopts import App, Parameter

from ..engine.checkpoint.hf_checkpoint import open_checkpoint
from ..processes.host import usable_cores
from .checkpoint import ShapeName, prepare_checkpoint
from .command import Log, exit_on_error, log_to, report_console, run_command
from .inline_loop import PRECISIONS
from .peer_process import OURS, PeerProcess, PeerSpec
from .peer_runner import PeerSetup
from .roofline import Precision
from .server_process import first_model, own_server
from .server_trials import (
    TrialSizes,
    TrialTarget,
    beside,
    hostile,
    mixed,
    prefill,
    prefix,
    throughput,
)
from .trial import TrialVerdict, show_verdicts

TrialName: TypeAlias = Literal["throughput", "prefill", "beside", "mixed", "prefix", "hostile"]
_TRIALS: tuple[TrialName, ...] = ("throughput", "prefill", "beside", "mixed", "prefix", "hostile")
SERVER_FLAGS = {name: [f"--{key}={value}" for key, value in settings.items()] for name, settings in PRECISIONS.items()}
_CHUNK = 512
"""Most tokens in a step, of the server and of the engine beside it."""

app = App(name="python -m charonia.bench.server_bars", help=__doc__)


def run_trials(
    checkpoint: Path, precision: Precision, trials: tuple[TrialName, ...], sizes: TrialSizes, server_args: str, log: Log
) -> list[TrialVerdict]:
    """The verdicts of these trials over a server of our own.

    Raises:
        Unavailable: the server or the engine did not start, or requests failed.
    """
    flags = [*SERVER_FLAGS[precision], "--max-num-batched-tokens", str(_CHUNK), *shlex.split(server_args)]
    log(f"starting a server with {shlex.join(flags)} ...")
    with own_server(str(checkpoint), *flags) as place:
        target = TrialTarget(place, first_model(place), open_checkpoint(checkpoint).spec.vocab_size)
        verdicts = []
        for trial in trials:
            log(f"{trial}:")
            verdicts += _run(trial, target, checkpoint, precision, sizes, log)
        return verdicts


def _run(
    trial: TrialName, target: TrialTarget, checkpoint: Path, precision: Precision, sizes: TrialSizes, log: Log
) -> list[TrialVerdict]:
    if trial == "throughput":
        with PeerProcess(
            PeerSpec(OURS, precision, Path(sys.executable)), _setup(checkpoint, precision, sizes)
        ) as engine:
            return throughput(target, engine, sizes, usable_cores().threads, log)
    others = {"prefill": prefill, "beside": beside, "mixed": mixed, "prefix": prefix, "hostile": hostile}
    return others[trial](target, sizes, log)


def _setup(checkpoint: Path, precision: Precision, sizes: TrialSizes) -> PeerSetup:
    return PeerSetup(
        checkpoint=str(checkpoint),
        precision=precision,
        sequences=max(sizes.streams),
        length=sizes.prompt + sizes.new,
        chunk=_CHUNK,
        threads=usable_cores().threads,
        device="cpu",
        folder=str(checkpoint),
    )


@app.default
def main(
    *,
    checkpoint: Path | None = None,
    shape: ShapeName = "qwen2.5-0.5b",
    scratch: Path | None = None,
    precision: Precision = "bf16",
    trials: Annotated[tuple[TrialName, ...], Parameter(consume_multiple=True)] = _TRIALS,
    sizes: Annotated[TrialSizes, Parameter("*")] = TrialSizes(),  # noqa: B008
    server_args: str = "",
    json: Path | None = None,
) -> int:
    """Run the trials.

    Parameters
    ----------
    checkpoint
        Directory of a checkpoint; by default random weights are made.
    shape
        Whose shape random weights have.
    scratch
        Keep made checkpoints here; by default they are made anew each time.
    precision
        What to compute with.
    trials
        Which of them.
    server_args
        More arguments of `charonia serve`.
    json
        Write the verdicts to this file.
    """
    console = report_console()

    log = log_to(console)
    with exit_on_error(), prepare_checkpoint(checkpoint, shape, scratch, log) as (source, _):
        verdicts = run_trials(source, precision, trials, sizes, server_args, log)
    show_verdicts(console, verdicts)
    if json:
        json.write_bytes(msgspec.json.encode(verdicts))
    return 0 if all(verdict.met for verdict in verdicts) else 1


if __name__ == "__main__":
    run_command(app)
