"""The step loop in a thread of this process, with the fake executor and an outbox that remembers."""

import threading
import time
from collections.abc import Callable

import pytest

from charonia.core.errors import InvalidArgument
from charonia.core.logprobs import Logprobs, PromptLogprobs
from charonia.engine.core.messages import (
    AbortRequests,
    AddRequest,
    CoreTotals,
    EngineLoad,
    FromCore,
    RequestRejected,
    RequestUpdates,
    Shutdown,
)
from charonia.engine.core.request_keys import client_key, scheduler_key, split_updates
from charonia.engine.core.step_loop import EngineCore
from charonia.engine.worker.executor import StepFuture
from charonia.engine.worker.fake_executor import FakeExecutor
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.plan import StepPlan, StepResult, StepUpdates
from charonia.scheduler.scheduler import Scheduler

BLOCKS = 16
BLOCK_SIZE = 4


class Memory:
    """An outbox that keeps everything, for two clients."""

    clients = 2

    def __init__(self) -> None:
        self.sent: list[tuple[int, FromCore]] = []

    def send(self, client: int, message: FromCore) -> None:
        self.sent.append((client, message))

    def updates(self, client: int = 0) -> list[RequestUpdates]:
        return [message for to, message in list(self.sent) if to == client and isinstance(message, RequestUpdates)]

    def tokens(self, client: int, key: int) -> list[int]:
        found: list[int] = []
        for message in self.updates(client):
            rest = iter(message.tokens)
            for owner, count in zip(message.keys, message.counts, strict=True):
                taken = [next(rest) for _ in range(count)]
                found += taken if owner == key else []
        return found

    def finished(self, client: int) -> dict[int, str]:
        return dict(entry for message in self.updates(client) for entry in message.finished)

    def refused(self) -> list[tuple[int, RequestRejected]]:
        return [(to, message) for to, message in list(self.sent) if isinstance(message, RequestRejected)]


class Spy(FakeExecutor):
    """Calls `watch` with each plan it is given."""

    def __init__(self, watch: Callable[[StepPlan], None] = lambda plan: None, threaded: bool = True) -> None:
        super().__init__(block_size=BLOCK_SIZE, threaded=threaded)
        self._watch = watch

    def execute(self, plan: StepPlan) -> StepFuture:
        future = super().execute(plan)
        self._watch(plan)
        return future


class Running:
    """A core that turns in a thread."""

    def __init__(
        self, executor: FakeExecutor, ahead: int = 0, clock: Callable[[], float] = time.monotonic, rows: int = 4
    ) -> None:
        config = SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=16, max_model_len=40, ahead=ahead)
        self.cache = cache = KVCacheManager(BLOCKS, BLOCK_SIZE)
        self.executor = executor
        self.executor.allocate(BLOCKS)
        self.core = EngineCore(Scheduler(config, cache), cache, executor, vocab_size=1000, clock=clock)
        self.outbox = Memory()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Running":
        self.core.warm_up()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.core.accept(Shutdown())
        self._thread.join(30)
        self.executor.close()
        assert not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.core.run(self.outbox)
        except RuntimeError as error:
            self.error = error

    def add(
        self,
        key: int,
        prompt: list[int],
        max_tokens: int = 4,
        client: int = 0,
        stop: int = -1,
        timeout: float = 0.0,
    ) -> None:
        stops = [stop] if stop >= 0 else []
        add = AddRequest(
            client=client, key=key, prompt=prompt, max_tokens=max_tokens, stop_token_ids=stops, timeout=timeout
        )
        self.core.accept(add)

    def wait(self, holds: Callable[[], object]) -> None:
        deadline = time.monotonic() + 30
        while not holds():
            assert time.monotonic() < deadline, self.outbox.sent[-3:]
            time.sleep(0.001)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_clients_get_their_own_tokens(ahead: int) -> None:
    with Running(Spy(), ahead) as loop:
        loop.add(7, [10, 11], max_tokens=5, client=0)
        loop.add(7, [500], max_tokens=6, client=1)
        loop.add(8, [20], max_tokens=9, client=1, stop=23)
        loop.wait(lambda: loop.outbox.finished(0).keys() == {7} and loop.outbox.finished(1).keys() == {7, 8})
    assert loop.outbox.tokens(0, 7) == [12, 13, 14, 15, 16]
    assert loop.outbox.tokens(1, 7) == [501, 502, 503, 504, 505, 506]
    assert loop.outbox.tokens(1, 8) == [21, 22, 23]
    assert loop.outbox.finished(1) == {7: "length", 8: "stop"}


