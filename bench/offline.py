"""Engine throughput without doors, beside the same work through transformers.generate: A B A B in one run.

    python -m charonia.bench.offline [--checkpoint DIR] [--sequences 1 8 32] [--repeats 2] [--json FILE]

Without a checkpoint, one of Qwen2.5-0.5B's shape with random weights is written to a scratch folder first. Prompts
are distinct, eos is ignored, and the machine's read bandwidth and GEMM peak are measured in the same run: the
figures of a shared machine mean little without them.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from ..engine.config import CacheConfig, EngineConfig
from ..engine.executor.inline import InlineExecutor
from ..engine.host import usable_cores
from ..kvcache.manager import KVCacheManager
from ..scheduler.config import SchedulerConfig
from ..scheduler.scheduler import Scheduler
from ..scheduler.sequence import SequenceRequest
from .checkpoint import QWEN2_HALF_BILLION, write_random
from .loop import run

BLOCK = 16
Prompts = NDArray[np.int32]


class Work(NamedTuple):
    """`prompt` and `new` tokens for each sequence, `chunk` tokens a step at most, computed in `dtype` on `device`."""

    prompt: int
    new: int
    chunk: int
    dtype: str
    device: str


class Machine(NamedTuple):
    """Limits measured in this run: GB/s read by torch.sum over 0.5 GB, GFLOP/s of the best GEMM in `dtype`."""

    read_gb_s: float
    gemm_gflop_s: float
    threads: int


@dataclass(frozen=True, slots=True)
class Figure:
    """Output tokens per second, end to end, of every repetition."""

    sequences: int
    charonia: list[float]
    transformers: list[float]

    @property
    def ratio(self) -> float:
        return median(self.charonia) / median(self.transformers)


class Contender(Protocol):
    def generate(self, prompts: Prompts) -> int:
        """Continue all prompts [sequences, tokens], submitted at once; returns how many tokens came."""


class Engine:
    """Scheduler and executor in a loop of the bench's own."""

    def __init__(self, checkpoint: Path, work: Work, sequences: int) -> None:
        self._work, length = work, work.prompt + work.new
        config = EngineConfig(
            model=str(checkpoint),
            dtype=work.dtype,
            device=work.device,
            max_model_len=length,
            cache=CacheConfig(block_size=BLOCK),
        )
        self._executor = InlineExecutor(config)
        self.vocab = self._executor.load(lambda phase, fraction: None).vocab_size
        blocks = sequences * -(-length // BLOCK)
        self._executor.allocate(blocks)
        rule = SchedulerConfig(max_num_seqs=sequences, max_num_batched_tokens=work.chunk, max_model_len=length, ahead=1)
        self._scheduler = Scheduler(rule, KVCacheManager(blocks, BLOCK, prefix_caching=False))

    def generate(self, prompts: Prompts) -> int:
        requests = [
            SequenceRequest(key=key, prompt=prompt, max_tokens=self._work.new) for key, prompt in enumerate(prompts)
        ]
        return run(self._scheduler, self._executor, requests).generated

    def close(self) -> None:
        self._executor.close()


class Transformers:
    """transformers.generate on a static batch: its best case, for all prompts are equally long."""

    def __init__(self, checkpoint: Path, work: Work) -> None:
        from transformers import AutoModelForCausalLM

        self._work = work
        model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, work.dtype))
        self._model = model.to(work.device)

    def generate(self, prompts: Prompts) -> int:
        ids, new = torch.from_numpy(prompts).long().to(self._work.device), self._work.new
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        with torch.inference_mode():
            out = self._model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return int(out.shape[0] * (out.shape[1] - ids.shape[1]))


def measure(
    checkpoint: Path, work: Work, sequences: list[int], repeats: int, log: Callable[[str], None]
) -> list[Figure]:
    """One figure for each number of sequences; the two take turns, after a short run each to warm up."""
    ours, theirs = Engine(checkpoint, work, max(sequences)), Transformers(checkpoint, work)
    try:
        warm = _prompts(1, work.prompt, ours.vocab, seed=0)
        for contender in (ours, theirs):
            contender.generate(warm)
        return [_compare(ours, theirs, count, work, repeats, log) for count in sequences]
    finally:
        ours.close()


