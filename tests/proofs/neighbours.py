"""Streams and pictures in processes of their own, so that what measures the ones neither waits for the others nor for
its own work: pictures are encoded before, and sent at a low priority."""

import asyncio
import json
import multiprocessing
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

from charonia.bench.server_process import ServerAddress

_NICENESS = 10
"""Of what sends pictures: it would be another machine."""
_HEAD = b"""POST /v1/chat/completions HTTP/1.1\r
host: x\r
connection: close\r
content-type: application/json\r
content-length: %d\r
\r
"""
_LATE_SECONDS = 30.0
"""How long a process may take to end."""


async def token_times(place: ServerAddress, body: bytes) -> AsyncIterator[float]:
    """When each chunk of a streamed chat comes, by `time.perf_counter`."""
    reader, writer = await asyncio.open_connection(place.host, place.http_port, limit=1 << 20)
    writer.write(_HEAD % len(body) + body)
    try:
        status = await reader.readline()
        if b" 200 " not in status:
            raise ConnectionError((status + await reader.read()).decode())
        async for line in reader:
            if line.startswith(b"data: {") and b'"content"' in line:
                yield time.perf_counter()
    finally:
        writer.close()


async def first_token(place: ServerAddress, body: bytes) -> float:
    """The TTFT of a request whose whole answer is read."""
    began = time.perf_counter()
    times = [at async for at in token_times(place, body)]
    return times[0] - began


async def _follow(place: ServerAddress, bodies: Iterator[bytes], gaps: list[float]) -> None:
    """Add the gaps of one stream after another, until this is cancelled."""
    for body in bodies:
        async with aclosing(token_times(place, body)) as times:
            last = await anext(times)
            async for at in times:
                gaps.append(at - last)
                last = at


async def _streams(place: ServerAddress, streams: Sequence[Sequence[bytes]], asked: Connection) -> None:
    """Follow streams; at each word that comes, send the gaps since the last one."""
    gaps: list[float] = []
    tasks = [asyncio.create_task(_follow(place, iter(bodies), gaps)) for bodies in streams]
    ended = asyncio.gather(*tasks)
    wanted = asyncio.Event()
    asyncio.get_running_loop().add_reader(asked.fileno(), wanted.set)
    while True:
        word = asyncio.create_task(wanted.wait())
        await asyncio.wait((word, ended), return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            asked.send(str(ended.exception() or "the streams have ended"))
            return
        wanted.clear()
        if not asked.poll():  # it is set once more while what has come is read
            continue
        if not asked.recv():
            break
        asked.send(gaps)
        gaps.clear()
    ended.cancel()
    with suppress(asyncio.CancelledError):
        await ended


def _run_streams(place: ServerAddress, streams: Sequence[Sequence[bytes]], asked: Connection) -> None:
    asyncio.run(_streams(place, streams, asked))


def _send(place: ServerAddress, bodies: Sequence[bytes], seconds: float, asked: Connection) -> None:
    """At a word, send all requests at once; tell the TTFT of those whose answers came within so many seconds."""
    os.nice(_NICENESS)
    if not asked.recv():
        return

    async def send() -> list[float]:
        tasks = [asyncio.create_task(first_token(place, body)) for body in bodies]
        done, late = await asyncio.wait(tasks, timeout=seconds)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        return [task.result() for task in done]

    asked.send(asyncio.run(send()))


@contextmanager
def _process(target: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """A process of `target`, and the connection to it; it ends at an empty word, or by itself."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=target, args=(*arguments, theirs))
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        with suppress(OSError):
            ours.send(False)
        process.join(_LATE_SECONDS)
        process.kill()
        ours.close()


def _asked(connection: Connection) -> list[float]:
    connection.send(True)
    answer = connection.recv()
    if isinstance(answer, str):
        raise ConnectionError(answer)
    times: list[float] = answer
    return times


class Neighbours:
    """Streams that run, and requests that wait to be sent. All seconds are lists: one for each gap or request."""

    def __init__(self, streams: Connection, others: Connection) -> None:
        self._streams, self._others = streams, others

    def gaps(self) -> list[float]:
        """The gaps between chunks since they were asked for last."""
        return _asked(self._streams)

    def send_others(self) -> list[float]:
        """Send the others at once; the TTFT of those that were answered in time, when they are."""
        return _asked(self._others)


@contextmanager
def neighbours(
    place: ServerAddress, streams: Sequence[Sequence[Any]], others: Sequence[Any], seconds: float
) -> Iterator[Neighbours]:
    """Run streams, each one body after the other, until the block ends; `others` may take so many seconds."""
    encoded = [[json.dumps(body).encode() for body in bodies] for bodies in streams]
    waiting = [json.dumps(body).encode() for body in others]
    with _process(_send, place, waiting, seconds) as sender, _process(_run_streams, place, encoded) as follower:
        yield Neighbours(follower, sender)
