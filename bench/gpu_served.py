"""A served model over HTTP beside what its steps alone would give: closed loops of streams, with one frontend and with
several. Knows nothing of how steps are measured."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from ..core.errors import Unavailable
from .checkpoint import write_random, write_tokenizer
from .gpu_report import Figure
from .load.driver import LoopMode, RequestOptions
from .load.figures import Spread, compute_figures
from .load.plan import Prompts
from .load.planned_requests import uniform_jobs
from .load.worker import LoadRun, LoadTarget, run, run_here
from .server_process import ServerAddress, first_model

_GENERATORS = 4
"""Processes that ask: one is busy with about eight thousand frames a second."""
_WARM_UP_TOKENS = 16
"""New tokens of the requests before, which are in no figure."""
_MOST_SECONDS = 60.0
"""Of one load: no request begins later."""


class StreamLoads(NamedTuple):
    """Loads of one shape: for each number of streams how many requests, of `prompt` tokens and `new` ones each, whose
    ids are below `vocab`."""

    requests: Mapping[int, int]
    prompt: int
    new: int
    vocab: int


class StepRates(NamedTuple):
    """What steps alone give: prompt tokens a second, and the seconds of a decode step by its rows."""

    prompt_tokens: float
    decode_seconds: Mapping[int, float]

    def tokens_per_second(self, load: StreamLoads, streams: int) -> float:
        """Output tokens a second of a load whose prompts and decode steps take turns and wait for nothing."""
        requests = load.requests[streams]
        rounds = -(-requests // streams)
        seconds = requests * load.prompt / self.prompt_tokens + rounds * load.new * self.decode_seconds[streams]
        return requests * load.new / seconds


@contextmanager
def written_checkpoint(config: Mapping[str, Any], device: str) -> Iterator[Path]:
    """A checkpoint with random weights made on `device`, in memory where there is room, and a tokenizer."""
    with tempfile.TemporaryDirectory(prefix="charonia-gpu-", dir=_roomiest()) as made:
        write_random(Path(made), config, device=device)
        write_tokenizer(Path(made), config["vocab_size"])
        yield Path(made)


def _roomiest() -> str:
    memory, disk = "/dev/shm", tempfile.gettempdir()
    if not os.path.isdir(memory):
        return disk
    return max((memory, disk), key=lambda folder: shutil.disk_usage(folder).free)


def served_figures(
    name: str, place: ServerAddress, load: StreamLoads, rates: StepRates | None, frontends: int
) -> Iterator[Figure]:
    """A row for each number of streams, of the server at `place`.

    Raises:
        Unavailable: a request failed.
    """
    target = LoadTarget(
        host=place.host, port=place.http_port, door="completions", manner=RequestOptions(first_model(place))
    )

    def load_of(streams: int, requests: int, new: int) -> LoadRun:
        return LoadRun(
            target=target,
            jobs=uniform_jobs([0.0] * requests, load.prompt, new),
            prompts=Prompts(vocab=load.vocab, seed=next(seeds)),  # nobody's prefix is cached
            pace=LoopMode(concurrency=streams, duration=_MOST_SECONDS),
        )

    seeds, most = count(), max(load.requests)
    run_here(load_of(most, most, _WARM_UP_TOKENS))  # whose steps compile kernels
    for streams, requests in load.requests.items():
        wanted = load_of(streams, requests, load.new)
        outcomes = run(wanted, _GENERATORS) if streams > 1 else [run_here(wanted)]
        records = [record for outcome in outcomes for record in outcome.records]
        figures = compute_figures(records)
        if figures.errors:
            status, failed = next(iter(figures.errors.items()))
            raise Unavailable(f"{failed} of {len(records)} requests failed: {status}")
        rate = figures.per_second(figures.output_tokens)
        share = None if rates is None else rate / rates.tokens_per_second(load, streams)
        plural = "s" if frontends > 1 else ""
        title = f"{name} served, {streams} x {load.prompt:,} + {load.new:,}, {frontends} frontend{plural}"
        gaps = f"ITL p50, p99, max {_milliseconds(figures.itl, ('p50', 'p99', 'max'))} ms"
        first = f"TTFT p50, p90 {_milliseconds(figures.ttft, ('p50', 'p90'))} ms"
        yield Figure(title, rate, "tokens/s", share, "what its steps alone give", more=f"{gaps}, {first}")


def _milliseconds(spread: Spread | None, names: Sequence[str]) -> str:
    if spread is None:
        return "?"
    values = (1e3 * getattr(spread, name) for name in names)
    return ", ".join(f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values)
