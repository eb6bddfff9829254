"""A random rank is killed a hundred times under load: `python -m tests.proofs.ranks`.

As `tests.proofs.kills`, for a model that is split over rank processes. A rank that dies must end the others
and the core: streams end with an error, the model is restarted, and of all dead ranks no process, shared memory or
listening port is left.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from cyclopts import App
from rich.console import Console
from rich.progress import Progress

from charonia.bench.server_process import ServerAddress, children, own_server

from ..tiny_model import NAME, write_repository
from .kills import KillTarget, living_cores, run_kills, show
from .process_stats import process_name

_LISTENING = "0A"
"""A TCP socket's state in /proc."""

app = App(name="python -m tests.proofs.ranks", help=__doc__)


class HeldResources(NamedTuple):
    """The resources of a server's processes on the machine: the numbers of ranks and listening sockets, and all
    segments of shared memory by name."""

    ranks: int
    listening: int
    segments: frozenset[str]

    def beyond(self, before: "HeldResources") -> Iterator[str]:
        """The resources that were not held before."""
        for what in ("ranks", "listening"):
            then, now = getattr(before, what), getattr(self, what)
            if now != then:
                yield f"{now} {what}, {then} before"
        yield from (f"/dev/shm/{name} is left" for name in self.segments - before.segments)


def rank_pids(place: ServerAddress) -> list[int]:
    """The rank processes of the server's cores."""
    return [pid for core in living_cores(place) for pid in children(core) if process_name(pid) == "charonia-rank"]


def held_resources(place: ServerAddress) -> HeldResources:
    """The resources held now."""
    assert place.pid is not None
    ranks = rank_pids(place)
    pids = [place.pid, *living_cores(place), *ranks]
    return HeldResources(
        len(ranks), sum(map(_listening, pids)), frozenset(each.name for each in Path("/dev/shm").iterdir())
    )


def living_ranks(pids: set[int]) -> list[int]:
    """The ranks among these that still run."""
    return [pid for pid in sorted(pids) if process_name(pid) == "charonia-rank"]


def _listening(pid: int) -> int:
    sockets = {link.readlink().name for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    return sum(fields[3] == _LISTENING and f"socket:[{fields[9]}]" in sockets for fields in map(str.split, lines))


class _Seen:
    """The ranks to kill, and all ranks that ever ran."""

    def __init__(self) -> None:
        self.pids: set[int] = set()

    def of(self, place: ServerAddress) -> list[int]:
        now = rank_pids(place)
        self.pids.update(now)
        return now


@app.default
def main(
    kills: int = 100,
    every: float = 12.0,
    rate: float = 10.0,
    tensor: int = 2,
    pipeline: int = 1,
    patience: float = 60.0,
) -> None:
    """Kill so many times; the exit code is 0 if nothing was lost and nothing is left.

    Parameters
    ----------
    kills
        Number of kills.
    every
        Seconds between two, unless the model takes longer to be ready again.
    rate
        Requests a second.
    tensor, pipeline
        How the model is split.
    patience
        Seconds after which a model that is not ready is lost.
    """
    console, seen = Console(), _Seen()
    ranks = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    with TemporaryDirectory(prefix="charonia-proof-") as directory, Progress(console=console) as progress:
        repository = write_repository(Path(directory) / "models", {"kv_cache_bytes": 16 << 20, **ranks})
        with own_server("--model-repository", str(repository)) as place:
            task = progress.add_task("under load", total=None)
            before = held_resources(place)
            dues = [(number + 0.5) * every for number in range(kills)]
            aftermath = run_kills(
                place,
                rate,
                dues,
                patience,
                lambda line: progress.update(task, description=line),
                KillTarget(NAME, seen.of),
            )
            left = [*held_resources(place).beyond(before)]
            left += [f"rank {pid} still runs" for pid in living_ranks(seen.pids - set(rank_pids(place)))]
        left += [f"rank {pid} outlived the server" for pid in living_ranks(seen.pids)]
    show(console, aftermath)
    for fault in left:
        print(fault)
    print(f"{len(seen.pids)} ranks lived and died; {before.listening} ports are open as before")
    sys.exit(bool(aftermath.faults or left))


if __name__ == "__main__":
    app()
