"""Who is woken for what, with instances that run when the test says so."""

from typing import Any

from charonia.classic_backends.batching.batch_execution import BatchLayout, ModelSignature
from charonia.classic_backends.batching.batching_config import BatchingConfig
from charonia.classic_backends.batching.dispatcher import Dispatcher
from charonia.classic_backends.batching.dynamic_batcher import DynamicBatcher
from charonia.classic_backends.batching.queued_request import QueuedRequest
from charonia.core.model import ModelConfig

from ..asking import queued_request


class Worker:
    def __init__(self) -> None:
        self.woken = 0
        self.lost = False

    def wake(self, source: Any) -> None:
        self.woken += 1


class Listener:
    def __init__(self) -> None:
        self.rejections: list[str] = []

    def on_rejected(self, request: QueuedRequest, error: Exception) -> None:
        self.rejections.append(str(error))


class Told(list[Any]):
    """What instances tell the event loop, until it listens."""

    def __call__(self, call: Any, *arguments: Any) -> None:
        self.append((call, arguments))

    def listen(self) -> None:
        while self:
            call, arguments = self.pop(0)
            call(*arguments)


def dispatching(count: int, **rules: Any) -> tuple[Dispatcher, list[Worker], Told]:
    form = BatchLayout(ModelSignature(ModelConfig("m", "1", "test")))
    dispatcher = Dispatcher(DynamicBatcher(BatchingConfig(**rules)), form, Listener(), decoupled=False)  # type: ignore[arg-type]
    told = Told()
    dispatcher.call_in_loop = told  # type: ignore[method-assign]
    workers = [Worker() for _ in range(count)]
    for worker in workers:
        dispatcher.add_instance(worker)  # type: ignore[arg-type]
    return dispatcher, workers, told


def request(kind: int = 0, size: int = 1) -> QueuedRequest:
    return queued_request(batch_size=size, batch_key=kind)


def sizes(dispatcher: Dispatcher, worker: Any) -> list[int]:
    batch = dispatcher.next_batch(worker)
    return [] if batch is None else [request.batch_size for request in batch.requests]


async def test_what_comes_until_a_woken_instance_runs_joins_its_batch() -> None:
    dispatcher, (worker,), _ = dispatching(1, combine_requests=True, max_batch_size=8)
    for size in (1, 2, 3):
        dispatcher.submit(request(size=size))
    assert worker.woken == 1
    assert sizes(dispatcher, worker) == [1, 2, 3]
    assert sizes(dispatcher, worker) == []
    dispatcher.submit(request())
    assert worker.woken == 2


async def test_another_is_woken_for_what_the_first_does_not_take() -> None:
    dispatcher, workers, _ = dispatching(3, combine_requests=True, max_batch_size=4)
    for _ in range(4):
        dispatcher.submit(request())
    assert sum(worker.woken for worker in workers) == 1
    dispatcher.submit(request())
    assert sum(worker.woken for worker in workers) == 2


async def test_without_batches_each_request_wakes_one() -> None:
    dispatcher, workers, _ = dispatching(3)
    for _ in range(2):
        dispatcher.submit(request(size=5))
    assert sum(worker.woken for worker in workers) == 2


async def test_another_is_woken_for_other_shapes() -> None:
    dispatcher, workers, told = dispatching(2, combine_requests=True, max_batch_size=8)
    for kind in (1, 2):
        dispatcher.submit(request(kind))
    [first] = [worker for worker in workers if worker.woken]
    assert sizes(dispatcher, first) == [1]
    told.listen()
    [second] = [worker for worker in workers if worker is not first]
    assert second.woken == 1
    assert sizes(dispatcher, second) == [1]


async def test_a_batch_that_waits_wakes_nobody_and_is_looked_at_again() -> None:
    dispatcher, (worker,), told = dispatching(1, combine_requests=True, max_batch_size=8, max_delay_ns=10**12)
    dispatcher.submit(request())
    assert worker.woken == 0
    assert dispatcher._timer.due_at is not None
    for _ in range(7):
        dispatcher.submit(request())
    assert worker.woken == 1
    dispatcher.close()
    assert sizes(dispatcher, worker) == []
    told.listen()


async def test_one_who_was_woken_for_nothing_is_free_again() -> None:
    dispatcher, (worker,), _ = dispatching(1, combine_requests=True, max_batch_size=8)
    gone = request()
    dispatcher.submit(gone)
    gone.give_up()
    dispatcher.cancel_request(gone)
    assert sizes(dispatcher, worker) == []
    dispatcher.submit(request())
    assert worker.woken == 2


async def test_one_that_is_removed_while_it_is_busy_or_being_woken_gets_no_work() -> None:
    """Its process may have ended before its thread knows: what waits for it would wait for ever."""
    dispatcher, workers, told = dispatching(2, combine_requests=True, max_batch_size=8)
    for busy in (True, False):
        dispatcher.submit(request())
        [first] = [worker for worker in workers if worker.woken]
        assert not busy or sizes(dispatcher, first) == [1]
        dispatcher.remove_instance(first)  # type: ignore[arg-type]
        assert sizes(dispatcher, first) == []
        told.listen()
        [second] = [worker for worker in workers if worker is not first]
        assert second.woken == (0 if busy else 1)
        assert sizes(dispatcher, second) == ([] if busy else [1])
        first.woken = second.woken = 0
        dispatcher.add_instance(first)  # type: ignore[arg-type]