def test_one_message_per_step_and_client() -> None:
    with Running(Spy()) as loop:
        for key in range(4):
            loop.add(key, [key], max_tokens=20)
        loop.wait(lambda: len(loop.outbox.finished(0)) == 4)
    for client in range(2):
        steps = [message.step for message in loop.outbox.updates(client) if message.keys or message.started]
        assert len(steps) == len(set(steps))
    assert [update.step for update in loop.outbox.updates(0)] == [update.step for update in loop.outbox.updates(1)]


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_an_abort_frees_its_blocks_within_ahead_plus_one_steps(ahead: int) -> None:
    seen: list[tuple[int, int]] = []
    arrival = 12

    def abort_midway(plan: StepPlan) -> None:
        if plan.step == arrival:
            loop.core.accept(AbortRequests(0, [1]))
        if plan.step >= arrival:
            seen.append((loop.outbox.updates()[-1].step, loop.cache.free_blocks))

    with Running(Spy(abort_midway), ahead) as loop:
        loop.add(1, [1] * 8, max_tokens=30)
        loop.add(2, [2] * 8, max_tokens=30)
        loop.wait(lambda: 2 in loop.outbox.finished(0))
    applied_at_arrival, free_at_arrival = seen[0]
    free_later = [free for applied, free in seen if applied - applied_at_arrival >= ahead + 1]
    assert applied_at_arrival == arrival - ahead - 1
    assert free_later[0] > free_at_arrival
    assert len(loop.outbox.tokens(0, 1)) < 30
    assert loop.cache.free_blocks == BLOCKS


def test_an_abort_of_a_waiting_or_unknown_sequence() -> None:
    with Running(Spy()) as loop:
        for key in range(6):
            loop.add(key, [key], max_tokens=10)
        loop.core.accept(AbortRequests(0, [5, 99]))
        loop.wait(lambda: len(loop.outbox.finished(0)) == 5)
        loop.wait(
            lambda: (
                loop.outbox.updates()[-1].load == EngineLoad(0, 0, BLOCKS, loop.outbox.updates()[-1].load.step_seconds)
            )
        )
    assert loop.outbox.tokens(0, 5) == []


IMPOSSIBLE = [([], 1, "prompt"), ([1000], 1, "prompt"), ([-1], 1, "prompt"), ([2**40], 1, "prompt")]
IMPOSSIBLE += [([1] * 41, 1, "prompt"), ([1] * 30, 11, "max_tokens")]


def test_the_impossible_fails_alone_and_names_its_field() -> None:
    with Running(Spy()) as loop:
        loop.add(1, [1], max_tokens=8)
        for key, (prompt, max_tokens, _) in enumerate(IMPOSSIBLE, start=100):
            loop.add(key, prompt, max_tokens, client=1)
        loop.wait(lambda: loop.outbox.finished(0) and len(loop.outbox.refused()) == len(IMPOSSIBLE))
    refused = {message.key: message for _, message in loop.outbox.refused()}
    assert [refused[key].field for key in sorted(refused)] == [field for _, _, field in IMPOSSIBLE]
    assert all(message.field in message.message for message in refused.values())
    assert all(client == 1 for client, _ in loop.outbox.refused())
    assert len(loop.outbox.tokens(0, 1)) == 8


def test_an_idle_loop_turns_at_least_once_a_second() -> None:
    with Running(Spy()) as loop:
        loop.wait(lambda: len(loop.outbox.updates()) >= 2)
        beat = loop.outbox.updates()[-1]
    assert (beat.keys, beat.started, beat.finished) == ([], [], [])
    assert beat.load.free_blocks == BLOCKS


def test_a_model_that_computes_no_numbers_is_refused() -> None:
    class Damaged(Spy):
        def _logprobs(self, token: int, top: int | None) -> Logprobs | None:
            return None if top is None else Logprobs(float("nan"), [], [])

    with pytest.raises(InvalidArgument, match="computes no numbers"), Running(Damaged()):
        pass


def test_what_the_executor_raises_ends_the_loop() -> None:
    class Broken(Spy):
        def _step(self, plan: StepPlan) -> StepResult:
            if plan.step > 6:  # warm-up takes some
                raise RuntimeError("out of memory")
            return super()._step(plan)

    with Running(Broken()) as loop:
        loop.add(1, [1], max_tokens=20)
        loop.wait(lambda: loop.error)
    assert str(loop.error) == "out of memory"


def test_a_thread_that_dies_ends_the_loop() -> None:
    with Running(Spy()) as loop:
        loop.core.fail(RuntimeError("the inbox broke"))
        loop.wait(lambda: loop.error)
    assert str(loop.error) == "the inbox broke"


