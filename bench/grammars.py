"""What streams under a schema cost, themselves and the free streams beside them: arms in turns, and medians.

    python -m charonia.bench.grammars --scratch DIR
    python -m charonia.bench.grammars --scratch DIR --quick

One engine core in this process, without sockets. All streams get equally many tokens: free ones ignore ends, and the
schema is one of a list that is longer than they are. `half` is half of the streams under it, `all` all of them; `one by
one` the same, but with every token sampled, also those that have to come. A machine that others use shows their noise:
the arms take turns, and each figure is a median of its turns.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
from cyclopts import App, Parameter
from rich.table import Table

from ..core.request import GuidedDecoding
from ..core.resolved_sampling import ResolvedSampling
from ..engine.config import CacheConfig, EngineConfig
from ..engine.core.grammar_pool import GrammarPool
from ..engine.core.messages import AddRequest, FromCore, RequestRejected, RequestUpdates, Shutdown
from ..engine.core.step_loop import EngineCore
from ..engine.grammars.llguidance_backend import LLGuidanceBackend
from ..engine.grammars.vocabulary import read_vocabulary
from ..engine.worker.inline_executor import InlineExecutor
from ..kvcache.manager import KVCacheManager
from ..scheduler.config import SchedulerConfig
from ..scheduler.scheduler import Scheduler
from ..scheduler.sequence import SequenceSpec
from .checkpoint import ShapeName, prepare_checkpoint
from .command import Count, exit_on_error, log_to, report_console, run_command
from .trial import ratio_of, take_turns

Arm: TypeAlias = Literal["free", "half", "half, one by one", "all", "all, one by one"]
ARMS: tuple[Arm, ...] = ("free", "half", "half, one by one", "all", "all, one by one")

_BLOCK = 16
_RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["person", "company", "place"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
        "active": {"type": "boolean"},
    },
    "required": ["name", "age", "kind", "tags", "active"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": _RECORD, "minItems": 500}

app = App(name="python -m charonia.bench.grammars", help=__doc__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarWork:
    """The work of an arm."""

    streams: Count = 32
    """At once; in some arms half of them are under the schema."""
    prompt: Count = 32
    """Prompt tokens of each."""
    new: Count = 128
    """New tokens of each."""
    repeats: Count = 5
    """Turns of each arm."""
    precision: Literal["int8", "none"] = "int8"
    """What weights are kept as."""
    temperature: float = 1.0
    """Of all streams; 0 is greedy."""


class ArmRun(NamedTuple):
    """One turn of an arm: tokens a second of all streams, the median of the steps that had every free stream (of all
    steps where none is free), the share of the guided streams' tokens that was not sampled, and seconds of the step
    loop for one mask."""

    speed: float
    free_step: float
    forced: float
    mask: float


@dataclass(slots=True)
class ArmProgress:
    """The messages of a core while an arm runs, and the time of each."""

    streams: set[int]
    stop: Callable[[], None]
    steps: list[tuple[float, RequestUpdates]] = field(default_factory=list)

    def send(self, message: FromCore) -> None:
        if isinstance(message, RequestRejected):
            raise message.error.error()
        if isinstance(message, RequestUpdates):
            self.steps.append((time.perf_counter(), message))
            self.streams -= {key for key, _ in message.updates.finished}
            if not self.streams:
                self.streams = {-1}
                self.stop()


class GrammarBench:
    """A loaded engine core, with a grammar compiled."""

    def __init__(self, checkpoint: Path, work: GrammarWork) -> None:
        length = work.prompt + work.new
        blocks = work.streams * -(-length // _BLOCK)
        cache = CacheConfig(block_size=_BLOCK, blocks=blocks, prefix_caching=False)
        config = EngineConfig(model=str(checkpoint), quantization=work.precision, device="cpu", cache=cache)
        self._work, self.executor = work, InlineExecutor(config)
        capacity = self.executor.load(lambda *_: None)
        self.executor.allocate(blocks)
        self._vocab_size, self._blocks = capacity.vocab_size, blocks
        self._limits = SchedulerConfig(max_num_seqs=work.streams, max_model_len=length, target_itl_ms=0)
        began = time.perf_counter()
        vocabulary = read_vocabulary(str(checkpoint), "", capacity.vocab_size)
        self.vocabulary_seconds = time.perf_counter() - began
        self.constraint = GuidedDecoding("json_schema", json.dumps(SCHEMA))
        self.pool, self._one_by_one = (
            GrammarPool(partial(LLGuidanceBackend, vocabulary, jumps=jumps)) for jumps in (True, False)
        )
        self.pool.prepare()
        began = time.perf_counter()
        wait([self.pool.compile(self.constraint)])
        self.compile_seconds = time.perf_counter() - began
        wait([self._one_by_one.compile(self.constraint)])

    def run(self, arm: Arm, seed: int) -> ArmRun:
        """All streams of an arm, submitted at once."""
        cache = KVCacheManager(self._blocks, _BLOCK, prefix_caching=False)
        scheduler = Scheduler(self._limits, cache)
        pool = self._one_by_one if arm.endswith("one by one") else self.pool
        core = EngineCore(scheduler, cache, self.executor, grammars=pool, vocab_size=self._vocab_size)
        self.executor.allocate(self._blocks)
        progress = ArmProgress(set(range(self._work.streams)), partial(core.inbox.accept, Shutdown()))
        for request in self._requests(arm, seed):
            core.inbox.accept(request)
        core.run(progress.send)
        return self._measured(arm, progress)

    def first_masks(self, times: int) -> list[float]:
        """Processor seconds of a new sequence's matcher and first mask, the schema being cached."""
        grammar = self.pool.compile(self.constraint).result()
        mask = np.zeros(-(-self._vocab_size // 32), np.int32)
        seconds: list[float] = []
        for _ in range(times):
            began = time.thread_time()
            grammar.matcher().fill_mask(mask)
            seconds.append(time.thread_time() - began)
        return seconds

    def close(self) -> None:
        self.pool.close()
        self._one_by_one.close()
        self.executor.close()

    def _requests(self, arm: Arm, seed: int) -> Iterator[AddRequest]:
        work = self._work
        drawn = np.random.default_rng(seed).integers(0, self._vocab_size, (work.streams, work.prompt), np.int32)
        for key, prompt in enumerate(drawn):
            guided = _is_constrained(arm, key)
            sampling = ResolvedSampling(temperature=work.temperature, seed=seed, choice=key)
            spec = SequenceSpec(key=key, prompt=prompt, max_tokens=work.new, sampling=sampling)
            yield AddRequest(spec, self.constraint if guided else None)

    def _measured(self, arm: Arm, progress: ArmProgress) -> ArmRun:
        work, steps = self._work, progress.steps
        free = {key for key in range(work.streams) if not _is_constrained(arm, key)}
        decoding = [
            now - before for (before, _), (now, message) in pairwise(steps) if free <= set(message.updates.keys)
        ]
        began = steps[0][0] - steps[0][1].stats.seconds
        totals = steps[-1][1].totals
        guided_tokens = (work.streams - len(free)) * work.new
        return ArmRun(
            work.streams * work.new / (steps[-1][0] - began),
            median(decoding),
            totals.forced_tokens / guided_tokens if guided_tokens else 0.0,
            totals.mask_seconds / totals.masks if totals.masks else 0.0,
        )


def _is_constrained(arm: Arm, stream: int) -> bool:
    return arm != "free" and (stream % 2 == 1 or arm.startswith("all"))


def _table(runs: Mapping[str, list[ArmRun]], work: GrammarWork) -> Table:
    table = Table(
        "arm", "tokens/s", "of free", "step of free streams ms", "of free", "not sampled", "a mask us",
        title=f"{work.streams} streams of {work.new} tokens, {work.precision}, medians of {work.repeats}",
    )  # fmt: skip
    for arm, turns in runs.items():
        mine = ArmRun(*map(median, zip(*turns, strict=True)))
        speeds = ratio_of(turns, runs["free"], lambda run: run.speed)
        steps = ratio_of(turns, runs["free"], lambda run: run.free_step)
        table.add_row(
            arm, f"{mine.speed:.1f}", f"{speeds:.1%}", f"{mine.free_step * 1e3:.2f}", f"{steps:.1%}",
            f"{mine.forced:.1%}", f"{mine.mask * 1e6:.0f}" if mine.mask else "",
        )  # fmt: skip
    return table


@app.default
def main(
    *,
    checkpoint: Path | None = None,
    shape: ShapeName = "qwen2.5-0.5b",
    scratch: Path | None = None,
    work: Annotated[GrammarWork, Parameter("*")] = GrammarWork(),
    quick: bool = False,
    json: Path | None = None,
) -> None:
    """Print the table.

    Parameters
    ----------
    checkpoint
        Directory of a checkpoint; by default random weights are made.
    shape
        Whose shape random weights have.
    scratch
        Keep made checkpoints here; by default they are made anew each time.
    quick
        Two short turns of each arm: to see that all of it works.
    json
        Write every turn to this file.
    """
    console = report_console()
    if quick:
        work = GrammarWork(streams=8, prompt=8, new=24, repeats=2, precision=work.precision)

    log = log_to(console)
    with (
        exit_on_error(),
        prepare_checkpoint(checkpoint, shape, scratch, log) as (source, _),
        closing(GrammarBench(source, work)) as bench,
    ):
        for arm in ARMS:
            bench.run(arm, seed=work.repeats)
        contenders: dict[str, Callable[[int], ArmRun]] = {arm: partial(bench.run, arm) for arm in ARMS}
        runs = take_turns(contenders, work.repeats, log, lambda run: f"{run.speed:.1f} tokens/s")
        masks = bench.first_masks(100)
    console.print(_table(runs, work))
    log(f"vocabulary read in {bench.vocabulary_seconds:.2f} s, schema compiled in {bench.compile_seconds:.3f} s")
    log(f"first mask of the cached schema: median {median(masks) * 1e6:.0f} us of CPU, worst {max(masks) * 1e6:.0f} us")
    if json:
        turns: Any = {arm: [turn._asdict() for turn in arm_runs] for arm, arm_runs in runs.items()}
        json.write_bytes(msgspec.json.encode({"turns": turns, "first_mask_seconds": masks}))


if __name__ == "__main__":
    run_command(app)
