"""A batch runs while its engines and its servers are killed: `python -m tests.proofs.batches`.

A file of requests is uploaded and run. Again and again, at random moments, the engine core gets SIGKILL, or all
processes of the server do, or the server is asked to stop, and another one goes on over the same directory. In the end
every request must stand in the output file or the error file once, and the counts must be right. Clients ask all the
while: each must be answered, unless its server or engine was killed.
"""

import json
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any, Literal, NamedTuple

from cyclopts import App
from rich.console import Console
from rich.progress import Progress

from charonia.bench.load.fake_model import NAME, write_repository
from charonia.bench.server_process import ServerAddress, children, fetch, is_ready, own_server
from charonia.core.errors import Unavailable

from .process_stats import read_server_stats

ENGINE = {"fake_step_seconds": 0.01, "max_num_seqs": 16}
_ENDPOINT = "/v1/completions"
_WRONG = 50
"""Of so many requests one is wrong, and belongs into the error file."""

_LONGEST = 600.0
_POLL_SECONDS = 0.02

app = App(name="python -m tests.proofs.batches", help=__doc__)


class BatchKill(NamedTuple):
    """`after`: requests answered since the one before; `what`: the engine core is killed, all processes of the server
    are, or the server is asked to stop."""

    after: int
    what: Literal["engine", "server", "stop"]


class BatchesResult(NamedTuple):
    """`told`: how often each request stands in the files, and with which status; `counts`: what the server said in the
    end. `waits`: seconds that clients waited; `unanswered`: those that got no answer while nothing was being killed."""

    requests: int
    told: Sequence[tuple[str, int]]
    counts: dict[str, int]
    status: str
    waits: Sequence[float]
    unanswered: int

    @property
    def faults(self) -> list[str]:
        """The failed checks."""
        wanted = {f"r{n}": 400 if n % _WRONG == 0 else 200 for n in range(self.requests)}
        times = Counter(name for name, _ in self.told)
        found = [f"{name} stands there {count} times" for name, count in times.items() if count > 1]
        found += [f"{name} is missing" for name in wanted.keys() - times.keys()]
        found += [f"{name} has {got}, not {wanted.get(name)}" for name, got in self.told if got != wanted.get(name)]
        wrong = sum(status == 400 for status in wanted.values())
        right = {"total": self.requests, "completed": self.requests - wrong, "failed": wrong}
        if self.counts != right:
            found.append(f"counts {self.counts}, not {right}")
        if self.status != "completed":
            found.append(f"the batch is {self.status}")
        if self.unanswered:
            found.append(f"{self.unanswered} clients got no answer though nothing was killed")
        return found


def random_kills(count: int, seed: int, most: int) -> list[BatchKill]:
    """Kills of engines and servers, up to `most` requests apart."""
    chosen = random.Random(seed)
    return [BatchKill(chosen.randrange(most), chosen.choice(("engine", "server", "stop"))) for _ in range(count)]


def run_batches(
    requests: int, kills: Sequence[BatchKill], tell: Callable[[int], None] = lambda done: None
) -> BatchesResult:
    """Run one batch of so many requests through these kills.

    Raises:
        Unavailable: a server does not start, or the batch does not end.
    """
    with TemporaryDirectory(prefix="charonia-proof-") as directory:
        repository = write_repository(Path(directory) / "models", ENGINE)
        flags = ("--model-repository", str(repository), "--files-dir", str(Path(directory) / "files"))
        remaining, batch = list(kills), ""
        waits: list[float] = []
        unanswered = 0
        while True:
            with own_server(*flags) as place:
                batch = batch or _create(place, requests)
                with _clients(place) as clients:
                    ended = _follow(place, batch, remaining, clients, tell)
                waits += clients.waits
                unanswered += clients.unanswered
                if ended is not None:
                    return BatchesResult(
                        requests, list(_told(place, ended)), ended["request_counts"], ended["status"], waits, unanswered
                    )


class BatchClients:
    """A client that asks the server for a text, again and again. `killing`: set while it may be told anything."""

    def __init__(self, place: ServerAddress) -> None:
        self.killing, self.stopped = Event(), Event()
        self.waits: list[float] = []
        self.unanswered = 0
        self._place = place

    def run(self) -> None:
        while not self.stopped.is_set():
            began, calm = time.monotonic(), not self.killing.is_set()
            try:
                ask(self._place, _ENDPOINT, {"model": NAME, "prompt": "w1", "max_tokens": 4})
                self.waits.append(time.monotonic() - began)
            except (OSError, HTTPException):
                self.unanswered += calm and not self.killing.is_set()
            self.stopped.wait(_POLL_SECONDS)


