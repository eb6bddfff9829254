"""Sequences on instances that run when the test says so: everybody gets what he would get alone."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.classic_backends.batching.batch_execution import BatchLayout, ModelSignature
from charonia.classic_backends.batching.inference_job import InferenceJob, SequenceContext, SequenceFlags
from charonia.classic_backends.batching.queued_request import QueuedRequest, RequestBatch
from charonia.classic_backends.sequences.sequence_scheduler import SequenceBatcher, SequenceScheduler
from charonia.classic_backends.sequences.sequence_support import SequenceSupport, read_sequence_support
from charonia.core.errors import Cancelled, CharoniaError
from charonia.core.model import ModelConfig
from charonia.core.request import InferResponse
from charonia.core.request_context import RequestContext
from charonia.telemetry.model_metrics import CloseReason, ModelMetrics

from ..asking import queued_request
from .sequence_subjects import Carried, Histories, Rows, config, state

FAR = 10**9
"""Microseconds that no test waits for."""

OLDEST = {"max_candidate_sequences": 3}


class Hand:
    """An instance that does one thing at a time: take a batch, or execute what it took."""

    def __init__(self, runtime: Any) -> None:
        self.name = "hand"
        self.lost = False
        self.runtime = runtime
        self.source: Any = None
        self.work: RequestBatch | None = None

    def wake(self, source: Any) -> None:
        assert self.source is None
        self.source = source

    def step(self) -> None:
        if self.work is not None:
            self.source.execute_batch(self, self.work)
            self.work = None
        elif self.source is not None:
            self.work = self.source.next_batch(self)
            if self.work is None:
                self.source = None
            else:
                contexts = [request.job.sequence for request in self.work.requests]
                assert len(set(contexts)) == len(contexts)


@dataclass(eq=False)
class Asked:
    """A request, what came of it, and what its sequence makes of it."""

    client: int
    expected: int
    request: Any = None
    got: list[int] = field(default_factory=list)
    error: Exception | None = None
    ends: int = 0
    left: bool = False
    unread_slots: None = None

    def put(self, response: InferResponse) -> None:
        [made] = response.outputs
        assert made.shape == (1, 1)
        self.got.append(made.scalar)

    def end(self, error: Exception | None = None) -> None:
        self.ends += 1
        self.error = error


def sequences_of(settings: ModelConfig) -> SequenceSupport:
    found = read_sequence_support(settings, {})
    assert found is not None
    return found


class Table:
    """A desk, its instances, and clients who each have one sequence at a time."""

    def __init__(self, settings: ModelConfig, make: Callable[[], Any], instances: int = 2) -> None:
        sequences = sequences_of(settings)
        form = BatchLayout(ModelSignature(settings), sequences=sequences)
        self.account = ModelMetrics()
        self.desk = SequenceScheduler(sequences.config, form, self.account, decoupled=False)
        self.hands = [Hand(make()) for _ in range(instances)]
        for hand in self.hands:
            self.desk.add_instance(hand)  # type: ignore[arg-type]
        self.asked: list[Asked] = []
        self.sums: dict[int, int] = {}

    def ask(self, client: int, end: bool = False, **fields: Any) -> Asked:
        """The next request of the client's sequence; it begins one if he has none."""
        start = client not in self.sums
        value = len(self.asked) + 1
        asked = Asked(client, self.sums.get(client, 0) + value)
        flags = SequenceFlags(client + 1, start, end)
        job = InferenceJob({"X": np.array([[value]], np.int32)}, sequence_flags=flags)
        asked.request = QueuedRequest(job, asked, RequestContext("test"), **fields)
        self.sums[client] = asked.expected
        if end:
            del self.sums[client]
        self.asked.append(asked)
        self.desk.submit(asked.request)
        return asked

    def leave(self, asked: Asked) -> None:
        """As a model whose reader leaves. What his sequence had is lost, unless it had its end already."""
        if asked.ends or asked.left:
            return
        asked.left = True
        asked.request.give_up()
        context, table = asked.request.job.sequence, self.desk._table
        sequence = table._open.get(asked.client + 1)
        if sequence is not None and sequence is context:
            del self.sums[asked.client]
        self.desk.cancel_request(asked.request)

    async def settle(self) -> None:
        """Until there is nothing to do."""
        while any(hand.source is not None for hand in self.hands):
            for hand in self.hands:
                hand.step()
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    def check(self) -> None:
        for asked in self.asked:
            if not asked.left:
                assert asked.ends == 1
                assert asked.got == [asked.expected] or isinstance(asked.error, Cancelled)
        assert len(self.desk) == 0
        self.desk._table.check_integrity()


