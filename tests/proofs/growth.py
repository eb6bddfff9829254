"""A server gets frontends while 64 streams run, again and again: `python -m tests.proofs.growth`.

Every stream must have all of its tokens, and the server's health must be told all the while, over new connections and
over one that stays: no answer may take longer than a tenth of a second more than before the growth.
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

from cyclopts import App

from charonia.bench.load.fake_model import NAME
from charonia.bench.server_process import ServerAddress
from charonia.cli.frontend_count import VARIABLE

from .fake_load import fake_server

_STREAMS, _TOKENS = 64, 400
_GAP = 0.1
"""Seconds that an answer may take longer while the server grows."""
_PAUSE = 0.005
_HEALTH = b"GET /v2/health/ready HTTP/1.1\r\nhost: x\r\n\r\n"
_BODY = {"model": NAME, "prompt": "a", "max_tokens": _TOKENS, "ignore_eos": True, "stream": True}

app = App(name="python -m tests.proofs.growth", help=__doc__)


class Answer(NamedTuple):
    """An answer to a question for health: when it was asked, and for how long it was waited for."""

    asked: float
    seconds: float


class GrowthResult(NamedTuple):
    """The longest that health was waited for, before the growth and during it, and streams that were not whole."""

    before: float
    during: float
    broken: int


async def _stream(place: ServerAddress) -> bool:
    """Whether a stream has every token."""
    body = json.dumps(_BODY | {"stream_options": {"include_usage": True}}).encode()
    reader, writer = await asyncio.open_connection(place.host, place.http_port)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    writer.write(head + body)
    text = await reader.read()
    writer.close()
    return b'"completion_tokens":%d' % _TOKENS in text.replace(b" ", b"") and b"[DONE]" in text


async def _ask_health(place: ServerAddress, stays: bool, answers: list[Answer]) -> None:
    """Ask until it is cancelled, over a connection that `stays` as long as the server lets it, or over new ones."""
    connection = None
    while True:
        began = time.perf_counter()
        if connection is None:
            connection = await asyncio.open_connection(place.host, place.http_port)
        reader, writer = connection
        writer.write(_HEALTH)
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise ConnectionError(head.decode())
        answers.append(Answer(began, time.perf_counter() - began))
        if not stays or b"connection: close" in head.lower():
            writer.close()
            connection = None
        await asyncio.sleep(_PAUSE)


async def grow(place: ServerAddress) -> GrowthResult:
    """Put the load on a server that is to grow by it, and tell what its clients saw."""
    answers: list[Answer] = []
    asking = [asyncio.create_task(_ask_health(place, stays, answers)) for stays in (False, True)]
    streams = [asyncio.create_task(_stream(place)) for _ in range(_STREAMS)]
    began = await _said(place, "starting")
    grown = await _said(place, "take new connections")
    whole = await asyncio.gather(*streams)
    for task in asking:
        if task.done():
            task.result()
        task.cancel()
    during = [
        answer.seconds for answer in answers if answer.asked <= grown + 1 and answer.asked + answer.seconds > began
    ]
    before = [answer.seconds for answer in answers if answer.asked + answer.seconds <= began]
    return GrowthResult(max(before), max(during), whole.count(False))


async def _said(place: ServerAddress, words: str) -> float:
    """The time at which the log has these words."""
    while words not in (place.log or Path()).read_text():  # noqa: ASYNC110 - of another process
        await asyncio.sleep(0.02)
    return time.perf_counter()


@app.default
def main(count: int = 10) -> None:
    """Let `count` servers grow; the exit code is 0 if no client noticed."""
    growth = {VARIABLE: "cores=8 busy=0.05 seconds=2"}
    faults = 0
    for number in range(count):
        parameters = {"fake_step_seconds": 0.02, "max_num_seqs": _STREAMS}
        with fake_server(parameters, environment=growth) as place:
            result = asyncio.run(grow(place))
        faults += result.broken > 0 or result.during > result.before + _GAP
        longest = (
            f"health in {1e3 * result.before:.0f} ms before, {1e3 * result.during:.0f} ms during the growth at most"
        )
        print(f"{number + 1}: {longest}; {result.broken} of {_STREAMS} streams broken")
    sys.exit(faults > 0)


if __name__ == "__main__":
    app()