@contextmanager
def _clients(place: ServerAddress) -> Iterator[BatchClients]:
    clients = BatchClients(place)
    thread = Thread(target=clients.run)
    thread.start()
    try:
        yield clients
    finally:
        clients.stopped.set()
        thread.join()


def _follow(
    place: ServerAddress,
    batch: str,
    kills: list[BatchKill],
    clients: BatchClients,
    tell: Callable[[int], None],
) -> dict[str, Any] | None:
    """Kill what is to be killed next of `kills`, when it is time. The batch once it has ended; None if the server was
    killed."""
    deadline, since, killed = time.monotonic() + _LONGEST, -1, set[int]()
    while time.monotonic() < deadline:
        shown: dict[str, Any] = ask(place, f"/v1/batches/{batch}")
        counts: dict[str, int] = shown["request_counts"]
        done = counts["completed"] + counts["failed"]
        tell(done)
        if shown["status"] in ("completed", "failed", "expired", "cancelled"):
            return shown
        since = done if since < 0 else since
        if kills and counts["total"] and done >= since + kills[0].after:
            since = done
            clients.killing.set()
            what = kills.pop(0).what
            if what != "engine":
                _kill_server(place) if what == "server" else clients.stopped.set()
                return None
            killed = _cores(place)
            for pid in killed:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        elif clients.killing.is_set() and is_ready(place) and not killed & _cores(place):  # another engine is ready
            clients.killing.clear()
        time.sleep(_POLL_SECONDS)
    raise Unavailable(f"the batch did not end within {_LONGEST:g} s: {shown}")


def _cores(place: ServerAddress) -> set[int]:
    return {core.pid for core in read_server_stats(place).cores}


def _kill_server(place: ServerAddress) -> None:
    """SIGKILL for the server, and for its engine cores, as when a machine loses power."""
    assert place.pid is not None
    for pid in (place.pid, *children(place.pid)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def ask(place: ServerAddress, path: str, body: Any = None, media: str = "application/json") -> Any:
    """The JSON that the server answers. Raises `OSError` for an error."""
    return json.loads(fetch(place, path, body, headers={"Content-Type": media}))


def _create(place: ServerAddress, requests: int) -> str:
    """Upload the input file, make a batch of it, and return its id."""
    head = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    head += b'--b\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
    form = head + b"".join(map(_line, range(requests))) + b"\r\n--b--\r\n"
    file = ask(place, "/v1/files", form, "multipart/form-data; boundary=b")
    body = {"input_file_id": file["id"], "endpoint": _ENDPOINT, "completion_window": "24h"}
    return str(ask(place, "/v1/batches", body)["id"])


def _line(number: int) -> bytes:
    body = {"model": NAME, "prompt": f"w{number % 100}", "max_tokens": 4 if number % _WRONG else -1}
    line = {"custom_id": f"r{number}", "method": "POST", "url": _ENDPOINT, "body": body}
    return json.dumps(line).encode() + b"\n"


def _told(place: ServerAddress, batch: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Each line of the files: the request, and its status."""
    for file in (batch["output_file_id"], batch["error_file_id"]):
        if file is not None:
            for line in fetch(place, f"/v1/files/{file}/content").splitlines():
                told = json.loads(line)
                yield told["custom_id"], told["response"]["status_code"] if told["response"] else 0


@app.default
def main(requests: int = 20_000, kills: int = 30, seed: int = 0) -> None:
    """Run a batch of so many `requests` through so many `kills`; the exit code is 0 if each stands there once."""
    console = Console()
    began = time.monotonic()
    with Progress(console=console) as progress:
        task = progress.add_task("requests", total=requests)
        chosen = random_kills(kills, seed, requests // kills)
        result = run_batches(requests, chosen, lambda done: progress.update(task, completed=done))
    for fault in result.faults[:20]:
        print(fault)
    counts, waited = Counter(each.what for each in chosen), statistics.median(result.waits)
    print(
        f"{requests:,} requests through {counts['engine']} kills of the engine, {counts['server']} of the server and "
        f"{counts['stop']} stops in {time.monotonic() - began:.0f} s; {len(result.waits):,} clients answered beside "
        f"them, the median in {waited:.2f} s"
    )
    sys.exit(bool(result.faults))


if __name__ == "__main__":
    app()
