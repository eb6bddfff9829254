"""A step loop without processes or messages: scheduler and executor as the engine core drives them, and no more."""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from time import perf_counter
from typing import TypeAlias

from ..engine.executor.base import Executor
from ..scheduler.plan import StepPlan, StepResult, StepUpdates
from ..scheduler.scheduler import Scheduler
from ..scheduler.sequence import SequenceRequest

Observe: TypeAlias = Callable[[StepPlan], None]


@dataclass
class Outcome:
    """What a run brought, by sequence key: new tokens, prompt tokens out of the prefix cache, finish reason."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    finished: dict[int, str] = field(default_factory=dict)
    steps: int = 0
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


def run(
    scheduler: Scheduler,
    executor: Executor,
    requests: Iterable[SequenceRequest],
    *,
    ahead: int = 0,
    observe: Observe = lambda plan: None,
) -> Outcome:
    """Run the requests, all submitted at once, to their ends; up to `ahead` plans are scheduled beyond the oldest
    unapplied one. `observe` sees every plan."""
    outcome, flying = Outcome(), deque[Future[StepResult]]()
    waiting = {request.key for request in requests if scheduler.add(request) is None}
    begun = perf_counter()
    while len(outcome.finished) < len(waiting):
        while len(flying) <= ahead and (plan := scheduler.schedule()):
            observe(plan)
            flying.append(executor.execute(plan))
        outcome.steps += 1
        outcome.add(scheduler.apply(flying.popleft().result()))
    while flying:
        outcome.add(scheduler.apply(flying.popleft().result()))
    outcome.seconds = perf_counter() - begun
    return outcome
