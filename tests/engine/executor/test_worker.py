"""One thread, one thing after the other: order, failure, the end."""

import gc
import threading
import weakref
from concurrent.futures import CancelledError

import pytest

from charonia.engine.executor.worker import Worker

BOUND = 30.0


def test_jobs_are_done_in_order_by_one_thread() -> None:
    worker, done = Worker("one"), list[int]()
    threads = [worker.submit(lambda number: (done.append(number), threading.get_ident())[1], n) for n in range(50)]
    assert len({job.result() for job in threads}) == 1
    assert done == list(range(50))
    worker.close()


def test_what_a_job_raises_its_result_raises_each_time() -> None:
    worker = Worker("one")
    failing, next_one = worker.submit(int, "x"), worker.submit(int, "7")
    for _ in range(2):
        with pytest.raises(ValueError, match="invalid literal"):
            failing.result()
    assert [next_one.result(), next_one.result()] == [7, 7]
    worker.close()


def test_closing_waits_for_what_is_begun_and_cancels_the_rest() -> None:
    worker, begun, go = Worker("one"), threading.Event(), threading.Event()
    running = worker.submit(lambda: (begun.set(), go.wait(BOUND))[1])
    with pytest.raises(TimeoutError):
        running.result(timeout=0)
    waiting = [worker.submit(int) for _ in range(3)]
    assert begun.wait(BOUND)
    closing = threading.Thread(target=worker.close)
    closing.start()
    for job in waiting:
        with pytest.raises(CancelledError):
            job.result()
    assert closing.is_alive()
    go.set()
    closing.join(BOUND)
    assert running.result() is True
    with pytest.raises(RuntimeError, match="closed"):
        worker.submit(int)
    worker.close()


def test_a_worker_that_nobody_has_any_more_ends() -> None:
    """And an idle one keeps nothing of its last job."""
    worker, before = Worker("forgotten"), threading.active_count()

    class Thing:
        """Something that a job makes."""

    thing = weakref.ref(worker.submit(Thing).result())
    worker.submit(int).result()
    gc.collect()
    assert thing() is None
    del worker
    gc.collect()
    assert threading.active_count() == before - 1
