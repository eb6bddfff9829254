"""Requests that come again, on instances that run when the test says so: each is answered once, and leaves nothing."""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.classic_backends.batching.batch_execution import BatchLayout, ModelSignature
from charonia.classic_backends.batching.inference_job import InferenceJob, SequenceFlags
from charonia.classic_backends.batching.queued_request import QueuedRequest, ResponseChannel
from charonia.classic_backends.sequences.sequence_scheduler import SequenceScheduler
from charonia.classic_backends.sequences.sequence_support import read_sequence_support
from charonia.core.errors import Cancelled, Internal, Unavailable
from charonia.core.request_context import RequestContext
from charonia.core.runtime import Rescheduled, RuntimeAnswer, RuntimeRequest, RuntimeResponse, RuntimeTraits
from charonia.telemetry.model_metrics import ModelMetrics

from .sequence_subjects import config, state
from .test_sequence_scheduler import Hand

READ = 129
"""Responses that are too many to wait, until they are read."""


class Channel(ResponseChannel):
    """Counts its ends."""

    ends = 0
    error: Exception | None = None

    def end(self, error: Exception | None = None) -> None:
        self.ends += 1
        self.error = error
        super().end(error)


class Steps:
    """A runtime whose requests are executed as often as their X says; each time it says by the next of its `manners`
    how a request comes again: with the batch (0), after a response (1) or too many of them (2), `later`, when the test
    says so (1 and 3), or before the batch's answers (4). A last answer comes later, too (3)."""

    traits = RuntimeTraits()

    def __init__(self, decoupled: bool, manners: Sequence[int] = (0,)) -> None:
        self.decoupled = decoupled
        self.manners = deque(manners)
        self.left: dict[RuntimeRequest, int] = {}
        self.later: list[tuple[RuntimeRequest, RuntimeAnswer]] = []
        self.cancelled: set[RuntimeRequest] = set()
        self.batches: list[list[int]] = []

    def execute_requests(self, requests: Sequence[RuntimeRequest]) -> list[RuntimeAnswer]:
        real = [request for request in requests if request.inputs["READY"].item()]
        assert len({request.correlation_id for request in real}) == len(real) > 0
        self.batches.append([int(request.inputs["X"].item()) for request in real])
        return [self._execute(request) if request in real else Rescheduled() for request in requests]

    def _execute(self, request: RuntimeRequest) -> RuntimeAnswer:
        assert request.flags == (0 if request in self.left else 1) == request.inputs["START"].item()
        assert request.inputs["S"].item() == self.left.get(request, 0)
        number = int(request.inputs["X"].item())
        done = self.left.get(request, 0) + 1
        self.left[request] = done
        self.manners.rotate(-1)
        carried = {"T": np.array([[done]], np.int32)}
        answer: RuntimeAnswer = Rescheduled(carried)
        if done == number:
            answer = RuntimeResponse({"SUM": np.array([[done]], np.int32)})
            if self.manners[0] == 3:
                self.later.append((request, answer))
                return None
            if self.decoupled:
                request.respond(answer, True)
                return None
            return answer
        if 0 < self.manners[0] < 4 and self.decoupled:
            for _ in range(READ if self.manners[0] == 2 else 1):
                request.respond(RuntimeResponse({"SUM": np.array([[done]], np.int32)} | carried), False)
        if self.manners[0] == 4:
            request.respond(answer, False)
            return None
        if self.manners[0] % 2:
            self.later.append((request, answer))
            return None
        return answer

    def go_on(self) -> None:
        """What was to come later comes."""
        later, self.later = self.later, []
        for request, answer in later:
            request.respond(answer, isinstance(answer, RuntimeResponse))

    def cancel_request(self, request: RuntimeRequest) -> None:
        self.cancelled.add(request)

    def hold_request(self, request: RuntimeRequest, held: bool) -> None:
        pass