def _compare(
    ours: Engine, theirs: Transformers, count: int, work: Work, repeats: int, log: Callable[[str], None]
) -> Figure:
    figure = Figure(count, [], [])
    for turn in range(repeats):
        prompts = _prompts(count, work.prompt, ours.vocab, seed=turn + 1)
        figure.charonia.append(_speed(ours, prompts))
        figure.transformers.append(_speed(theirs, prompts))
        log(f"{count} sequences: {figure.charonia[-1]:.1f} and {figure.transformers[-1]:.1f} tokens/s")
    return figure


def _speed(contender: Contender, prompts: Prompts) -> float:
    begun = perf_counter()
    tokens = contender.generate(prompts)
    return tokens / (perf_counter() - begun)


def _prompts(sequences: int, tokens: int, vocab: int, seed: int) -> Prompts:
    return np.random.default_rng(seed).integers(0, vocab, (sequences, tokens), dtype=np.int32)


def machine(work: Work) -> Machine:
    """The best of several short tries: what the machine can do when its neighbours let it."""
    torch.set_num_threads(usable_cores())
    side = 2048 if work.device == "cpu" else 8192
    big = torch.ones(1 << 27, device=work.device)
    left, right = (torch.randn(side, side).to(work.device, getattr(torch, work.dtype)) for _ in "lr")
    # Asking for a number waits for the device.
    read = _best(lambda: big.sum().item(), 8)
    gemm = _best(lambda: (left @ right)[0, 0].item(), 12)
    return Machine(big.nbytes / read / 1e9, 2 * side**3 / gemm / 1e9, torch.get_num_threads())


@contextmanager
def at_hand(checkpoint: Path | None, console: Console) -> Iterator[Path]:
    """The checkpoint, or one with random weights that is gone afterwards."""
    if checkpoint:
        yield checkpoint
        return
    with tempfile.TemporaryDirectory() as scratch:
        console.print("writing a checkpoint with random weights ...")
        write_random(Path(scratch), QWEN2_HALF_BILLION)
        yield Path(scratch)


def _best(action: Callable[[], object], tries: int) -> float:
    """Seconds of the fastest try."""

    def once() -> float:
        begun = perf_counter()
        action()
        return perf_counter() - begun

    return min(once() for _ in range(tries))


def show(console: Console, work: Work, limits: Machine, figures: list[Figure]) -> None:
    table = Table(title=f"{work.prompt} prompt + {work.new} new tokens, {work.dtype}, output tokens/s (medians)")
    for column in ("sequences", "charonia", "transformers", "ratio"):
        table.add_column(column, justify="right")
    for figure in figures:
        table.add_row(
            str(figure.sequences),
            f"{median(figure.charonia):.1f}",
            f"{median(figure.transformers):.1f}",
            f"{figure.ratio:.2f}",
        )
    console.print(table)
    console.print(
        f"machine: {limits.threads} threads, {limits.read_gb_s:.1f} GB/s read, {limits.gemm_gflop_s:.0f} GFLOP/s GEMM"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m charonia.bench.offline", description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, help="directory; default: random weights of Qwen2.5-0.5B's shape")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32], help="submitted at once")
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens of each sequence")
    parser.add_argument("--new", type=int, default=64, help="new tokens of each sequence")
    parser.add_argument("--chunk", type=int, default=512, help="most tokens in a step")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--device", default="cpu", help="cpu or cuda, for both contenders")
    parser.add_argument("--repeats", type=int, default=2, help="turns of each contender")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    return parser.parse_args()


def main() -> None:
    asked, console = _arguments(), Console()
    work = Work(asked.prompt, asked.new, asked.chunk, asked.dtype, asked.device)
    limits = machine(work)
    with at_hand(asked.checkpoint, console) as checkpoint:
        figures = measure(checkpoint, work, asked.sequences, asked.repeats, console.print)
    show(console, work, limits, figures)
    if asked.json:
        rows = [asdict(figure) | {"ratio": figure.ratio} for figure in figures]
        asked.json.write_text(json.dumps({"work": work._asdict(), "machine": limits._asdict(), "figures": rows}))


if __name__ == "__main__":
    main()
