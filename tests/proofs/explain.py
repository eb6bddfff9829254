"""What limits a server is named first, in every state that a real one is driven into:
`python -m tests.proofs.explain [STATE ...] [--record DIR]`.

The pace is that of fake executors and of models that sleep, so the state does not depend on the machine. What
`--record` writes are the scrapes that the tests of the judging read: of the model alone, and what the judging asks for.
"""

import json
import socket
import sys
import threading
import time
from collections import UserDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple, TypeAlias, get_args

import msgspec
from cyclopts import App

from charonia.bench.load.fake_model import VOCAB, write_config, write_words
from charonia.bench.server_process import ServerAddress, fetch, fetch_metrics, own_server
from charonia.extras.optimizer.machine_file import read_machine_file
from charonia.telemetry.bottlenecks import Bottleneck, explain
from charonia.telemetry.roofline import StepRoofline
from charonia.telemetry.scrape import Interval, Scrape, SeriesLabels, parse_scrape
from charonia.telemetry.time_claims import Cause

Client: TypeAlias = Callable[[ServerAddress, threading.Event], None]
"""Asks until the event is set."""

KEYS = {name: {"Content-Type": "application/json", "Authorization": f"Bearer k-{name}"} for name in ("a", "b")}
FLAGS = tuple(word for name in KEYS for word in ("--api-key", f"{name}:k-{name}"))
_PATIENCE = 60.0
"""Seconds for a state to be reached."""

_MERGED = 1000
"""Tokens that a slow client has left unread when what the sockets hold of its stream is full."""

_WAITING = 4
"""Requests that wait for the one instance when most of its eight clients do."""

_SLEEPING = """backend: "identity"
parameters {{ key: "execute_delay_ms" value {{ string_value: "{delay}" }} }}
input {{ name: "IN" data_type: TYPE_FP32 dims: {dims} }}
output {{ name: "OUT" data_type: TYPE_FP32 dims: {dims} }}
"""
_CLASSIC = {
    "single": _SLEEPING.format(delay=30, dims=1),
    "unbatched": _SLEEPING.format(delay=30, dims=1) + "max_batch_size: 8",
    "batched": _SLEEPING.format(delay=150, dims=1) + "max_batch_size: 8 dynamic_batching { }",
    "delayed": _SLEEPING.format(delay=2, dims=1)
    + "max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 50000 }",
    "pairs": _SLEEPING.format(delay=50, dims=1) + "max_batch_size: 8 dynamic_batching { preferred_batch_size: 2 }",
    "cold": _SLEEPING.format(delay=30, dims=1) + 'parameters { key: "creation_delay_sec" value { string_value: "1" } }',
    "repeating": 'backend: "repeat"',
    "shaped": _SLEEPING.format(delay=30, dims=-1) + "max_batch_size: 8 dynamic_batching { }",
}
_LANGUAGE: Mapping[str, Mapping[str, object]] = {
    "rows": {"max_num_seqs": 2, "fake_step_seconds": 0.01},
    "narrow": {"max_num_batched_tokens": 64, "fake_step_seconds": 0.02, "prefix_caching": "false"},
    "full": {"kv_cache_blocks": 24, "admission": "no_evict", "fake_step_seconds": 0.01},
    "evicting": {"kv_cache_blocks": 40, "fake_step_seconds": 0.005, "prefix_caching": "false"},
    "forgetful": {
        "kv_cache_blocks": 600,
        "state_cache_fraction": 0.06,
        "fake_state_bytes": 1 << 20,
        "fake_token_seconds": 0.0001,
        "max_num_batched_tokens": 4096,
    },
    "fast": {"fake_step_seconds": 0.0002, "fake_max_model_len": 65536},
}
app = App(name="python -m tests.proofs.explain", help=__doc__)

_HOLDING = """import time


async def run(request, lookup):
    time.sleep(0.2)
    yield {"text_output": request.text("question")}
"""
_PIPELINE = """backend: "pipeline"
input { name: "question" data_type: TYPE_STRING dims: 1 }
output { name: "text_output" data_type: TYPE_STRING dims: 1 }
"""


ServerKind: TypeAlias = Literal["models", "on_demand", "checkpoint"]


