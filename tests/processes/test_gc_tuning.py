"""The cycle collector while serving, in a process of its own; and memory that large requests leave."""

import asyncio
import subprocess
import sys
import threading

import pytest

from charonia.processes import gc_tuning

CASE = """
import gc, weakref
from charonia.processes import gc_tuning

class Node:
    pass

def cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node), node

seen, kept = cycle()
gc_tuning.collect_less_often()
gc_tuning.collect_and_freeze()
assert gc.get_freeze_count() > 0 and gc.get_threshold()[0] > 700
assert not any(each is kept for each in gc.get_objects()), "it is still looked at"
del kept
gc.collect()
assert seen() is not None
gc_tuning.collect_and_freeze()
assert seen() is None, "a cycle from before was not freed"
"""


def test_what_lasts_is_left_alone_and_still_freed_when_it_goes() -> None:
    subprocess.run([sys.executable, "-c", CASE], check=True, timeout=60)


async def test_memory_is_given_back_once_for_all_large_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[bool] = []
    holders: list[threading.Thread] = []
    monkeypatch.setattr(gc_tuning, "memory_releases", {lambda: holders.append(threading.current_thread())})
    late: list[bool] = []
    monkeypatch.setattr(gc_tuning, "late_releases", {lambda: late.append(True)})
    monkeypatch.setattr(gc_tuning, "_RELEASE_DELAYS", (0.0, 0.01))
    monkeypatch.setattr(gc_tuning, "release_free_memory", lambda: released.append(True))
    for _ in range(2):
        for _ in range(10):
            gc_tuning.release_memory_soon()
        await asyncio.sleep(0.05)
    assert len(released) == 4
    assert len(late) == 2, "those come with the last delay"
    assert holders == [threading.current_thread()] * 4


def test_a_server_that_ended_keeps_no_other_from_giving_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[bool] = []
    monkeypatch.setattr(gc_tuning, "_RELEASE_DELAYS", (0.0,))
    monkeypatch.setattr(gc_tuning, "memory_releases", set())
    monkeypatch.setattr(gc_tuning, "late_releases", {lambda: released.append(True)})
    monkeypatch.setattr(gc_tuning, "release_free_memory", lambda: None)

    async def serve(seconds: float) -> None:
        gc_tuning.release_memory_soon()
        await asyncio.sleep(seconds)

    first, second = asyncio.new_event_loop(), asyncio.new_event_loop()
    first.call_soon(gc_tuning.release_memory_soon)
    first.call_soon(first.stop)
    first.run_forever()
    first.close()
    second.run_until_complete(serve(0.01))
    second.run_until_complete(second.shutdown_default_executor())
    second.close()
    assert released == [True]
