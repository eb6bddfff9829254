"""Measures the steps of an engine on this machine: the real step loop turns in this process, over requests and chunks
of prompts that are drawn so that every kind of step comes about, in the shapes that a server computes.

Knows nothing of text, frontends or files.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from math import exp, inf, log
from random import Random
from statistics import median
from time import perf_counter
from typing import NamedTuple

import msgspec
import numpy as np

from ...core.errors import InvalidArgument
from ...engine.config import EngineConfig
from ...engine.core.cache_sizes import resolve_cache_sizes
from ...engine.core.messages import AddRequest, FromCore, RequestRejected, RequestUpdates, Shutdown
from ...engine.core.process import build_executor, resolve_max_model_len, scheduler_config
from ...engine.core.step_loop import EngineCore
from ...engine.core.warm_up import warm_up
from ...engine.worker.executor import Capacity, Executor
from ...kvcache.manager import KVCacheManager
from ...scheduler.config import SchedulerConfig
from ...scheduler.plan import StepPlan, StepResult, StepUpdates, StepWork
from ...scheduler.prefill_budget import PrefillBudget, PrefillLane, StepDemand, StepPace
from ...scheduler.scheduler import Scheduler
from ...scheduler.sequence import SequenceSpec
from .simulated_machine import StepLoad, StepLoadReader
from .simulation import EngineShape
from .step_fit import LEAST_STEPS, StepSample

LONGEST = 2048
"""Tokens of the longest sequence that is measured; what longer ones take follows."""

_NEW = (16, 40)
"""New tokens of a request, at least and at most."""

_FIRST_TOKENS, _SHORTEST = 512, 8
"""Prompt tokens of the first episode, before it is known how fast the engine is; and of the shortest prompt."""

_EPISODES = 28
"""So many are to find room in the time there is: several of each number of rows."""

Tell = Callable[[float, str], None]
"""Told the share of the time that is over, and what is measured."""


class EngineMeasurement(NamedTuple):
    """The steps of an engine, its sizes as a server would have them, the bytes of a cache block and of the recurrent
    states of a sequence, and the seconds that the step loop counts to a step and `samples` do not. `gpu`: what computed
    them, if it was one."""

    samples: list[StepSample]
    shape: EngineShape
    block_bytes: int
    state_bytes: int
    overhead: float
    gpu: str = ""


class ChunkRule:
    """How much of prompts a step takes. `gathering`: all it can, so that many rows decode soon; otherwise every other
    step only decodes, and the others take up to a number of tokens that is drawn, small ones as often as large ones."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.gathering = False

    def only_decodes(self) -> bool:
        return not self.gathering and self._random.random() < 0.5

    def tokens(self, most: int) -> int:
        return most if self.gathering else round(exp(self._random.uniform(0, log(most))))


class _ChunkPace(StepPace):
    """A lane of so many tokens, whatever they take."""

    chunk: int

    def short_prompt_lane(self, tokens: int) -> PrefillLane:
        return PrefillLane(self.model, min(tokens, self.chunk), inf)


class DrawnChunks(PrefillBudget):
    """A policy under which every kind of step comes about."""

    def __init__(self, config: SchedulerConfig, rule: ChunkRule) -> None:
        super().__init__(config)
        self._rule = rule
        self._most = config.max_num_batched_tokens

    def is_long_prompt(self, tokens: int, context: int, calm: bool = False) -> bool:
        return False

    def is_decode_probe(self, decoding: StepWork) -> bool:
        return bool(decoding.decode_tokens) and self._rule.only_decodes()

    def pace(self, demand: StepDemand) -> StepPace:
        pace = _ChunkPace(self.times.model, demand._replace(mixed=False))
        pace.chunk = self._rule.tokens(self._most)
        return pace


class RecordedScheduler(Scheduler):
    """A scheduler that notes what each step computed and how long it took."""

    def __init__(self, config: SchedulerConfig, cache: KVCacheManager, rule: ChunkRule) -> None:
        super().__init__(config, cache, lambda config: DrawnChunks(config, rule))
        self.samples: list[StepSample] = []
        self._loads = StepLoadReader()
        self._flying = deque[StepLoad]()
        self._busy = False
        self._brought = 0

    def schedule(self) -> StepPlan | None:
        if (plan := super().schedule()) is not None:
            self._flying.append(self._loads.read(plan))
        return plan

    def apply(self, result: StepResult, seconds: float | None = None, host_seconds: float = 0.0) -> StepUpdates:
        load = self._flying.popleft()
        between = host_seconds if self._busy else None
        if seconds:
            self.samples.append(StepSample(load, seconds, between, self._brought))
        updates = super().apply(result, seconds, host_seconds)
        self._busy = self.has_work
        self._brought = len(updates.keys)
        return updates


class _Episode(NamedTuple):
    """Requests that are there at once: tokens of each one's prompt, and new ones."""

    requests: list[tuple[int, int]]
    gathering: bool


