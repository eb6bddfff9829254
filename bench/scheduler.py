"""The cost of the scheduler per step: `python -m charonia.bench.scheduler`. Runs no model and no executor.

Steady: every row decodes. Mixed: sequences end after 128 tokens on average, and each is followed by one with a prompt
of 256 tokens (half of it one of eight shared prefixes), computed beside the decoding rows. Prefix: the cost of a cached
prompt, hashed on arrival and looked up on admission.
"""

import platform
import time
from collections import deque
from dataclasses import dataclass
from itertools import count

import numpy as np
from cyclopts import App
from rich.table import Table

from ..kvcache.manager import KVCacheManager
from ..scheduler.config import SchedulerConfig
from ..scheduler.plan import IntArray, StepPlan, StepResult
from ..scheduler.scheduler import Scheduler
from ..scheduler.sequence import SequenceSpec
from .command import report_console

BARS = {256: 1.0, 1024: 4.0}
"""Milliseconds that the median of schedule + apply may take, by running sequences."""

PREFIX_BAR = 1.0
"""Microseconds that hashing and looking up may take, a prompt token."""

BLOCK_SIZE = 16
PROMPT = 256
MEAN_OUTPUT = 128
WARM_UP = 200

app = App(name="python -m charonia.bench.scheduler", help=__doc__)


@dataclass(frozen=True, slots=True)
class SchedulerCase:
    """`mixed`: sequences come and go. `steps`: how many are measured."""

    sequences: int
    mixed: bool
    ahead: int
    steps: int

    @property
    def longest(self) -> int:
        """Tokens a sequence may grow to without ending in a steady run."""
        return PROMPT + 2 * (WARM_UP + self.steps)

    @property
    def budget(self) -> int:
        """Room for the decoding rows and twice the prompts that arrive in a step."""
        return self.sequences + 2 * PROMPT * (1 + self.sequences // MEAN_OUTPUT)


class SchedulerLoad:
    """Keeps a scheduler busy with one case."""

    def __init__(self, case: SchedulerCase) -> None:
        config = SchedulerConfig(
            max_num_seqs=case.sequences,
            max_num_batched_tokens=case.budget,
            max_model_len=case.longest + 1,
            ahead=case.ahead,
        )
        self._case = case
        self._cache = KVCacheManager(case.sequences * (case.longest // BLOCK_SIZE + 2), BLOCK_SIZE)
        self._scheduler = Scheduler(config, self._cache)
        self._random = np.random.default_rng(0)
        self._beginnings = self._random.integers(0, 30_000, (8, PROMPT // 2), dtype=np.int32)
        self._keys = count()
        self._flights: deque[StepPlan] = deque()
        for _ in range(case.sequences):
            self._arrive()

    def _arrive(self) -> None:
        case, random = self._case, self._random
        own = random.integers(0, 30_000, PROMPT // 2, dtype=np.int32)
        prompt = np.concatenate([random.choice(self._beginnings), own])
        new = int(random.integers(1, 2 * MEAN_OUTPUT)) if case.mixed else case.longest - PROMPT
        hashes = self._cache.digest(prompt)
        self._scheduler.add(SequenceSpec(key=next(self._keys), prompt=prompt, max_tokens=new, hashes=hashes))

    def fill(self) -> None:
        """Run steps until every row is taken and no request waits, then some more."""
        while self._scheduler.waiting:
            self.step()
        for _ in range(WARM_UP):
            self.step()

    def step(self) -> float:
        """Seconds of one schedule and one apply; arrivals are outside, as they are outside the step."""
        begin = time.perf_counter()
        plan = self._scheduler.schedule()
        seconds = time.perf_counter() - begin
        if plan is not None:
            self._flights.append(plan)
        if len(self._flights) > self._case.ahead:
            seconds += self._apply(self._flights.popleft())
        return seconds

    def _apply(self, plan: StepPlan) -> float:
        """The step is said to have been a fast one: no chunk is smaller than the budget allows."""
        result, took = sampled(plan), 1e-3 + 1e-6 * plan.tokens
        begin = time.perf_counter()
        updates = self._scheduler.apply(result, took)
        seconds = time.perf_counter() - begin
        for _ in updates.finished:
            self._arrive()
        return seconds


def sampled(plan: StepPlan) -> StepResult:
    """One token for each row that samples."""
    rows = plan.rows[plan.samples]
    offsets = (plan.starts + plan.counts)[plan.samples]
    return StepResult(plan.step, rows, offsets, np.ones(len(rows), np.int32), offsets)


def measure(case: SchedulerCase) -> tuple[float, float]:
    """Median and 99th percentile of schedule + apply, in milliseconds."""
    load = SchedulerLoad(case)
    load.fill()
    seconds = [load.step() for _ in range(case.steps)]
    median, slow = np.percentile(seconds, (50, 99))
    return float(median) * 1e3, float(slow) * 1e3


def measure_prefix(tokens: int, rounds: int) -> tuple[float, float]:
    """Microseconds a prompt token, hashing it and finding it cached."""
    cache = KVCacheManager(2 * tokens // BLOCK_SIZE, BLOCK_SIZE)
    prompt = np.random.default_rng(0).integers(0, 150_000, tokens, dtype=np.int32)
    table = cache.open(hashes := cache.digest(prompt), tokens)
    cache.extend(table, tokens)
    cache.commit(table, hashes)
    cache.close(table)
    hashing, finding = zip(*(_prefix_once(cache, prompt) for _ in range(rounds)), strict=True)
    return float(np.median(hashing)) * 1e6 / tokens, float(np.median(finding)) * 1e6 / tokens


def _prefix_once(cache: KVCacheManager, prompt: IntArray) -> tuple[float, float]:
    tokens, begin = len(prompt), time.perf_counter()
    hashes = cache.digest(prompt)
    hashed = time.perf_counter()
    cache.shareable(hashes, tokens)  # when it lines up
    cache.awaits(hashes, tokens)  # and the rest when it is admitted
    table = cache.open(hashes, tokens)
    looked_up = time.perf_counter()
    assert table.cached >= tokens - BLOCK_SIZE
    cache.close(table)
    return hashed - begin, looked_up - hashed


@app.default
def main(steps: int = 1000, ahead: tuple[int, ...] = (0, 1)) -> None:
    """Print a table; exit with 1 if a median is over its bar."""
    console = report_console()
    table = Table("sequences", "load", "ahead", "median ms", "p99 ms", "bar ms", title=platform.processor() or None)
    missed = False
    for sequences in (32, 256, 1024):
        for mixed in (False, True):
            for plans in ahead:
                median, slow = measure(SchedulerCase(sequences, mixed, plans, steps))
                bar = BARS.get(sequences)
                missed |= bar is not None and median > bar
                load = "mixed" if mixed else "steady"
                figures = f"{median:.3f}", f"{slow:.3f}", "" if bar is None else f"{bar:.0f}"
                table.add_row(str(sequences), load, str(plans), *figures)
    console.print(table)
    for tokens in (256, 1024, 32_768):
        hashing, finding = measure_prefix(tokens, max(steps // 10, 5))
        missed |= hashing + finding > PREFIX_BAR
        console.print(
            f"{tokens} cached tokens: hashing {hashing:.3f} us and lookup {finding:.3f} us a token (bar {PREFIX_BAR:g})"
        )
    raise SystemExit(missed)


if __name__ == "__main__":
    app()
