"""A prefilling server is killed at every step of requests that another one answers: `python -m tests.proofs.apart`.

Two servers of the demo model stand behind the steps of llm-d's sidecar. In each round a request goes through both while
the prefiller's engine gets SIGKILL: before it is asked, while it computes, between the two servers, or while its blocks
are fetched. Every answer must be the text that the decoder writes alone, and nothing may be left waiting or held.
"""

import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from cyclopts import App
from rich.console import Console

from charonia.bench.server_process import children, own_server, process_name

from ..e2e.sidecar import TIMEOUT, Sidecar

STEPS = ("before it is asked", "while it computes", "between the two", "while its blocks are fetched")
PATH = "/v1/completions"
_WINDOW = 0.05
"""Seconds in which a kill falls that is to hit something under way."""

app = App(name="python -m tests.proofs.apart", help=__doc__)


class ApartResult(NamedTuple):
    """How often the engine was killed at each step, and what was wrong then."""

    kills: Counter[str]
    faults: list[str]


def run_kills(
    prefiller: str,
    decoder: str,
    kill: Callable[[], None],
    revive: Callable[[], None],
    bodies: Iterable[dict[str, Any]],
    seed: int = 0,
) -> ApartResult:
    """Send each body through both servers, whose addresses are URLs, and `kill` the prefiller's engine meanwhile;
    `revive` returns when it serves again. Bodies ask greedily, or with a seed, and name a salt of their own."""
    chance, kills, faults = random.Random(seed), Counter[str](), list[str]()
    for number, body in enumerate(bodies):
        alone = httpx.post(decoder + PATH, json=body | {"cache_salt": f"alone {number}"}, timeout=TIMEOUT)
        right = alone.raise_for_status().json()["choices"]
        step = STEPS[number % len(STEPS)]
        late = threading.Timer(chance.random() * _WINDOW, kill)
        if step == STEPS[0]:
            kill()
        elif step == STEPS[1]:
            late.start()
        between: dict[str, Callable[[], None]] = {STEPS[2]: kill, STEPS[3]: late.start}
        answer = Sidecar(prefiller, decoder, between.get(step, _do_nothing)).ask(PATH, body)
        late.cancel()
        kills[step] += 1
        if answer.status_code != 200:
            faults.append(f"{step}: {answer.status_code} {answer.text}")
        elif answer.json()["choices"] != right:
            faults.append(f"{step}: another text: {answer.json()['choices']} in place of {right}")
        revive()
    return ApartResult(kills, faults)


def _do_nothing() -> None:
    pass


def _flags(role: str, token: str) -> list[str]:
    limits = f'{{"token": "{token}", "timeout_seconds": 5, "piece_bytes": 65536}}'
    config = f'{{"kv_connector": "CharoniaConnector", "kv_role": "{role}", "kv_port": 0, '
    return ["--kv-transfer-config", config + f'"kv_connector_extra_config": {limits}}}']


@app.default
def main(rounds: int = 40, seed: int = 0, seconds: float = 120) -> None:
    """Kill the prefiller's engine in so many rounds, one of each step at least: none begins after these seconds, for an
    engine that is lost often comes back ever later."""
    model = Path(__file__).parents[2] / "examples" / "model_repository" / "demo" / "1"
    token = random.Random(seed).randbytes(16).hex()
    with ExitStack() as stack:
        roles = ("kv_producer", "kv_consumer")
        places = [stack.enter_context(own_server(str(model), *_flags(role, token))) for role in roles]
        prefiller, decoder = (f"http://{place.host}:{place.http_port}" for place in places)

        def kill() -> None:
            for pid in children(places[0].pid or 0):
                with suppress(ProcessLookupError):
                    if process_name(pid) == "charonia-core":
                        os.kill(pid, signal.SIGKILL)

        def revive() -> None:
            deadline = time.monotonic() + TIMEOUT
            while httpx.get(f"{prefiller}/v2/health/ready").status_code != 200:
                if time.monotonic() > deadline:
                    sys.exit("the prefiller does not come back")
                time.sleep(0.05)

        result = run_kills(prefiller, decoder, kill, revive, _bodies(rounds, time.monotonic() + seconds), seed)
    console = Console()
    console.print(*(f"{step}: {count} times" for step, count in result.kills.items()), sep="\n")
    console.print(*(result.faults or ["every answer was right"]), sep="\n")
    sys.exit(bool(result.faults))


def _bodies(rounds: int, deadline: float) -> Iterator[dict[str, Any]]:
    for number in range(rounds):
        if number >= len(STEPS) and time.monotonic() > deadline:
            return
        prompt, salt = "def f(x):\n    return x\n" * (10 + number % 7), str(number)
        asked = {"model": "1", "prompt": prompt, "cache_salt": salt}
        yield asked | {"max_tokens": 16, "temperature": 1.0, "seed": number}


if __name__ == "__main__":
    app()
