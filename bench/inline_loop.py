"""A step loop without processes or messages: scheduler and executor as the engine core drives them, and no more."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import perf_counter
from typing import TypeAlias

from ..core.logprobs import Logprobs, RankedLogprobs
from ..engine.worker.executor import Executor, StepFuture
from ..scheduler.plan import StepPlan, StepUpdates
from ..scheduler.scheduler import Scheduler
from ..scheduler.sequence import SequenceRequest

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
    requests: Iterable[SequenceRequest],
    *,
    observe: Observe = lambda plan: None,
) -> LoopResult:
    """Run the requests, all submitted at once, to their ends. `observe` sees every plan."""
    outcome, flying, begun = LoopResult(), deque[StepFuture](), perf_counter()
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