class ServerState(NamedTuple):
    """A state that a server is driven into by `clients`, and what is to be said of `model` first: the `cause`, and a
    `word` of the sentence. `server`: over all models; or where requests load them, which all come after the first
    scrape; or over a checkpoint whose machine is known. `until` holds of the first scrape."""

    model: str
    cause: Cause
    word: str
    clients: tuple[Client, ...] = ()
    server: ServerKind = "models"
    until: Callable[[Scrape], bool] = lambda scrape: True


def _asks(path: str, body: object, tenant: str) -> Client:
    def ask(place: ServerAddress, stop: threading.Event) -> None:
        while not stop.is_set():
            fetch(place, path, body, headers=KEYS[tenant])

    return ask


def asks_once(client: Client) -> Client:
    """The same client, which leaves after its first answer."""

    def ask(place: ServerAddress, stop: threading.Event) -> None:
        client(place, FirstTurn())

    return ask


class FirstTurn(threading.Event):
    """Set from the second time on that it is looked at."""

    def is_set(self) -> bool:
        before = super().is_set()
        self.set()
        return before


def infers(model: str, *shape: int) -> Client:
    """A client that sends one tensor after the other."""
    size = 1
    for each in shape:
        size *= each
    tensor = {"name": "IN", "shape": shape, "datatype": "FP32", "data": [1.0] * size}
    return _asks(f"/v2/models/{model}/infer", {"inputs": [tensor]}, "a")


def generates(model: str, prompt: int, new: int, first: int = 0, tenant: str = "a") -> Client:
    """A client that lets one text after the other be generated, each after the same tokens from `first` on."""
    tokens = [(first + at) % VOCAB for at in range(prompt)]
    body = {"input_ids": tokens, "max_tokens": new, "ignore_eos": True}
    return _asks(f"/v2/models/{model}/generate", body, tenant)


def generates_anew(model: str, prompt: int, seed: int) -> Client:
    """A client that asks for one token after prompts of which no two begin alike."""

    def ask(place: ServerAddress, stop: threading.Event) -> None:
        random = Random(seed)
        while not stop.is_set():
            body = {"input_ids": [random.randrange(VOCAB) for _ in range(prompt)], "max_tokens": 1}
            fetch(place, f"/v2/models/{model}/generate", body, headers=KEYS["a"])

    return ask


def holds_loop(place: ServerAddress, stop: threading.Event) -> None:
    """A client of the pipeline whose code sleeps in the event loop."""
    _asks("/v2/models/holding/generate", {"question": "?"}, "a")(place, stop)


def reads_slowly(model: str, body: Mapping[str, object]) -> Client:
    """A client of a stream whose events are long, and which takes few of them."""

    def ask(place: ServerAddress, stop: threading.Event) -> None:
        text = json.dumps({**body, "id": "x" * 4000}).encode()
        head = f"POST /v2/models/{model}/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n"
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect((place.host, place.http_port))
            sock.sendall(f"{head}Authorization: {KEYS['a']['Authorization']}\r\n\r\n".encode() + text)
            while not stop.is_set() and sock.recv(8192):
                time.sleep(0.05)

    return ask


def _has_merged(scrape: Scrape) -> bool:
    return sum(scrape["charonia_merged_tokens_total"]["fast"].values()) > _MERGED


def _has_queue(scrape: Scrape) -> bool:
    return sum(scrape["nv_inference_pending_request_count"]["single"].values()) > _WAITING


def _has_waited(scrape: Scrape) -> bool:
    return any(scrape["charonia_reader_wait_seconds_total"]["repeating"].values())