class World:
    """A model, its instances, and everybody who asks it."""

    def __init__(self, runtime: Steps, instances: int = 1, **sequences: Any) -> None:
        described = config(iterative_sequence=True, state=[state([1])], **sequences)
        support = read_sequence_support(described, {}, by_request=True)
        assert support is not None
        layout = BatchLayout(ModelSignature(described), sequences=support, by_request=True)
        self.runtime, self.metrics = runtime, ModelMetrics()
        self.desk = SequenceScheduler(support.config, layout, self.metrics, runtime.decoupled)
        self.hands = [Hand(runtime) for _ in range(instances)]
        for hand in self.hands:
            self.desk.add_instance(hand)  # type: ignore[arg-type]
        self.asked: list[QueuedRequest] = []

    def ask(self, number: int, sequence_id: int = 0, **fields: Any) -> QueuedRequest:
        job = InferenceJob({"X": np.array([[number]], np.int32)}, sequence_flags=SequenceFlags(sequence_id, True))
        channel = Channel(self.runtime.decoupled)
        request = QueuedRequest(job, channel, RequestContext("test"), **fields)
        self.asked.append(request)
        self.desk.submit(request)
        return request

    def leave(self, request: QueuedRequest) -> None:
        if not request.channel.ended:
            request.give_up()
            self.desk.cancel_request(request)
            request.channel.end(Cancelled("left"))

    async def read(self, request: QueuedRequest) -> None:
        """Whatever waits to be read."""
        while request.channel._responses:
            await request.channel.next_response()

    def check(self) -> None:
        self.desk._table.check_integrity()
        for dispatcher in self.desk._dispatchers.values():
            dispatcher._queue.check_integrity()

    async def settle(self) -> None:
        for _ in range(10_000):
            self.runtime.go_on()
            for request in self.asked:
                await self.read(request)
            for hand in self.hands:
                hand.step()
            await asyncio.sleep(0)
            if not self.runtime.later and all(hand.source is None for hand in self.hands):
                return
        raise AssertionError("it never ends")


ACTIONS = st.one_of(
    st.tuples(st.just("ask"), st.integers(1, 6)),
    st.tuples(st.just("step"), st.integers(0, 1)),
    st.tuples(st.just("step"), st.integers(0, 1)),
    st.tuples(st.just("hear"), st.just(0)),
    st.tuples(st.just("later"), st.just(0)),
    st.tuples(st.just("read"), st.integers(1, 9)),
    st.tuples(st.just("leave"), st.integers(1, 9)),
    st.tuples(st.just("fail"), st.integers(1, 9)),
)


async def play(world: World, actions: Sequence[tuple[str, int]]) -> None:
    for action, which in actions:
        request = world.asked[-which] if 0 < which <= len(world.asked) else None
        if action == "ask":
            world.ask(which)
        elif action == "step":
            world.hands[which].step()
        elif action == "hear":
            await asyncio.sleep(0)
        elif action == "later":
            world.runtime.go_on()
        elif request is not None and action == "read":
            await world.read(request)
        elif request is not None and action == "leave":
            world.leave(request)
        elif request is not None and request.execution is not None:
            request.execution.respond(Internal("it fails"), True)  # type: ignore[attr-defined]
        world.check()
    await world.settle()
    world.check()
    assert [request.channel.ends for request in world.asked] == [1] * len(world.asked)  # type: ignore[attr-defined]
    assert len(world.desk) == world.desk._table.used_slots == world.desk._table.waiting_sequences == 0
    assert not world.desk._router._streams
    assert not any(host._queue._held or host._queue._later for host in world.desk._dispatchers.values())  # type: ignore[attr-defined]
    metrics = world.metrics
    assert metrics.success.count == metrics.inferences
    assert metrics.executions == len(world.runtime.batches)


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("strategy", ["direct", "oldest"])
@settings(max_examples=25)
@given(actions=st.lists(ACTIONS, max_size=50), manners=st.lists(st.integers(0, 4), min_size=1, max_size=7))
def test_each_request_is_answered_once(
    decoupled: bool, strategy: str, actions: list[tuple[str, int]], manners: list[int]
) -> None:
    async def run() -> None:
        rules = {"max_candidate_sequences": 3} if strategy == "oldest" else {}
        await play(World(Steps(decoupled, manners), instances=2, **{strategy: rules}), actions)

    asyncio.run(run())


async def test_everybody_has_the_same_share() -> None:
    """Five sequences, and room for two in a batch."""
    world = World(Steps(False), oldest={"max_candidate_sequences": 5, "preferred_batch_size": [2]})
    for number in (7, 6, 5, 4, 3):
        world.ask(number)
    world.hands[0].step()
    for _ in range(4):
        world.hands[0].step()
        world.hands[0].step()
    assert world.runtime.batches == [[7, 6], [5, 4], [3, 7], [6, 5]]
    await world.settle()
    assert max(map(len, world.runtime.batches)) == 2


