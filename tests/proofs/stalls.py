"""No request holds up the others: `python -m tests.proofs.stalls`.

Each of a list of hostile requests, as large as a server's limits allow, is sent while another process asks for the
server's health all the time. None may leave a gap of more than a tenth of a second in the answers, each must be
answered or refused, and afterwards the frontend holds at most 64 MiB more memory.
"""

import http.client
import multiprocessing
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import grpc
from cyclopts import App
from rich.console import Console
from rich.table import Table

from charonia.bench.server_process import ServerAddress, own_server

from ..fuzz.hostile_bodies import Attack, attacks
from ..tiny_model import write_repository
from .process_stats import read_server_stats

GAP_SECONDS = 0.1
KEPT_BYTES = 64 << 20
_TRIES = 3
"""A gap may be the machine's, which somebody else uses too: the smallest of some counts."""

_SETTLE_SECONDS = 10.0
_PAUSE = 0.002
_FRONTEND = {"threads": 1, "kv_cache_bytes": 16 << 20}
_ECHO = """
name: "{name}"
backend: "identity"
input {{ name: "IN" data_type: TYPE_{kind} dims: [ -1 ] }}
output {{ name: "OUT" data_type: TYPE_{kind} dims: [ -1 ] }}
"""

app = App(name="python -m tests.proofs.stalls", help=__doc__)


class AttackResult(NamedTuple):
    """The effect of one attack. `gap`: the longest time between two health answers, in seconds; `kept`: bytes that the
    frontend still held when it had settled; `seconds`: until its answer, with `status`."""

    name: str
    status: str
    seconds: float
    gap: float
    kept: int
    internal: bool = False

    @property
    def faults(self) -> list[str]:
        found = []
        if self.gap > GAP_SECONDS:
            found.append(f"{self.gap * 1000:.0f} ms")
        if self.kept > KEPT_BYTES:
            found.append(f"{self.kept >> 20} MiB stay")
        if self.status.startswith(("500", "INTERNAL", "UNKNOWN")) and not self.internal:
            found.append(self.status)
        return found


@contextmanager
def server(*flags: str) -> Iterator[ServerAddress]:
    """A server with a language model, and models that return numbers or strings of any length."""
    with TemporaryDirectory(prefix="charonia-proof-") as directory:
        repository = write_repository(Path(directory) / "models", _FRONTEND)
        for name, kind in (("floats", "FP32"), ("strings", "STRING"), ("flags", "BOOL")):
            (repository / name / "1").mkdir(parents=True)
            (repository / name / "config.pbtxt").write_text(_ECHO.format(name=name, kind=kind))
        with own_server("--model-repository", str(repository), *flags) as place:
            yield place


def _watch(place: ServerAddress, pause: float, told: Connection) -> None:
    """The process that asks for health: on request it reports the longest gap since the last report."""
    connection = http.client.HTTPConnection(place.host, place.http_port, timeout=600)
    longest, last = 0.0, time.monotonic()
    while True:
        connection.request("GET", "/v2/health/live")
        connection.getresponse().read()
        now = time.monotonic()
        longest, last = max(longest, now - last), now
        if told.poll():
            if not told.recv():
                return
            told.send(longest)
            longest = 0.0
        time.sleep(pause)


@contextmanager
def gap_watcher(place: ServerAddress, pause: float = _PAUSE) -> Iterator[Connection]:
    """A process that asks for health, so many seconds after each answer."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_watch, args=(place, pause, theirs))
    process.start()
    try:
        yield ours
    finally:
        ours.send(False)
        process.join()


def longest_gap(watch: Connection) -> float:
    """The longest since it was asked for last, in seconds."""
    watch.send(True)
    gap: float = watch.recv()
    return gap


def _sent(place: ServerAddress, attack: Attack, body: bytes) -> str:
    if not attack.path:
        return _called(place, body)
    connection = http.client.HTTPConnection(place.host, place.http_port, timeout=600)
    try:
        connection.request("POST", attack.path, body, dict(attack.headers))
        answer = connection.getresponse()
        while answer.read(1 << 20):
            pass
        return str(answer.status)
    except ConnectionError:
        return "closed"  # refused before all of it was sent
    finally:
        connection.close()


def _called(place: ServerAddress, body: bytes) -> str:
    sizes = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(f"{place.host}:{place.grpc_port}", sizes) as channel:
        try:
            channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(body, timeout=600)
            return "OK"
        except grpc.RpcError as error:
            return str(error.code().name)


def run_attack(place: ServerAddress, watch: Connection, attack: Attack) -> AttackResult:
    """Send one attack, and measure its effect on the health answers."""
    body = attack.body()
    before = read_server_stats(place).frontend.rss
    longest_gap(watch)
    begun = time.monotonic()
    status = _sent(place, attack, body)
    seconds = time.monotonic() - begun
    deadline = time.monotonic() + _SETTLE_SECONDS
    while (kept := read_server_stats(place).frontend.rss - before) > KEPT_BYTES and time.monotonic() < deadline:
        time.sleep(0.1)
    return AttackResult(attack.name, status, seconds, longest_gap(watch), kept, attack.internal)


def run_attacks(
    place: ServerAddress, json_size: int, raw_size: int, tries: int = 1, only: str = ""
) -> Iterator[AttackResult]:
    """The result of each attack: of several tries, the one with the smallest gap."""
    with gap_watcher(place) as watch:
        for attack in attacks(json_size, raw_size):
            if only not in attack.name:
                continue
            found = run_attack(place, watch, attack)
            for _ in range(tries - 1):
                if found.faults:
                    found = min(found, run_attack(place, watch, attack), key=lambda each: (each.gap, each.kept))
            yield found


@app.default
def main(json_mib: int = 64, raw_mib: int = 32, tries: int = _TRIES, only: str = "") -> None:
    """Send each attack, or those with `only` in their name; the exit code is 0 if all bounds held."""
    table, failed = Table("attack", "answer", "s", "gap, ms", "kept, MiB", "faults"), False
    with server() as place:
        for each in run_attacks(place, json_mib << 20, raw_mib << 20, tries, only):
            failed = failed or bool(each.faults)
            row = (f"{each.seconds:.2f}", f"{each.gap * 1000:.0f}", str(each.kept >> 20), ", ".join(each.faults))
            print(each.name, each.status, *row, flush=True)
            table.add_row(each.name, each.status, *row)
    Console().print(table)
    sys.exit(failed)


if __name__ == "__main__":
    app()