KINDS: dict[str, tuple[ModelConfig, Callable[[], Any]]] = {
    "direct": (config(max_batch_size=2), Rows),
    "direct, least utilization": (config(max_batch_size=3, direct={"minimum_slot_utilization": 0.1}), Rows),
    "direct, carried": (config(max_batch_size=3, state=[state([1])]), Carried),
    "oldest, carried": (config(max_batch_size=2, oldest=OLDEST, state=[state([1])]), Carried),
    "oldest, histories": (config(oldest=OLDEST, state=[state([-1])]), Histories),
}

ACTIONS = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 6), st.integers(0, 3)),
    st.tuples(st.just("step"), st.integers(0, 1), st.just(0)),
    st.tuples(st.just("step"), st.integers(0, 1), st.just(0)),
    st.tuples(st.just("leave"), st.integers(1, 12), st.just(0)),
    st.tuples(st.just("hear"), st.just(0), st.just(0)),
)


async def play(kind: str, actions: Iterable[tuple[str, int, int]]) -> Table:
    table = Table(*KINDS[kind])
    for action, which, last in actions:
        if action == "ask":
            table.ask(which, end=last == 0)
        elif action == "step":
            table.hands[which].step()
        elif action == "leave" and which <= len(table.asked):
            table.leave(table.asked[-which])
        elif action == "hear":
            await asyncio.sleep(0)
        table.desk._table.check_integrity()
        for host in table.desk._dispatchers.values():
            host._queue.check_integrity()  # type: ignore[attr-defined]
    await table.settle()
    for client in list(table.sums):
        table.ask(client, end=True)
    await table.settle()
    table.check()
    return table


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(actions=st.lists(ACTIONS, max_size=60))
def test_each_sequence_gets_what_it_would_get_alone(kind: str, actions: list[tuple[str, int, int]]) -> None:
    asyncio.run(play(kind, actions))


async def test_requests_that_one_client_sends_at_once_are_executed_one_after_the_other() -> None:
    table = Table(*KINDS["oldest, carried"], instances=1)
    asked = [table.ask(0) for _ in range(3)] + [table.ask(1)]
    assert len(table.desk) == 4
    await table.settle()
    table.check()
    assert [each.got for each in asked] == [[1], [3], [6], [4]]
    assert (table.account.executions, table.account.inferences) == (3, 4)
    assert table.account.single_request_batches[CloseReason.IDLE] == 2


async def test_who_leaves_takes_his_sequence_along() -> None:
    table = Table(*KINDS["direct"], instances=1)
    runs, waits, leaves, last = (table.ask(0) for _ in range(4))
    other = table.ask(1)
    table.hands[0].step()
    table.leave(leaves)
    assert (runs.ends, other.ends) == (0, 0)
    for each in (waits, last):
        assert isinstance(each.error, Cancelled)
        assert str(each.error) == "sequence 1 of model 'm' was cancelled"
    again = table.ask(0)
    await table.settle()
    table.check()
    assert (runs.got, again.got, leaves.got) == ([runs.expected], [again.expected], [])


async def test_nothing_of_a_cancelled_sequence_begins_while_it_is_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(*KINDS["direct"], instances=1)
    leaves, behind = table.ask(0), table.ask(0)
    [host], [hand] = table.desk._dispatchers.values(), table.hands
    withdraw = host.cancel_request

    def meanwhile(request: QueuedRequest) -> bool:
        withdrawn = withdraw(request)
        hand.step()
        return withdrawn

    monkeypatch.setattr(host, "cancel_request", meanwhile)
    table.leave(leaves)
    await table.settle()
    table.check()
    assert isinstance(behind.error, Cancelled)


async def test_who_leaves_the_backlog_leaves_nothing_there() -> None:
    table = Table(config(max_batch_size=0), Alone, instances=1)
    held, waits, behind = table.ask(0), table.ask(1), table.ask(1)
    table.leave(waits)
    assert isinstance(behind.error, Cancelled)
    assert len(table.desk) == 1
    await table.settle()
    table.check()
    assert held.got == [held.expected]


class Alone(Rows):
    """Without a batch dimension."""

    def execute(self, inputs: Any, wanted: Any) -> Any:
        assert all(array.shape == (1,) for array in inputs.values() if array.ndim == 1)
        return super().execute({name: array.reshape(1, -1) for name, array in inputs.items()}, wanted)