async def test_who_comes_again_is_with_who_came_meanwhile() -> None:
    world = World(Steps(False))
    first = world.ask(4)
    world.hands[0].step()
    second = world.ask(2)
    for _ in range(3):
        world.hands[0].step()
    assert world.runtime.batches == [[4], [4, 2]]
    await world.settle()
    assert world.runtime.batches == [[4], [4, 2], [4, 2], [4]]
    assert [request.channel.ended for request in (first, second)] == [True, True]
    assert (world.metrics.executions, world.metrics.inferences) == (4, 2)


async def test_a_delay_counts_from_the_time_that_a_request_came_again() -> None:
    far = {"preferred_batch_size": [2], "max_queue_delay_microseconds": 10**9}
    world = World(Steps(False), oldest={"max_candidate_sequences": 4} | far)
    world.ask(3)
    world.ask(1)
    await world.settle()
    assert world.runtime.batches == [[3, 1]]  # the other waits for company
    world.ask(1)
    await world.settle()
    assert world.runtime.batches == [[3, 1], [3, 1]]


async def test_a_request_that_is_to_come_again_is_not_idle() -> None:
    world = World(Steps(False, [3]), max_sequence_idle_microseconds=1)
    request = world.ask(3)
    for _ in range(2):
        world.hands[0].step()
    await asyncio.sleep(0.01)
    assert world.desk._table.used_slots == 1
    await world.settle()
    assert request.channel.ended
    assert world.metrics.success.count == 1


async def test_requests_of_one_id_follow_each_other() -> None:
    world = World(Steps(False))
    for number in (3, 2):
        world.ask(number, sequence_id=5)
    world.ask(4, sequence_id=6)
    await world.settle()
    assert [[number for number in batch if number != 4] for batch in world.runtime.batches] == [[3]] * 3 + [[2]] * 2
    assert world.desk._table.used_slots == 0


@pytest.mark.parametrize("decoupled", [False, True])
async def test_requests_of_one_id_follow_each_other_though_answered_later(decoupled: bool) -> None:
    world = World(Steps(decoupled, [3]))
    requests = [world.ask(number, sequence_id=5) for number in (2, 3, 1)]
    await world.settle()
    assert world.runtime.batches == [[2]] * 2 + [[3]] * 3 + [[1]]
    assert all(request.channel.ended for request in requests)


@pytest.mark.parametrize("manner", range(5))
async def test_closing_tells_those_who_would_come_again(manner: int) -> None:
    world = World(Steps(True, [manner]))
    requests = [world.ask(9) for _ in range(6)]
    for _ in range(3):
        world.hands[0].step()
        await asyncio.sleep(0)
    world.desk.close()
    await world.settle()
    assert [type(request.channel.error).__name__ for request in requests] == ["ServerExiting"] * 6  # type: ignore[attr-defined]
    with pytest.raises(Unavailable):
        world.ask(1)
    world.check()


@pytest.mark.parametrize("manner", range(5))
async def test_who_leaves_in_a_batch_does_not_come_again(manner: int) -> None:
    world = World(Steps(False, [manner]))
    request, other = world.ask(9), world.ask(1)
    world.hands[0].step()
    world.leave(request)
    world.hands[0].step()
    await world.settle()
    assert world.runtime.batches == [[9, 1]]
    assert world.desk._table.used_slots == 0
    assert len(world.runtime.cancelled) == 1
    assert other.channel.ended


async def test_who_reads_slowly_does_not_come_again_until_he_has_read() -> None:
    world = World(Steps(True, [2]))
    slow, fast = world.ask(3), world.ask(9)
    for _ in range(2):
        world.hands[0].step()
    await asyncio.sleep(0)
    await world.read(fast)
    for _ in range(4):
        world.hands[0].step()
        await asyncio.sleep(0)
        await world.read(fast)
    assert world.runtime.batches[1:] == [[9]] * (len(world.runtime.batches) - 1)
    assert len(world.runtime.batches) > 1
    world.leave(slow)
    assert world.desk._table.used_slots == 1
    await world.settle()
    assert fast.channel.ended
    assert world.desk._table.used_slots == 0


@pytest.mark.parametrize("others", [0, 7])
async def test_a_request_that_fails_when_its_next_execution_was_taken_is_not_executed_again(others: int) -> None:
    actions = [("ask", 1)] * others + [("ask", 2), *[("step", hand) for hand in (0, 1)] * 3, ("fail", 1)]
    await play(World(Steps(decoupled=True), instances=2, direct={}), actions)