def measure_engine(config: EngineConfig, seconds: float, tell: Tell, seed: int = 0) -> EngineMeasurement:
    """Load an engine and measure its steps for so many seconds from then on, or until there are enough of them.

    Raises:
        CharoniaError: it cannot be loaded.
        InvalidArgument: there would be several replicas; or it drafts: how many tokens a step brings then depends on
            the text.
    """
    if config.data_parallel_size > 1:
        message = "one replica is measured: leave this out, and give the threads that each will have"
        raise InvalidArgument(f"data_parallel_size: {message}", field="data_parallel_size")
    if config.speculation is not None:
        message = "steps that verify drafts are not measured: what they bring depends on the text"
        raise InvalidArgument(message, field="speculative_config")
    tell(0.0, "loading")
    with _loaded(config) as (executor, capacity):
        length = resolve_max_model_len(config.max_model_len, capacity)
        sizes = resolve_cache_sizes(config, capacity, length)
        shape = EngineShape(
            scheduler=scheduler_config(config, length, capacity.ahead),
            blocks=sizes.blocks,
            snapshots=sizes.snapshots,
            host_blocks=sizes.host_blocks,
            host_snapshots=sizes.host_snapshots,
            groups=capacity.groups,
            block_size=config.cache.block_size,
            prefix_caching=sizes.prefix_caching,
            max_queued_requests=config.max_queued_requests,
            max_queued_tokens=config.max_queued_tokens,
        )
        executor.allocate(shape.blocks, shape.host_blocks, shape.snapshots, shape.host_snapshots)
        if config.warm_up_graphs:
            executor.capture_usual_steps(lambda phase, fraction: None)
        run = _EngineRun(executor, capacity.vocab_size, shape, Random(seed))
        samples = run.measure(seconds, tell)
    overhead = max(0.0, median(run.overheads))
    gpu = capacity.machine if capacity.on_gpu else ""
    return EngineMeasurement(samples, shape, capacity.block_bytes, capacity.state_bytes, overhead, gpu)


@contextmanager
def _loaded(config: EngineConfig) -> Iterator[tuple[Executor, Capacity]]:
    executor = build_executor(config)
    try:
        yield executor, executor.load(lambda phase, fraction: None)
    finally:
        executor.close()


class _EngineRun:
    """An engine whose cache is allocated, and the requests that it is given. `overheads`: seconds that the step loop
    counts to each step, beyond the step's own."""

    def __init__(self, executor: Executor, vocab_size: int, shape: EngineShape, random: Random) -> None:
        self._executor = executor
        self._vocab_size = vocab_size
        self._shape = shape
        self._random = random
        self._cache = shape.make_cache()
        self._rule = ChunkRule(random)
        self._scheduler = RecordedScheduler(shape.scheduler, self._cache, self._rule)
        self._last_key = 0
        self.overheads: list[float] = []

    def measure(self, seconds: float, tell: Tell) -> list[StepSample]:
        warm_up(EngineCore(self._scheduler, self._cache, self._executor))
        samples = self._scheduler.samples
        samples.clear()
        began = perf_counter()
        tokens = _FIRST_TOKENS
        most = min(self._shape.scheduler.max_num_seqs, self._shape.blocks // self._shape.groups.total)
        counts = [1 << power for power in range(most.bit_length())]
        # The largest loads first: a time that ends early has seen both ends.
        for number, rows in enumerate(cycle([*counts[::-2], *counts[-2::-2][::-1]])):
            spent = perf_counter() - began
            if self._is_over(began + seconds):
                return samples
            tell(spent / seconds, f"{rows} sequence{'s' if rows > 1 else ''} at a time, {len(samples)} steps so far")
            self._run(self._draw_episode(rows, tokens, number // len(counts) % 2 == 0), began + seconds)
            computed = sum(sample.load.rows for sample in samples)
            tokens = max(round(computed / (perf_counter() - began) * seconds / _EPISODES), _FIRST_TOKENS // 2)
        raise AssertionError("a cycle ended")

    def _is_over(self, deadline: float) -> bool:
        """Whether the time is; where steps are slow, it goes on until there are enough of them."""
        return perf_counter() > deadline and len(self._scheduler.samples) >= 2 * LEAST_STEPS

    def _draw_episode(self, rows: int, tokens: int, gathering: bool) -> _Episode:
        """Prompts of about so many tokens in all, which the cache has room for."""
        longest = min(self._shape.scheduler.max_model_len, LONGEST) - 1
        room = self._shape.blocks // self._shape.groups.total * self._shape.block_size // rows
        mean = min(max(tokens // rows, _SHORTEST), room // 2, longest)
        steps = tokens // self._shape.scheduler.max_num_batched_tokens if gathering else 0
        requests = []
        for _ in range(rows):
            prompt = max(1, min(round(mean * exp(self._random.uniform(-1, 0.7))), longest - 2))
            new = self._random.randint(*_NEW) + steps
            requests.append((prompt, max(1, min(new, longest - prompt, room - prompt))))
        return _Episode(requests, gathering)

    def _run(self, episode: _Episode, deadline: float) -> None:
        """Run the requests to their ends, or until the deadline; the engine serves no more after that."""
        self._rule.gathering = episode.gathering
        core = EngineCore(self._scheduler, self._cache, self._executor)
        encode = msgspec.msgpack.Encoder().encode
        left = len(episode.requests)

        def send(message: FromCore) -> None:
            nonlocal left
            encode(message)
            if isinstance(message, RequestRejected):
                raise message.error.error()
            if isinstance(message, RequestUpdates):
                left -= len(message.updates.finished)
                if message.stats.seconds and self._scheduler.samples:
                    self.overheads.append(message.stats.seconds - self._scheduler.samples[-1].seconds)
            if not left or self._is_over(deadline):
                core.inbox.accept(Shutdown())

        for prompt, new in episode.requests:
            self._last_key += 1
            ids = np.array([self._random.randrange(self._vocab_size) for _ in range(prompt)], np.int32)
            core.inbox.accept(AddRequest(SequenceSpec(key=self._last_key, prompt=ids, max_tokens=new)))
        core.run(send)