async def test_a_lost_instance_fails_who_waits_and_forgets_its_sequences() -> None:
    table = Table(*KINDS["direct"], instances=1)
    asked = [table.ask(client) for client in (0, 1, 2)]
    for lost in (Hand(Rows()), table.hands[0]):
        table.desk.remove_instance(lost)  # type: ignore[arg-type]
    assert ["being restarted" in str(each.error) for each in asked] == [True] * 3
    table.sums.clear()
    with pytest.raises(CharoniaError, match="being restarted"):
        table.ask(0)
    table.hands = [Hand(Rows())]
    table.desk.add_instance(table.hands[0])  # type: ignore[arg-type]
    with pytest.raises(CharoniaError, match="START"):
        table.ask(0)
    table.sums.clear()
    again = table.ask(1)
    await table.settle()
    assert again.got == [again.expected]


async def test_closing_refuses_everybody_who_waits_or_comes() -> None:
    table = Table(*KINDS["direct"], instances=1)
    asked = [table.ask(client) for client in (0, 1, 2, 2)]
    table.hands[0].step()
    table.desk.close()
    assert ["Server is stopping" in str(each.error) for each in asked] == [False, False, True, True]
    with pytest.raises(CharoniaError, match="Server is stopping"):
        table.ask(0)
    await table.settle()
    assert [each.got for each in asked[:2]] == [[1], [2]]
    assert len(table.desk._table._open) == 0
    table.desk._table.check_integrity()


async def test_time_ends_the_wait_for_a_seat() -> None:
    table = Table(*KINDS["direct"], instances=1)
    held = [table.ask(client) for client in (0, 1)]
    late = [table.ask(2, timeout_ns=1), table.ask(2)]
    async with asyncio.timeout(30):
        while not all(each.ends for each in late):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert {str(each.error) for each in late} == {"timeout of the corresponding sequence has been expired"}
    await table.settle()
    assert [each.got for each in held] == [[1], [2]]


async def test_a_scrape_tells_who_has_a_slot_and_who_waits_for_one() -> None:
    table = Table(*KINDS["direct"], instances=1)
    assert measured(table) == {"open": 0, "waiting": 0, "slots": 2}
    for client in range(4):
        table.ask(client)
    assert measured(table) == {"open": 2, "waiting": 2, "slots": 2}
    await table.settle()
    table.ask(0, end=True)
    await table.settle()
    assert measured(table) == {"open": 2, "waiting": 1, "slots": 2}
    table.desk.remove_instance(table.hands[0])  # type: ignore[arg-type]
    assert measured(table) == {"open": 0, "waiting": 0, "slots": 0}


def measured(table: Table) -> dict[str, float]:
    readings = {reading.family: reading.value for reading in table.desk.readings()}
    return {name.removeprefix("charonia_").split("_")[-1]: value for name, value in readings.items()}  # type: ignore[misc]


async def test_who_is_idle_gives_up_his_seat() -> None:
    settings = config(max_batch_size=1, max_sequence_idle_microseconds=1)
    table = Table(settings, Rows, instances=1)
    idle, waits = table.ask(0), table.ask(1)
    async with asyncio.timeout(30):
        while not waits.ends:
            table.hands[0].step()
            await asyncio.sleep(0.001)
    assert (idle.got, waits.got) == ([1], [2])
    with pytest.raises(CharoniaError, match="sequence 1 to model 'm' must specify the START flag"):
        table.ask(0)


def behind(client: int) -> QueuedRequest:
    job = InferenceJob({"X": np.array([[1]], np.int32)}, sequence=SequenceContext(client, row=client))
    return queued_request(job=job)


def test_a_direct_batch_waits_until_enough_rows_have_work() -> None:
    half = {"minimum_slot_utilization": 0.5, "max_queue_delay_microseconds": FAR}
    batcher = SequenceBatcher(sequences_of(config(direct=half)).config)
    first = behind(3)
    batcher.add(first, 1)
    assert batcher.peek_batch(2).ask_again_at == 1 + FAR * 1000
    assert batcher.take_batch(2).batch is None
    batcher.add(behind(0), 3)
    batch = batcher.take_batch(3).batch
    assert batch is not None
    assert [request.job.sequence.row for request in batch.requests if request.job.sequence] == [0, 3]
    assert batch.close_reason is CloseReason.PREFERRED
    batcher.add(behind(1), 4)
    late = batcher.take_batch(4 + FAR * 1000).batch
    assert late is not None
    assert late.close_reason is CloseReason.DELAY
