"""Pictures are good neighbours: `python -m tests.proofs.pictures`.

A model that sees, with random weights, streams eight texts while pictures of 1,024 x 768 arrive at once. Told are the
gaps between tokens of those streams, beside the same streams alone, and how long pictures wait for their first token.
The bar is for half a billion weights in int8, which people run, beside eight pictures, which must all be answered; it
says little where the host of a virtual machine took much of the processors' time meanwhile, which is told.
Of 25 million weights beside 32 pictures the gaps are only told: where a step takes a few milliseconds, streams alone
have p99 gaps of several times their median, for server and reader need the processors of steps. On that model are
measured the longest gap in the answers for health, the TTFT of a second turn over a picture beside that of the first,
and the memory after small pictures, each another one, by the thousand: it must not grow after the first half of them.

Streams are read by a process that does nothing else, and pictures sent by another with a low priority: see
`neighbours.py`.
"""

import asyncio
import base64
import io
import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import inf
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
from .neighbours import first_token, neighbours
from .process_stats import read_server_stats
from .stalls import GAP_SECONDS, gap_watcher, longest_gap

NAME = "qwen2.5-vl"
_STREAMS, _PICTURES, _PICTURES_OF_LARGE = 8, 32, 8
_TURNS = 100
"""Texts of a stream, one after the other: more than it has time for."""
_LARGE, _SMALL = (1024, 768), (56, 56)
_MOST_GAP, _MOST_SECOND_TURN, _MOST_GROWTH = 2.5, 0.15, 1.05
"""p99 of the gaps over the median alone, the second turn's TTFT over the first's, and memory over that of half of the
pictures."""
_PATIENCE, _PATIENCE_OF_LARGE = 60.0, 100.0
"""Seconds for which gaps are measured beside pictures at most, whether all are answered or not."""
_WARM = 2.0
"""Seconds before streams are measured."""
_HEALTH_PAUSE = 0.01
"""Seconds between two questions for health, which take their part of the two cores."""
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


class SeeingShape(NamedTuple):
    """Sizes of a model that sees, and the parameters that it is served with."""

    text: Mapping[str, Any]
    eye: Mapping[str, Any]
    parameters: Mapping[str, Any]


SMALL = SeeingShape(_TEXT, _EYE, {})
"""25 million weights behind a tower of 5 million."""
HALF_BILLION = SeeingShape(
    _TEXT | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    _EYE | {"out_hidden_size": 896},
    {"quantization": "int8"},
)

app = App(name="python -m tests.proofs.pictures", help=__doc__)


class Gaps(NamedTuple):
    """Seconds: `alone` and `alone_p99`, the median and p99 gap between tokens of streams; `beside`, their p99 gap while
    pictures come; `first`, the median TTFT of those that were `answered` in time. `stolen`: the part of the processors'
    time that a virtual machine's host took meanwhile."""

    alone: float
    alone_p99: float
    beside: float
    first: float
    answered: int
    stolen: float


class PicturesResult(NamedTuple):
    """Seconds: `gaps` of streams; `health`, the longest gap in its answers; `turns`, the TTFT of a picture in a first
    and in a second turn. `growth`: the memory at the end over that of half-way."""

    gaps: Gaps
    health: float
    turns: tuple[float, float]
    growth: float


def write_checkpoint(directory: Path, shape: SeeingShape) -> Path:
    """A checkpoint of that shape in `directory`, whose processor leaves pictures as large as they are."""
    checkpoint = write_seeing(directory, NAME, parts={"text_config": shape.text, "vision_config": shape.eye})
    settings = json.loads((checkpoint / "preprocessor_config.json").read_text())
    (checkpoint / "preprocessor_config.json").write_text(json.dumps(settings | {"size": _PIXELS}))
    return checkpoint


@contextmanager
def seeing_server(shape: SeeingShape = SMALL) -> Iterator[ServerAddress]:
    """A server with a model that sees."""
    with TemporaryDirectory(prefix="charonia-proof-") as scratch:
        checkpoint = write_checkpoint(Path(scratch) / "checkpoint", shape)
        parameters = {"max_num_seqs": 64, "kv_cache_bytes": 512 << 20, **shape.parameters}
        write_model(Path(scratch) / "models", NAME, checkpoint, **parameters)
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


def stream_body(text: str, tokens: int = 1000) -> dict[str, Any]:
    """The body of a long streamed chat, of which a chunk comes for each token: half a character has no text, but a
    log-probability."""
    return question({"type": "text", "text": text}, tokens=tokens, logprobs=True)


async def _ask(place: ServerAddress, body: dict[str, Any]) -> float:
    """The TTFT of a request."""
    return await first_token(place, json.dumps(body).encode())


