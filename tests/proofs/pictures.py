"""Pictures are good neighbours: `python -m tests.proofs.pictures`.

A model that sees, with random weights, streams eight texts while 32 pictures of 1,024 x 768 arrive at once. Told are
the gaps between tokens of those streams, beside the median of the same streams alone; the longest gap in the answers
for health; and how long pictures wait for their first token, seen for the first time and in a second turn. Then small
pictures, each another one, come by the thousand, and the server's memory must not grow after the first half of them.
"""

import asyncio
import base64
import io
import json
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from cyclopts import App
from PIL import Image
from rich.console import Console

from charonia.bench.command import table_of
from charonia.bench.server_process import ServerAddress, own_server
from charonia.bench.trial import TrialVerdict, show_verdicts

from ..e2e.models import write_model
from ..seeing_models import picture, write_seeing
from .process_stats import read_server_stats
from .stalls import GAP_SECONDS, gap_watcher, longest_gap

NAME = "qwen2.5-vl"
_STREAMS, _PICTURES = 8, 32
_LARGE, _SMALL = (1024, 768), (56, 56)
_MOST_GAP, _MOST_SECOND_TURN, _MOST_GROWTH = 2.5, 0.15, 1.05
"""p99 of the gaps over the median alone, the second turn's TTFT over the first's, and memory over that of half of the
pictures."""
_PIXELS = {"shortest_edge": 28 * 28, "longest_edge": 1 << 20}
_TEXT = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]},
}
_EYE = {"depth": 6, "hidden_size": 256, "num_heads": 4, "intermediate_size": 512, "out_hidden_size": 512}

app = App(name="python -m tests.proofs.pictures", help=__doc__)


class PicturesResult(NamedTuple):
    """Seconds: `alone`, the median gap between tokens of streams; `beside`, their p99 gap while pictures come;
    `health`, the longest gap in its answers; `first`, the median TTFT of pictures that come at once; `turns`, the TTFT
    of a picture in a first and in a second turn. `growth`: the memory at the end over that of half-way."""

    alone: float
    beside: float
    health: float
    first: float
    turns: tuple[float, float]
    growth: float


@contextmanager
def seeing_server() -> Iterator[ServerAddress]:
    """A server with a model that sees: a text part of 25 million weights behind a tower of 5 million."""
    with TemporaryDirectory(prefix="charonia-proof-") as scratch:
        parts = {"text_config": _TEXT, "vision_config": _EYE}
        checkpoint = write_seeing(Path(scratch) / "checkpoint", NAME, parts=parts)
        settings = json.loads((checkpoint / "preprocessor_config.json").read_text())
        (checkpoint / "preprocessor_config.json").write_text(json.dumps(settings | {"size": _PIXELS}))
        write_model(Path(scratch) / "models", NAME, checkpoint, max_num_seqs=64, kv_cache_bytes=512 << 20)
        with own_server("--model-repository", str(Path(scratch) / "models")) as place:
            yield place


def image_part(size: tuple[int, int], number: int) -> dict[str, Any]:
    """The part of a message that is a picture, another one for each number."""
    file = io.BytesIO()
    Image.fromarray(picture(*size, number)).save(file, "PNG", compress_level=1)
    encoded = base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}


def question(*parts: dict[str, Any], tokens: int = 4, **fields: Any) -> dict[str, Any]:
    """The body of a streamed chat."""
    content = [{"type": "text", "text": "What is it?"}, *parts]
    asked = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    return {"model": NAME, "messages": [{"role": "user", "content": content}], **asked, **fields}


async def token_times(place: ServerAddress, body: dict[str, Any]) -> AsyncIterator[float]:
    """When each chunk of an answer comes."""
    encoded = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(place.host, place.http_port, limit=1 << 20)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    writer.write(head % len(encoded) + encoded)
    try:
        status = await reader.readline()
        if b" 200 " not in status:
            raise ConnectionError((status + await reader.read()).decode())
        async for line in reader:
            if line.startswith(b"data: {") and b'"content"' in line:
                yield time.perf_counter()
    finally:
        writer.close()


async def first_token(place: ServerAddress, body: dict[str, Any]) -> float:
    """The TTFT of a request whose whole answer is read."""
    began = time.perf_counter()
    times = [at async for at in token_times(place, body)]
    return times[0] - began


