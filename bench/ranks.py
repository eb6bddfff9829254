"""The cost and the saving of ranks: `python -m charonia.bench.ranks CHECKPOINT [--tokens 1024]`.

Loads the checkpoint as one rank and over several, with the same cache in all, and prints each rank's own memory
(anonymous, above that of a process that has imported torch and nothing else), and the time of loading and of a decoding
step. Without a checkpoint it writes one of Qwen2.5-0.5B's shape.
"""

import multiprocessing
import re
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np
from cyclopts import App
from rich.progress import track
from rich.table import Table

from ..engine.config import CacheConfig, EngineConfig, ParallelConfig
from ..engine.core.process import scheduler_config
from ..engine.parallel.local_ranks import LocalRanks, RankLayout
from ..engine.parallel.ranks_executor import RanksExecutor
from ..kvcache.manager import KVCacheManager
from ..scheduler.config import SchedulerConfig
from ..scheduler.scheduler import Scheduler
from ..scheduler.sequence import SequenceRequest
from .checkpoint import write_shape
from .command import report_console
from .inline_loop import run_to_end

SPLITS = (ParallelConfig(), ParallelConfig(tensor=2), ParallelConfig(pipeline=2), ParallelConfig(tensor=2, pipeline=2))
BLOCK = 16
_PROMPT, _NEW = 16, 12
_ANONYMOUS = re.compile(r"^Anonymous:\s+(\d+) kB", re.MULTILINE)

app = App(name="python -m charonia.bench.ranks", help=__doc__)


class RankCost(NamedTuple):
    """The cost of one split: seconds to load, milliseconds of a decoding step, and of each rank the anonymous bytes,
    loaded and with its part of the cache written."""

    load: float
    step: float
    bytes: Sequence[int]


def anonymous(pid: int) -> int:
    """Bytes of memory that are the process's own and no file's."""
    found = _ANONYMOUS.search(Path(f"/proc/{pid}/smaps_rollup").read_text())
    return int(found[1]) * 1024 if found else 0


@contextmanager
def empty_process() -> Iterator[int]:
    """A process that has torch and nothing else."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_import_torch, args=(theirs,), daemon=True)
    process.start()
    with ours:
        ours.recv_bytes()
        yield process.pid or 0
    process.join()


def _import_torch(line: Connection) -> None:
    import torch

    torch.ones(8).sum()
    line.send_bytes(b"!")
    try:
        line.recv_bytes()
    except EOFError:
        return


def measure(checkpoint: str, parallel: ParallelConfig, tokens: int, sequences: int) -> RankCost:
    """Load over so many ranks, fill a cache of so many tokens, and let so many sequences decode."""
    started: list[LocalRanks] = []

    def start_ranks(config: EngineConfig, layout: RankLayout) -> LocalRanks:
        started.append(LocalRanks(config, layout))
        return started[-1]

    scheduler = SchedulerConfig(max_num_seqs=sequences)
    cache = CacheConfig(block_size=BLOCK, blocks=tokens // BLOCK)
    config = EngineConfig(model=checkpoint, device="cpu", parallel=parallel, cache=cache, scheduler=scheduler)
    with closing(RanksExecutor(config, start_ranks)) as executor:
        begun = time.perf_counter()
        executor.load(lambda phase, fraction: None)
        loaded = time.perf_counter() - begun
        executor.allocate(tokens // BLOCK)
        _generate(executor, config, tokens, fill=True)
        held = [anonymous(pid) for pid in started[0].pids]
        steps = [_generate(executor, config, tokens, fill=False) for _ in range(3)]
    return RankCost(loaded, statistics.median(steps) * 1e3, held)


def _generate(executor: RanksExecutor, config: EngineConfig, tokens: int, fill: bool) -> float:
    """Seconds of a step, most of which decode; or write every block of the cache."""
    cache = KVCacheManager(tokens // BLOCK, BLOCK, prefix_caching=False)
    sequences = config.scheduler.max_num_seqs
    prompt, new = (tokens // sequences - 1, 1) if fill else (_PROMPT, _NEW)
    scheduler = Scheduler(scheduler_config(config, prompt + new), cache)
    ids = np.random.default_rng(1).integers(1, 1000, prompt).astype(np.int32)
    requests = [SequenceRequest(key=key, prompt=ids, max_tokens=new) for key in range(sequences)]
    outcome = run_to_end(scheduler, executor, requests)
    return outcome.seconds / outcome.steps


@app.default
def main(checkpoint: str | None = None, /, *, tokens: int = 1024, sequences: int = 4) -> None:
    """Print one row for each split.

    Parameters
    ----------
    checkpoint
        What to load.
    tokens
        The cache, in tokens; the same for every split.
    sequences
        Sequences that decode together.
    """
    with ExitStack() as stack:
        if checkpoint is None:
            checkpoint = stack.enter_context(tempfile.TemporaryDirectory(prefix="charonia-bench-"))
            write_shape(Path(checkpoint))
        empty = anonymous(stack.enter_context(empty_process()))
        console = report_console()
        console.print(f"above an empty torch process of {empty / 2**20:.0f} MiB; {tokens} tokens of cache")
        table = Table("ranks", "load s", "anonymous MiB of a rank", "of one rank's", "ms a step")
        whole = 0
        for parallel in track(SPLITS, console=console):
            cost = measure(checkpoint, parallel, tokens, sequences)
            own = [held - empty for held in cost.bytes]
            whole = whole or own[0]
            table.add_row(
                f"tensor {parallel.tensor}, pipeline {parallel.pipeline}",
                f"{cost.load:.1f}",
                ", ".join(f"{each / 2**20:.0f}" for each in own),
                ", ".join(f"{each / whole:.0%}" for each in own),
                f"{cost.step:.1f}",
            )
        console.print(table)


if __name__ == "__main__":
    app()
