"""Steps that are computed elsewhere, in order, until their results come or there will be none."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from ...core.errors import CharoniaError
from ...scheduler.plan import StepResult


class PendingSteps:
    """For any thread. `loss`: why no result will come any more."""

    def __init__(self) -> None:
        self._steps: deque[Future[StepResult]] = deque()
        self._lock = threading.Lock()
        self._tell: Callable[[CharoniaError], None] = lambda error: None
        self.loss: CharoniaError | None = None

    def add_step(self) -> Future[StepResult]:
        """One step more; it has failed already if there will be no result."""
        step: Future[StepResult] = Future()
        with self._lock:
            if self.loss is None:
                self._steps.append(step)
                return step
        step.set_exception(self.loss)
        return step

    def resolve_oldest(self, result: StepResult) -> None:
        """The oldest step's result."""
        with self._lock:
            step = self._steps.popleft()
        step.set_result(result)

    def fail_all(self, error: CharoniaError) -> None:
        """No result will come, to these steps and all to be added."""
        with self._lock:
            self.loss = error
            steps, self._steps = self._steps, deque()
            tell = self._tell
        for step in steps:
            step.set_exception(error)
        tell(error)

    def on_loss(self, tell: Callable[[CharoniaError], None]) -> None:
        """Call `tell` when `fail` is, at once if it was."""
        with self._lock:
            self._tell = tell
            error = self.loss
        if error is not None:
            tell(error)

    def cancel_all(self) -> None:
        with self._lock:
            steps, self._steps = self._steps, deque()
        for step in steps:
            step.cancel()