async def _gaps(place: ServerAddress, number: int, gaps: list[float]) -> None:
    """Add the gaps of one stream after another, until this is cancelled."""
    for turn in range(1 << 20):
        text = {"type": "text", "text": f"Stream {number}, {turn}."}
        async with aclosing(token_times(place, question(text, tokens=1000))) as times:
            last = await anext(times)
            async for at in times:
                gaps.append(at - last)
                last = at


async def _neighbours(place: ServerAddress, seconds: float) -> tuple[list[float], list[float], list[float]]:
    """The gaps of streams alone for so long, those while pictures come, and the TTFT of these."""
    bodies = [question(image_part(_LARGE, number)) for number in range(1, _PICTURES + 1)]
    gaps: list[float] = []
    streams = [asyncio.create_task(_gaps(place, number, gaps)) for number in range(_STREAMS)]
    try:
        await asyncio.sleep(1)
        gaps.clear()
        await asyncio.sleep(seconds)
        alone = gaps.copy()
        gaps.clear()
        firsts = await asyncio.gather(*[first_token(place, body) for body in bodies])
        beside = gaps.copy()
    finally:
        for task in streams:
            task.cancel()
        ended = await asyncio.gather(*streams, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception):
            raise error
    return alone, beside, firsts


async def _turns(place: ServerAddress) -> tuple[float, float]:
    """The TTFT of a picture in a first turn, and of the same conversation's second."""
    body = question(image_part(_LARGE, 1000))
    first = await first_token(place, body)
    answer = [{"role": "assistant", "content": "It is."}, {"role": "user", "content": "And then?"}]
    return first, await first_token(place, body | {"messages": [*body["messages"], *answer]})


async def _growth(place: ServerAddress, count: int) -> float:
    """The memory behind `count` small pictures over that behind half of them."""

    async def ask(numbers: range) -> None:
        for number in numbers:
            await first_token(place, question(image_part(_SMALL, number), tokens=1))

    async def ask_half(half: int) -> int:
        begin = 10_000 + half * count // 2
        await asyncio.gather(*[ask(range(begin + lane, begin + count // 2, 4)) for lane in range(4)])
        stats = read_server_stats(place)
        return sum(process.rss for process in (stats.frontend, *stats.cores, *stats.others))

    before = await ask_half(0)
    return await ask_half(1) / before


def measure(place: ServerAddress, seconds: float, small: int) -> PicturesResult:
    """Put the load on a server of `seeing_server`."""
    asyncio.run(first_token(place, question(image_part(_LARGE, 0))))  # what is done for the first time takes longer
    with gap_watcher(place) as watch:
        longest_gap(watch)
        alone, beside, firsts = asyncio.run(_neighbours(place, seconds))
        health = longest_gap(watch)
    turns = asyncio.run(_turns(place))
    growth = asyncio.run(_growth(place, small))
    return PicturesResult(median(alone), quantiles(beside, n=100)[-1], health, median(firsts), turns, growth)


@app.default
def main(*, seconds: float = 5.0, small: int = 10_000) -> None:
    """Measure.

    Parameters
    ----------
    seconds
        For which the streams run alone.
    small
        Small pictures, behind half of which memory is compared with that behind all.
    """
    console = Console()
    with seeing_server() as place:
        result = measure(place, seconds, small)
    table = table_of((), ("median gap alone", "p99 gap beside", "health", "TTFT of 32", "first turn", "second turn"))
    times = (result.alone, result.beside, result.health, result.first, *result.turns)
    table.add_row(*(f"{1e3 * seconds:.1f} ms" for time_of_one in times))
    console.print(table)
    verdicts = [
        TrialVerdict(
            "p99 gap of streams beside pictures, over the median alone", result.beside / result.alone, _MOST_GAP, False
        ),
        TrialVerdict("gap of health, seconds", result.health, GAP_SECONDS, False),
        TrialVerdict("TTFT of a second turn over a first", result.turns[1] / result.turns[0], _MOST_SECOND_TURN, False),
        TrialVerdict("memory behind all pictures over half of them", result.growth, _MOST_GROWTH, False),
    ]
    show_verdicts(console, verdicts)
    sys.exit(not all(verdict.met for verdict in verdicts))


if __name__ == "__main__":
    app()