def test_keys_of_different_clients_never_meet() -> None:
    pairs = [(0, 0), (1, 0), (0, 1), (255, 2**40), (0, -1)]
    keys = [scheduler_key(*pair) for pair in pairs]
    assert len(set(keys)) == len(pairs)
    assert [client_key(key) for key in keys] == pairs


def test_a_step_is_split_by_client() -> None:
    a, b = scheduler_key(0, 5), scheduler_key(1, 5)
    updates = StepUpdates([b, a, b + 256], [2, 1, 1], [1, 2, 3, 4], [(a, 16)], [(b, "stop")])
    load = EngineLoad(running=3)
    assert split_updates(updates, 9, load, 2) == [
        RequestUpdates(9, [5], [1], [3], [(5, 16)], [], load),
        RequestUpdates(9, [5, 6], [2, 1], [1, 2, 4], [], [(5, "stop")], load),
    ]


def test_a_lone_client_gets_the_whole_step() -> None:
    """The same as if there were others, of whom nothing ran."""
    a, b = scheduler_key(0, 5), scheduler_key(0, 6)
    logprobs, scores = Logprobs(-1.0, [7], [-1.0]), PromptLogprobs(1, 0, b"1234", b"1234", b"", b"")
    updates = StepUpdates(
        [a, b], [2, 1], [7, 8, 9], [(a, 16)], [(b, "stop")], [None, logprobs, None], [(scheduler_key(0, 7), scores)]
    )
    alone, beside = split_updates(updates, 9, EngineLoad(), 1), split_updates(updates, 9, EngineLoad(), 3)
    assert alone == beside[:1]
    assert alone[0].keys == [5, 6]
    assert alone[0].prompt_logprobs == [(7, scores)]
    assert beside[1] == beside[2] == RequestUpdates(9, [], [], [], [], [], EngineLoad())


def test_every_turn_tells_its_step_and_what_was_counted() -> None:
    with Running(Spy()) as loop:
        loop.add(1, list(range(9)), max_tokens=1)
        loop.wait(lambda: 1 in loop.outbox.finished(0))
        loop.add(2, list(range(9)), max_tokens=1)
        loop.wait(lambda: 2 in loop.outbox.finished(0))
        told = loop.outbox.updates()
        steps = [(update.stats.tokens, update.stats.sequences) for update in told if update.stats.tokens]
        assert steps == [(9, 1), (1, 1)]
        assert all(update.stats.seconds > 0 for update in told if update.stats.tokens)
        assert told[-1].totals == CoreTotals(preemptions=0, prefix_queries=18, prefix_hits=8)
        for key in range(3, 7):
            loop.add(key, [key], max_tokens=30)
        loop.wait(lambda: len(loop.outbox.finished(0)) == 6)
        assert loop.outbox.updates()[-1].totals.preemptions > 0


class StepClock:
    """A clock that stands still but for the steps: each plan is a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def tick(self, plan: StepPlan) -> None:
        self.now += 1


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_time_that_runs_out_ends_a_running_sequence(ahead: int) -> None:
    clock = StepClock()
    with Running(Spy(clock.tick), ahead, clock) as loop:
        loop.add(1, [1], max_tokens=30, timeout=10)
        loop.add(2, [2], max_tokens=30, timeout=1000)
        loop.add(3, [3], max_tokens=3, timeout=10)
        loop.wait(lambda: len(loop.outbox.finished(0)) == 3)
    assert loop.outbox.finished(0) == {1: "timeout", 2: "length", 3: "length"}
    assert 10 - ahead - 1 <= len(loop.outbox.tokens(0, 1)) <= 10
    assert loop.cache.free_blocks == BLOCKS


def test_time_runs_out_in_the_line_too() -> None:
    clock = StepClock()
    with Running(Spy(clock.tick), clock=clock, rows=1) as loop:
        loop.add(1, [1], max_tokens=30)
        loop.wait(lambda: loop.outbox.tokens(0, 1))
        loop.add(2, [2], max_tokens=30, timeout=0.5)
        loop.wait(lambda: 1 in loop.outbox.finished(0))
    assert loop.outbox.finished(0) == {1: "length", 2: "timeout"}
    assert loop.outbox.tokens(0, 2) == []


def test_an_aborted_sequence_is_not_late() -> None:
    clock = StepClock()
    with Running(Spy(clock.tick), clock=clock, rows=1) as loop:
        loop.add(1, [1], max_tokens=30, timeout=5)
        loop.core.accept(AbortRequests(0, [1]))
        loop.add(2, [2], max_tokens=20)
        loop.wait(lambda: 2 in loop.outbox.finished(0))
    assert loop.outbox.finished(0) == {2: "length"}
