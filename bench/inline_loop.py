"""The engine without a server: a loop that drives scheduler and executor as the engine core does, without processes or
messages, and the contender `charonia` of comparisons, which runs in it."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import perf_counter
from typing import TypeAlias

import msgspec
import numpy as np
import torch

from .. import __version__
from ..core.logprobs import Logprobs, RankedLogprobs
from ..engine.config import CacheConfig, EngineConfig
from ..engine.cpu import library
from ..engine.worker.executor import Executor, StepFuture
from ..engine.worker.inline_executor import InlineExecutor
from ..kvcache.manager import KVCacheManager
from ..scheduler.config import SchedulerConfig
from ..scheduler.plan import StepPlan, StepUpdates
from ..scheduler.scheduler import Scheduler
from ..scheduler.sequence import SequenceSpec
from .peer_runner import PeerSetup

Observe: TypeAlias = Callable[[StepPlan], None]


@dataclass
class LoopResult:
    """The result of a run by sequence key: new tokens, cached prompt tokens, finish reason, and log-probabilities of
    new and prompt tokens where they were asked for."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    finished: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[Logprobs]] = field(default_factory=dict)
    scores: dict[int, list[RankedLogprobs]] = field(default_factory=dict)
    steps: int = 0
    most_in_flight: int = 0
    seconds: float = 0.0

    @property
    def generated(self) -> int:
        return sum(len(tokens) for tokens in self.tokens.values())

    def add(self, updates: StepUpdates) -> None:
        self.cached.update(updates.started)
        self.finished.update(updates.finished)
        stream = iter(updates.tokens)
        for key, count in zip(updates.keys, updates.counts, strict=True):
            self.tokens.setdefault(key, []).extend(next(stream) for _ in range(count))
        self._add_logprobs(updates)
        for key, scores in updates.prompt_logprobs:
            self.scores.setdefault(key, []).extend(scores.to_list())

    def _add_logprobs(self, updates: StepUpdates) -> None:
        owners = [key for key, count in zip(updates.keys, updates.counts, strict=True) for _ in range(count)]
        for key, logprobs in zip(owners, updates.logprobs, strict=False):
            if logprobs is not None:
                self.logprobs.setdefault(key, []).append(logprobs)


def run_to_end(
    scheduler: Scheduler,
    executor: Executor,
    requests: Iterable[SequenceSpec],
    *,
    observe: Observe = lambda plan: None,
) -> LoopResult:
    """Run the requests, all submitted at once, to their ends. `observe` sees every plan."""
    outcome = LoopResult()
    flying = deque[StepFuture]()
    begun = perf_counter()
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work:
        while plan := scheduler.schedule():
            observe(plan)
            flying.append(executor.execute(plan))
        outcome.steps += 1
        outcome.most_in_flight = max(outcome.most_in_flight, len(flying))
        outcome.add(scheduler.apply(flying.popleft().result()))
    outcome.seconds = perf_counter() - begun
    return outcome


BLOCK = 16
PRECISIONS: dict[str, dict[str, str]] = {
    "bf16": {"dtype": "bfloat16"},
    "fp16": {"dtype": "float16"},
    "fp32": {"dtype": "float32"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}


class Peer:
    def __init__(self, setup: PeerSetup) -> None:
        kernels = f", {library.describe()}" if setup.device == "cpu" else ""
        self.about = f"charonia {__version__}{kernels}, torch {torch.__version__}"
        self.executor = InlineExecutor(_config(setup))
        self.executor.load(lambda phase, fraction: None)
        blocks = setup.sequences * -(-setup.length // BLOCK)
        self.executor.allocate(blocks)
        rule = SchedulerConfig(
            max_num_seqs=setup.sequences, max_num_batched_tokens=setup.chunk, max_model_len=setup.length, ahead=1
        )
        self._scheduler = Scheduler(rule, KVCacheManager(blocks, BLOCK, prefix_caching=False))

    def generate(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        requests = [
            SequenceSpec(key=key, prompt=np.array(prompt, np.int32), max_tokens=new)
            for key, prompt in enumerate(prompts)
        ]
        made = run_to_end(self._scheduler, self.executor, requests).tokens
        return [made[key] for key in range(len(prompts))]


def _config(setup: PeerSetup) -> EngineConfig:
    plain = EngineConfig(
        model=setup.checkpoint,
        device=setup.device,
        threads=setup.threads,
        max_model_len=setup.length,
        cache=CacheConfig(block_size=BLOCK),
    )
    return msgspec.structs.replace(plain, **PRECISIONS[setup.precision])