STATES: Mapping[str, ServerState] = {
    "idle": ServerState("rows", Cause.IDLE, "nothing limits it"),
    "rows_taken": ServerState("rows", Cause.QUEUE, "until a running one ends", (generates("rows", 8, 40),) * 12),
    "steps_full": ServerState(
        "narrow",
        Cause.QUEUE,
        "room in a step",
        tuple(generates("narrow", 300, 2, first=31 * number) for number in range(12)),
    ),
    "instances_busy": ServerState(
        "single", Cause.QUEUE, "a free instance", (infers("single", 1),) * 8, until=_has_queue
    ),
    "batching_off": ServerState("unbatched", Cause.BATCHING, "does not batch", (infers("unbatched", 1, 1),) * 8),
    "one_client_and_delay": ServerState("delayed", Cause.BATCHING, "one at a time", (infers("delayed", 1, 1),)),
    "one_client": ServerState("batched", Cause.BATCHING, "one at a time", (infers("batched", 1, 1),)),
    "delay": ServerState("delayed", Cause.BATCHING, "requests that do not come", (infers("delayed", 1, 1),) * 4),
    "preferred_size": ServerState("pairs", Cause.BATCHING, "preferred size", (infers("pairs", 1, 1),) * 8),
    "shapes": ServerState(
        "shaped", Cause.BATCHING, "different shapes", tuple(infers("shaped", 1, size) for size in range(1, 9))
    ),
    "batches_formed": ServerState("batched", Cause.COMPUTATION, "executed", (infers("batched", 1, 1),) * 8),
    "cache_full": ServerState(
        "full", Cause.CACHE_FULL, "blocks", tuple(generates("full", 40, 80, first=50 * number) for number in range(10))
    ),
    "preemptions": ServerState(
        "evicting",
        Cause.PREEMPTIONS,
        "lose their cache",
        tuple(generates("evicting", 16, 300, first=50 * number) for number in range(10)),
    ),
    "snapshots_evicted": ServerState(
        "forgetful",
        Cause.NO_SNAPSHOT,
        "though the cache has their blocks",
        tuple(generates("forgetful", 400, 2, first=50 * number) for number in range(6)),
    ),
    "computation": ServerState("narrow", Cause.COMPUTATION, "computed", (generates("narrow", 8, 60),) * 2),
    "loop_held": ServerState(
        "fast",
        Cause.FRONTEND,
        "event loop",
        (holds_loop, holds_loop, generates("fast", 8, 40), generates("fast", 8, 40)),
    ),
    "slow_client": ServerState(
        "fast",
        Cause.SLOW_CLIENT,
        "more slowly",
        (reads_slowly("fast", {"input_ids": [1], "max_tokens": 60000, "ignore_eos": True}),),
        until=_has_merged,
    ),
    "slow_reader": ServerState(
        "repeating",
        Cause.SLOW_CLIENT,
        "waits for its readers",
        (reads_slowly("repeating", {"IN": [1] * 20000, "DELAY": [0] * 20000, "WAIT": 0}),),
        until=_has_waited,
    ),
    "tenant": ServerState(
        "rows",
        Cause.TENANT,
        "tenant 'a'",
        (*(generates("rows", 8, 60),) * 12, generates("rows", 8, 10, tenant="b")),
    ),
    "cold_start": ServerState(
        "cold", Cause.COLD_START, "is loaded", (asks_once(infers("cold", 1)),) * 2, server="on_demand"
    ),
    "cold_engine": ServerState(
        "rows", Cause.COLD_START, "is loaded", (asks_once(generates("rows", 8, 5)),) * 3, server="on_demand"
    ),
    "decoding": ServerState(
        "checkpoint",
        Cause.MEMORY_BANDWIDTH,
        "read weights",
        (generates("checkpoint", 16, 200),),
        server="checkpoint",
    ),
    "prompts": ServerState(
        "checkpoint",
        Cause.ARITHMETIC,
        "multiply",
        (generates_anew("checkpoint", 256, 1),),
        server="checkpoint",
    ),
}


def write_models(directory: Path, names: Collection[str]) -> Path:
    """A repository of the models that are named, and of the pipeline."""
    classic = {name: config for name, config in _CLASSIC.items() if name in names} | {"holding": _PIPELINE}
    for name, config in classic.items():
        (directory / name / "1").mkdir(parents=True)
        (directory / name / "config.pbtxt").write_text(config)
    (directory / "holding" / "1" / "pipeline.py").write_text(_HOLDING)
    for name in (name for name in _LANGUAGE if name in names):
        write_words(directory / name / "1")
        write_config(directory / name, {"executor": "fake", "fake_vocab_size": VOCAB, **_LANGUAGE[name]})
    return directory


def scrape_state(place: ServerAddress, state: ServerState, seconds: float) -> tuple[str, str]:
    """The texts of two scrapes so many seconds apart, between which the server was in this state. Raises
    `TimeoutError` if it does not come to it."""
    stop = threading.Event()
    threads = [threading.Thread(target=client, args=(place, stop)) for client in state.clients]
    before = fetch_metrics(place)
    try:
        for thread in threads:
            thread.start()
        if state.server != "on_demand":
            time.sleep(seconds / 3)
            before = scrape_when(place, state.until)
        time.sleep(seconds)
        return before, fetch_metrics(place)
    finally:
        stop.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join(_PATIENCE)


