"""Finds instances of models that wait for each other by the requests that they make, and refuses a request of each
cycle. Belongs to the event loop."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from .errors import CharoniaError, Unavailable
from .request_context import ENSEMBLE_ENDPOINT, RequestContext

_CHECK_SECONDS = 0.5
"""Seconds between two checks, since a request may be queued long after it was made, by a later step of an ensemble."""


_MAX_NAMES = 4
"""The most instances of a model that an error names."""


class AwaitedCall(NamedTuple):
    """A request to another model that an execution waits for. `refuse` answers it with an error."""

    context: RequestContext
    refuse: Callable[[CharoniaError], None]


@dataclass(frozen=True, slots=True, eq=False)
class InstanceWaits:
    """An instance of a model, the requests that it executes, and the calls that their execution waits for."""

    name: str
    executing: Sequence[RequestContext]
    awaits: Sequence[AwaitedCall]


class QueueWaits(NamedTuple):
    """A queue, the instances that may take its requests, and those requests that wait without a time limit."""

    instances: Sequence[InstanceWaits]
    waiting: Sequence[RequestContext]


class WaitingModel(Protocol):
    """A model whose instances may ask other models."""

    def queue_waits(self) -> Iterable[QueueWaits]:
        """Its queues now; none while an instance is starting."""


class Wait(NamedTuple):
    """An instance's wait for another that executes its request or, if `queued`, for any of those that may take it."""

    instance: InstanceWaits
    call: AwaitedCall
    blockers: Sequence[InstanceWaits]
    queued: bool


def find_cycle(queues: Sequence[QueueWaits]) -> list[Wait]:
    """Waits that can never end: each is for the next one's instance, and the last for the first one's. Empty if there
    are none."""
    stuck = {instance for queue in queues for instance in queue.instances if instance.awaits}
    going_on = stuck
    while going_on:
        going_on = {instance for instance in stuck if _find_wait(instance, queues, stuck) is None}
        stuck = stuck - going_on
    waits: dict[InstanceWaits, Wait] = {}
    instance = next(iter(stuck), None)
    while instance is not None and instance not in waits:
        wait = _find_wait(instance, queues, stuck)
        assert wait is not None
        waits[instance] = wait
        instance = wait.blockers[0]
    path = list(waits.values())
    return path[list(waits).index(instance) :] if instance is not None else []


def _find_wait(instance: InstanceWaits, queues: Sequence[QueueWaits], stuck: set[InstanceWaits]) -> Wait | None:
    """The nearest reason why an instance waits, if the instances in `stuck` never go on."""
    waits: list[tuple[int, Wait]] = []
    for call in instance.awaits:
        for queue in queues:
            for other in stuck.intersection(queue.instances):
                wait = Wait(instance, call, [other], False)
                waits += [(distance, wait) for distance in _distances(other.executing, call.context)]
            if queue.instances and stuck.issuperset(queue.instances):
                wait = Wait(instance, call, queue.instances, True)
                waits += [(distance, wait) for distance in _distances(queue.waiting, call.context)]
    return min(waits, key=lambda candidate: candidate[0])[1] if waits else None


def _distances(requests: Iterable[RequestContext], whole: RequestContext) -> Iterator[int]:
    """The depths of those requests that are `whole` or steps of its ensemble."""
    for request in requests:
        distance = 0
        ancestor = request
        while ancestor is not whole and ancestor.parent is not None and ancestor.endpoint == ENSEMBLE_ENDPOINT:
            distance += 1
            ancestor = ancestor.parent
        if ancestor is whole:
            yield distance


class WaitGraph:
    def __init__(self) -> None:
        self._models: list[WaitingModel] = []
        self._timer: asyncio.TimerHandle | None = None

    def add_model(self, model: WaitingModel) -> None:
        self._models.append(model)

    def remove_model(self, model: WaitingModel) -> None:
        if model in self._models:
            self._models.remove(model)

    def check(self) -> None:
        """Refuse one request of a cycle, and check again while executions wait. Called when one begins to."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        queues = [queue for model in self._models for queue in model.queue_waits()]
        if not any(instance.awaits for queue in queues for instance in queue.instances):
            return
        if cycle := find_cycle(queues):
            newest = max((wait for wait in cycle if wait.queued), key=lambda wait: wait.call.context.arrived_at)
            newest.call.refuse(Unavailable(_describe(cycle)))
        self._timer = asyncio.get_running_loop().call_later(_CHECK_SECONDS, self.check)


def _describe(cycle: Sequence[Wait]) -> str:
    waits = "; ".join(f"instance '{wait.instance.name}' waits for {_name_any(wait.blockers)}" for wait in cycle)
    return f"models wait for each other, which would never end: {waits} (instance_group has the number of instances)"


def _name_any(instances: Sequence[InstanceWaits]) -> str:
    more = len(instances) - _MAX_NAMES
    names = [f"'{instance.name}'" for instance in instances[:_MAX_NAMES]] + [f"one of {more} more"] * (more > 0)
    return " or ".join(names)
