"""A request of a classic model from its arrival in the queue to its last response, and the batches of such requests."""

import asyncio
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ...core.request import ParameterValue
from ...core.request_context import RequestContext
from ...telemetry.model_metrics import CloseReason
from .inference_job import InferenceJob
from .response_channel import ResponseChannel


class OpenExecution(Protocol):
    """The request in the hands of a runtime that takes requests as they are: a `RequestExecution`."""

    def cancel(self) -> None:
        """Tell the runtime that nobody waits for the request any more."""

    def close(self) -> None:
        """Let go of the request: it has its last response."""


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A job on its way through the queue and back to its reader."""

    job: InferenceJob
    channel: ResponseChannel
    context: RequestContext
    request_id: str = ""
    batch_size: int = 1
    """Its items in a batch, at least 1."""
    batch_key: Hashable = None
    """Only requests with equal keys share a batch."""
    priority: int = 0
    """As the request says; 0 for the default."""
    timeout_ns: int = 0
    """As the request says; 0 for none."""
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)
    given_up: bool = False
    """The reader left, or was told an error. Set by the event loop, read by the instance's thread too."""
    finished: bool = False
    """It has its last response or error, and nothing more is taken. Set by the event loop, read by the instance's
    thread too."""
    execution: OpenExecution | None = None
    """The execution by a runtime that takes requests as they are, from the first one on."""
    arrived_at: int = 0
    """Set by the queue, as all fields below. Nanoseconds of `time.monotonic_ns`, as all times here."""
    queued_at: int = 0
    """The last time that it was queued: one that is rescheduled is queued several times."""
    level: int = 0
    """Its level of priority."""
    queued: bool = False
    queue_deadline: int | None = None
    """Until when it may wait."""
    answer_deadline: int | None = None
    """Until when it must be answered; `answer_timer` runs out then."""
    answer_timer: asyncio.TimerHandle | None = None

    def finish(self) -> None:
        """Let go of what leads back here: nothing of the request's tensors waits for a collector of garbage."""
        self.finished = True
        self.channel.on_drained = None
        if self.execution is not None:
            self.execution.close()
            self.execution = None

    def give_up(self) -> None:
        self.given_up = True
        if self.channel.unread_slots is not None:
            self.channel.unread_slots.release()
        if self.execution is not None:
            self.execution.cancel()


def endless_requests(requests: Iterable[QueuedRequest]) -> list[RequestContext]:
    """The contexts of those that wait for their answers however long it takes."""
    return [
        request.context for request in requests if request.queue_deadline is None and request.answer_deadline is None
    ]


class RequestBatch(NamedTuple):
    """Requests that are executed together, in the order in which they are served. `delay_ns`: the time of all of them
    during which they only waited for others to join."""

    requests: Sequence[QueuedRequest]
    close_reason: CloseReason
    delay_ns: int = 0

    @property
    def size(self) -> int:
        return sum(request.batch_size for request in self.requests)