def scrape_when(place: ServerAddress, holds: Callable[[Scrape], bool]) -> str:
    """The text of the first scrape of which that holds. Raises `TimeoutError` if there is none in time."""
    deadline = time.monotonic() + _PATIENCE
    while not holds(parse_scrape(text := fetch_metrics(place), "the scrape")):
        if time.monotonic() > deadline:
            raise TimeoutError("the server does not come to the state")
        time.sleep(0.2)
    return text


def first_named(before: str, after: str, model: str, machine: Path | None = None) -> Bottleneck:
    """What is said to limit the model most. `machine`: calibrate's file."""
    interval, rooflines = Interval(parse_scrape(before, "before"), parse_scrape(after, "after")), {}
    if machine is not None:
        rooflines[model] = msgspec.convert(read_machine_file(machine).machine, StepRoofline, from_attributes=True)
    [report] = explain(interval, rooflines, model)
    return report.bottlenecks[0]


class NotingScrape(UserDict[str, Mapping[str, Mapping[SeriesLabels, float]]]):
    """A scrape that notes what it is asked for."""

    def __init__(self, scrape: Scrape) -> None:
        super().__init__(scrape)
        self.asked: set[str] = set()

    def __getitem__(self, family: str) -> Mapping[str, Mapping[SeriesLabels, float]]:
        self.asked.add(family)
        return super().__getitem__(family)

    def __contains__(self, family: object) -> bool:
        self.asked.add(str(family))
        return super().__contains__(family)


def reduce_scrape(text: str, model: str, families: set[str]) -> str:
    """The lines of these families, of the model or of the server."""
    kept = []
    for line in text.splitlines():
        name = line.partition(" ")[0].partition("{")[0]
        of_model = 'model="' not in line or f'model="{model}"' in line
        if not line.startswith("#") and of_model and name in families:
            kept.append(f"{line}\n")
    return "".join(kept)


def asked_families(before: str, after: str, model: str) -> set[str]:
    """The names that judging the model asks for."""
    first, last = (NotingScrape(parse_scrape(text, "the scrape")) for text in (before, after))
    explain(Interval(first, last), {model: StepRoofline()}, model)
    return first.asked | last.asked


@contextmanager
def explained_server(
    names: Collection[str], kind: ServerKind = "models", checkpoint: Path | None = None
) -> Iterator[ServerAddress]:
    """A server for these states, which are all of that kind."""
    with TemporaryDirectory(prefix="charonia-proof-") as directory:
        what: tuple[str, ...]
        if kind == "checkpoint":
            what = (str(checkpoint), "--served-model-name", "checkpoint")
        else:
            models = {STATES[name].model for name in names}
            what = ("--model-repository", str(write_models(Path(directory) / "models", models)))
        on_demand = ("--load-on-demand",) if kind == "on_demand" else ()
        with own_server(*what, *FLAGS, *on_demand) as place:
            yield place


def check_states(
    place: ServerAddress, names: list[str], seconds: float, machine: Path | None, record: Path | None
) -> list[str]:
    """The states of which something else was named first."""
    wrong = []
    for name in names:
        state = STATES[name]
        before, after = scrape_state(place, state, seconds)
        first = first_named(before, after, state.model, machine if state.server == "checkpoint" else None)
        right = first.cause is state.cause and state.word in first.text
        print(f"{name}: {'' if right else 'WRONG, '}{first.cause}: {first.text}", flush=True)
        wrong += [] if right else [name]
        if record is not None:
            families = asked_families(before, after, state.model)
            for when, text in (("before", before), ("after", after)):
                (record / f"{name}.{when}.txt").write_text(reduce_scrape(text, state.model, families))
    return wrong


@app.default
def main(
    *states: str,
    seconds: float = 4.0,
    checkpoint: Path | None = None,
    machine: Path | None = None,
    record: Path | None = None,
) -> None:
    """Drive servers into each state, or into `states`, for `seconds`; the exit code is 0 if all were named first.

    Parameters
    ----------
    checkpoint
        A checkpoint whose weights do not fit the processor's caches; without it the states of real steps are left out.
    machine
        What `charonia calibrate` wrote of it.
    record
        Where to write the scrapes.
    """
    wrong = []
    kinds: tuple[ServerKind, ...] = get_args(ServerKind)
    for kind in kinds if checkpoint is not None else kinds[:2]:
        names = [name for name in states or STATES if STATES[name].server == kind]
        if names:
            with explained_server(names, kind, checkpoint) as place:
                wrong += check_states(place, names, seconds, machine, record)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    app()