def _processor_ticks() -> tuple[int, int]:
    """The host's ticks of the processors' time, and all, since the machine started."""
    ticks = [int(number) for number in Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]]
    return ticks[-1], sum(ticks)


def measure_gaps(place: ServerAddress, seconds: float, pictures: int = _PICTURES, patience: float = _PATIENCE) -> Gaps:
    """The gaps of streams alone for so long, and while pictures come, with `patience` for these."""
    asyncio.run(_ask(place, question(image_part(_LARGE, 0))))  # what is done for the first time takes longer
    texts = [[stream_body(f"Stream {number}, {turn}.") for turn in range(_TURNS)] for number in range(_STREAMS)]
    bodies = [question(image_part(_LARGE, number)) for number in range(1, pictures + 1)]
    with neighbours(place, texts, bodies, patience) as load:
        load.gaps()
        time.sleep(_WARM)
        load.gaps()
        time.sleep(seconds)
        alone = load.gaps()
        before = _processor_ticks()
        firsts = load.send_others()
        beside = load.gaps()
        after = _processor_ticks()
    first = median(firsts) if firsts else inf
    stolen = (after[0] - before[0]) / (after[1] - before[1])
    tails = quantiles(alone, n=100)[-1], quantiles(beside, n=100)[-1]
    return Gaps(median(alone), *tails, first, len(firsts), stolen)


async def _turns(place: ServerAddress) -> tuple[float, float]:
    """The TTFT of a picture in a first turn, and of the same conversation's second."""
    body = question(image_part(_LARGE, 1000))
    first = await _ask(place, body)
    answer = [{"role": "assistant", "content": "It is."}, {"role": "user", "content": "And then?"}]
    return first, await _ask(place, body | {"messages": [*body["messages"], *answer]})


async def _growth(place: ServerAddress, count: int) -> float:
    """The memory behind `count` small pictures over that behind half of them."""

    async def ask(numbers: range) -> None:
        for number in numbers:
            await _ask(place, question(image_part(_SMALL, number), tokens=1))

    async def ask_half(half: int) -> int:
        begin = 10_000 + half * count // 2
        await asyncio.gather(*[ask(range(begin + lane, begin + count // 2, 4)) for lane in range(4)])
        stats = read_server_stats(place)
        return sum(process.rss for process in (stats.frontend, *stats.cores, *stats.others))

    before = await ask_half(0)
    return await ask_half(1) / before


def measure(place: ServerAddress, seconds: float, small: int) -> PicturesResult:
    """Put the load on a server of `seeing_server`."""
    with gap_watcher(place, _HEALTH_PAUSE) as watch:
        longest_gap(watch)
        gaps = measure_gaps(place, seconds)
        health = longest_gap(watch)
    turns = asyncio.run(_turns(place))
    return PicturesResult(gaps, health, turns, asyncio.run(_growth(place, small)))


@app.default
def main(*, seconds: float = 5.0, small: int = 2_000) -> None:
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
    with seeing_server(HALF_BILLION) as place:
        larger = measure_gaps(place, seconds, _PICTURES_OF_LARGE, _PATIENCE_OF_LARGE)
    table = table_of(
        (), ("weights", "median alone", "p99 alone", "p99 beside", "over the median", "TTFT", "answered", "stolen")
    )
    for name, gaps, sent in (
        ("25 million", result.gaps, _PICTURES),
        ("half a billion", larger, _PICTURES_OF_LARGE),
    ):
        times = (f"{1e3 * one:.1f} ms" for one in (gaps.alone, gaps.alone_p99, gaps.beside))
        over = f"{gaps.alone_p99 / gaps.alone:.2f}, {gaps.beside / gaps.alone:.2f}"
        table.add_row(name, *times, over, f"{gaps.first:.1f} s", f"{gaps.answered} of {sent}", f"{gaps.stolen:.0%}")
    console.print(table)
    turns = " and ".join(f"{1e3 * turn:.1f} ms" for turn in result.turns)
    console.print(f"longest gap of health {1e3 * result.health:.1f} ms; TTFT of a first and of a second turn {turns}")
    verdicts = [
        TrialVerdict("p99 gap beside pictures over the median alone", larger.beside / larger.alone, _MOST_GAP, False),
        TrialVerdict("pictures answered of those sent", larger.answered / _PICTURES_OF_LARGE, 1.0, True),
        TrialVerdict("gap of health, seconds", result.health, GAP_SECONDS, False),
        TrialVerdict("TTFT of a second turn over a first", result.turns[1] / result.turns[0], _MOST_SECOND_TURN, False),
        TrialVerdict("memory behind all pictures over half of them", result.growth, _MOST_GROWTH, False),
    ]
    show_verdicts(console, verdicts)
    sys.exit(not all(verdict.met for verdict in verdicts))


if __name__ == "__main__":
    app()
