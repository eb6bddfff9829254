"""Which instances of models wait for each other, by the requests that models make of other models: a wait that can
never end is found, and one of its requests refused.

Knows nothing of queues, processes and protocols. Belongs to the event loop.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from .errors import CharoniaError, Unavailable
from .request_context import ENSEMBLE_ENDPOINT, RequestContext

_CHECK_SECONDS = 0.5
"""Between two looks at the waits: a request may be queued long after it was made, by a later step of an ensemble."""


_MAX_NAMES = 4
"""Instances of a model that an error names."""


class AwaitedCall(NamedTuple):
    """A request to another model, without whose answer the execution that made it does not go on. `refuse` answers it
    with an error."""

    context: RequestContext
    refuse: Callable[[CharoniaError], None]


@dataclass(frozen=True, slots=True, eq=False)
class InstanceWaits:
    """An instance of a model. `executing`: the requests that it executes; `awaits`: what their execution waits for."""

    name: str
    executing: Sequence[RequestContext]
    awaits: Sequence[AwaitedCall]


class QueueWaits(NamedTuple):
    """One queue, and all instances that may take its requests. `waiting`: those that wait however long it takes."""

    instances: Sequence[InstanceWaits]
    waiting: Sequence[RequestContext]


class WaitingModel(Protocol):
    """A model whose instances may ask other models."""

    def queue_waits(self) -> Iterable[QueueWaits]:
        """Its queues as they are now; none while an instance is to come."""


class Wait(NamedTuple):
    """An instance waits for another one, which has its request, or for any of those that may take it, itself perhaps
    among them. `queued`: none has it yet."""

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
    """What keeps an instance waiting, if the instances in `stuck` never go on: of several the nearest."""
    waits: list[tuple[int, Wait]] = []
    for call in instance.awaits:
        for queue in queues:
            for other in stuck.intersection(queue.instances):
                waits += [(n, Wait(instance, call, [other], False)) for n in _distances(other.executing, call.context)]
            if queue.instances and stuck.issuperset(queue.instances):
                wait = Wait(instance, call, queue.instances, True)
                waits += [(distance, wait) for distance in _distances(queue.waiting, call.context)]
    return min(waits, key=lambda each: each[0])[1] if waits else None


def _distances(requests: Iterable[RequestContext], whole: RequestContext) -> Iterator[int]:
    """Of the requests that are `whole` or steps of its ensemble: how deep they are in it."""
    for request in requests:
        distance, ancestor = 0, request
        while ancestor is not whole and ancestor.parent is not None and ancestor.endpoint == ENSEMBLE_ENDPOINT:
            distance, ancestor = distance + 1, ancestor.parent
        if ancestor is whole:
            yield distance


class WaitGraph:
    """The waits of a server's models."""

    def __init__(self) -> None:
        self._models: list[WaitingModel] = []
        self._timer: asyncio.TimerHandle | None = None

    def add_model(self, model: WaitingModel) -> None:
        self._models.append(model)

    def remove_model(self, model: WaitingModel) -> None:
        if model in self._models:
            self._models.remove(model)

    def check(self) -> None:
        """Refuse a request of every cycle; again and again, while an execution waits. Called when one begins to."""
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
    names = [f"'{each.name}'" for each in instances[:_MAX_NAMES]] + [f"one of {more} more"] * (more > 0)
    return " or ".join(names)
