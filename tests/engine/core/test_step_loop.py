"""The step loop in a thread of this process, with the fake executor and an outbox that remembers."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from charonia.core.errors import InvalidArgument
from charonia.core.logprobs import Logprobs
from charonia.core.metrics import EngineTotals
from charonia.engine.checkpoint.encoder_shape import EncoderShape
from charonia.engine.core.messages import (
    AbortRequests,
    AddRequest,
    EngineLoad,
    FromCore,
    PatientWorkWaits,
    RequestRejected,
    RequestUpdates,
    Shutdown,
)
from charonia.engine.core.step_loop import EngineCore
from charonia.engine.core.warm_up import warm_up
from charonia.engine.drafters.prediction import PredictionDrafter
from charonia.engine.worker.executor import StepFuture
from charonia.engine.worker.fake_executor import FakeExecutor
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.drafts.speculation import PREDICTION, DraftRequest, Speculation
from charonia.scheduler.encoders.encoder_rows import EncoderRows
from charonia.scheduler.plan import MaskArray, MaskSource, StepPlan, StepResult
from charonia.scheduler.prefill_budget import PrefillBudget
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceSpec
from charonia.telemetry.llm_metrics import EngineState

BLOCKS = 16
BLOCK_SIZE = 4


class Memory:
    """An outbox that keeps everything."""

    def __init__(self) -> None:
        self.sent: list[FromCore] = []

    def send(self, message: FromCore) -> None:
        self.sent.append(message)

    def updates(self) -> list[RequestUpdates]:
        return [message for message in list(self.sent) if isinstance(message, RequestUpdates)]

    def tokens(self, key: int) -> list[int]:
        found: list[int] = []
        for message in self.updates():
            rest = iter(message.updates.tokens)
            for owner, count in zip(message.updates.keys, message.updates.counts, strict=True):
                taken = [next(rest) for _ in range(count)]
                found += taken if owner == key else []
        return found

    def finished(self) -> dict[int, str]:
        return dict(entry for message in self.updates() for entry in message.updates.finished)

    def refused(self) -> list[RequestRejected]:
        return [message for message in list(self.sent) if isinstance(message, RequestRejected)]


class Spy(FakeExecutor):
    """Calls `watch` with each plan it is given."""

    def __init__(self, watch: Callable[[StepPlan], None] = lambda plan: None, threaded: bool = True) -> None:
        super().__init__(block_size=BLOCK_SIZE, threaded=threaded)
        self._watch = watch

    def execute(self, plan: StepPlan, masks: MaskSource | None = None) -> StepFuture:
        future = super().execute(plan, masks)
        self._watch(plan)
        return future


class Running:
    """A core that turns in a thread."""

    def __init__(
        self,
        executor: FakeExecutor,
        ahead: int = 0,
        clock: Callable[[], float] = time.monotonic,
        rows: int = 4,
        speculation: Speculation | None = None,
        encoder: EncoderShape | None = None,
        cache_hit_threshold: float = 0.0,
        leaves_time: bool = False,
    ) -> None:
        config = SchedulerConfig(
            max_num_seqs=rows,
            max_num_batched_tokens=16,
            max_model_len=40,
            ahead=ahead,
            cache_hit_threshold=cache_hit_threshold,
        )
        self.cache = cache = KVCacheManager(BLOCKS, BLOCK_SIZE)
        self.executor = executor
        self.executor.allocate(BLOCKS)
        scheduler = Scheduler(config, cache, speculation=speculation)
        self.core = EngineCore(scheduler, cache, executor, clock=clock, encoder=encoder, leaves_time=leaves_time)
        self.outbox = Memory()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Running":
        warm_up(self.core)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.core.inbox.accept(Shutdown())
        self._thread.join(30)
        self.executor.close()
        assert not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.core.run(self.outbox.send)
        except RuntimeError as error:
            self.error = error

    def add(
        self,
        key: int,
        prompt: list[int],
        max_tokens: int = 4,
        stop: int = -1,
        timeout: float = 0.0,
        encoded: EncoderRows | None = None,
    ) -> None:
        stops, tokens = frozenset([stop] if stop >= 0 else []), np.array(prompt, np.int32)
        spec = SequenceSpec(key=key, prompt=tokens, max_tokens=max_tokens, stop_token_ids=stops, encoded=encoded)
        self.core.inbox.accept(AddRequest(spec, timeout=timeout))

    def wait(self, holds: Callable[[], object]) -> None:
        deadline = time.monotonic() + 30
        while not holds():
            assert time.monotonic() < deadline, self.outbox.sent[-3:]
            time.sleep(0.001)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_requests_get_their_own_tokens(ahead: int) -> None:
    with Running(Spy(), ahead) as loop:
        loop.add(7, [10, 11], max_tokens=5)
        loop.add(2**40, [500], max_tokens=6)
        loop.add(8, [20], max_tokens=9, stop=23)
        loop.wait(lambda: len(loop.outbox.finished()) == 3)
    assert loop.outbox.tokens(7) == [12, 13, 14, 15, 16]
    assert loop.outbox.tokens(2**40) == [501, 502, 503, 504, 505, 506]
    assert loop.outbox.tokens(8) == [21, 22, 23]
    assert loop.outbox.finished() == {7: "length", 2**40: "length", 8: "stop"}


def test_one_message_per_step() -> None:
    with Running(Spy()) as loop:
        for key in range(4):
            loop.add(key, [key], max_tokens=20)
        loop.wait(lambda: len(loop.outbox.finished()) == 4)
    steps = [message.step for message in loop.outbox.updates() if message.updates.keys or message.updates.started]
    assert len(steps) == len(set(steps))


@pytest.mark.parametrize("leaves_time", [False, True])
def test_steps_leave_time_to_what_waits_for_it(leaves_time: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    pause = Scheduler.pause_for_patient_work
    monkeypatch.setattr(Scheduler, "pause_for_patient_work", lambda one: pauses.append(pause(one)) or pauses[-1])
    with Running(Spy(), leaves_time=leaves_time) as loop:
        for key, waits in enumerate((False, True, False)):
            before = len(pauses)
            loop.core.inbox.accept(PatientWorkWaits(waits))
            loop.add(key, [1], max_tokens=8)
            loop.wait(lambda: key in loop.outbox.finished())  # noqa: B023
            assert len(pauses) - before == (8 if waits and leaves_time else 0)
    assert all(seconds > 0 for seconds in pauses)


def test_who_leaves_ends_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it was meant to last; so do those that no longer wait, and the loop's own end. Requests do not."""
    paused = threading.Semaphore(0)
    monkeypatch.setattr(PrefillBudget, "patient_seconds", lambda *_: paused.release() or 1e6)
    with Running(Spy(), leaves_time=True) as loop:
        loop.core.inbox.accept(PatientWorkWaits(True))
        loop.add(1, [1] * 8, max_tokens=30)
        assert paused.acquire(timeout=30)
        loop.add(2, [2] * 8, max_tokens=1)
        assert not paused.acquire(timeout=0.05)
        loop.core.inbox.accept(AbortRequests([1]))
        assert paused.acquire(timeout=30), "the first step has ended, and the other request's has begun"
        assert loop.core.scheduler.running == 1
        loop.core.inbox.accept(PatientWorkWaits(False))
        loop.wait(lambda: 2 in loop.outbox.finished())
        loop.core.inbox.accept(PatientWorkWaits(True))
        loop.add(3, [3], max_tokens=30)
        assert paused.acquire(timeout=30)
    assert loop.cache.free_blocks < BLOCKS
    assert len(loop.outbox.tokens(1)) <= 1
    assert loop.core.scheduler._elapsed < 1e3, "prompts have waited as long as it lasted"


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_an_abort_frees_its_blocks_within_ahead_plus_one_steps(ahead: int) -> None:
    seen: list[tuple[int, int]] = []
    arrival = 12

    def abort_midway(plan: StepPlan) -> None:
        if plan.step == arrival:
            loop.core.inbox.accept(AbortRequests([1]))
        if plan.step >= arrival:
            seen.append((loop.outbox.updates()[-1].step, loop.cache.free_blocks))

    with Running(Spy(abort_midway), ahead) as loop:
        loop.add(1, [1] * 8, max_tokens=30)
        loop.add(2, [2] * 8, max_tokens=30)
        loop.wait(lambda: 2 in loop.outbox.finished())
    applied_at_arrival, free_at_arrival = seen[0]
    free_later = [free for applied, free in seen if applied - applied_at_arrival >= ahead + 1]
    assert applied_at_arrival == arrival - ahead - 1
    assert free_later[0] > free_at_arrival
    assert len(loop.outbox.tokens(1)) < 30
    assert loop.cache.free_blocks == BLOCKS


def test_an_abort_of_a_waiting_or_unknown_sequence() -> None:
    with Running(Spy()) as loop:
        for key in range(6):
            loop.add(key, [key], max_tokens=10)
        loop.core.inbox.accept(AbortRequests([5, 99]))
        loop.wait(lambda: len(loop.outbox.finished()) == 5)
        loop.wait(
            lambda: (
                loop.outbox.updates()[-1].load == EngineLoad(0, 0, BLOCKS, loop.outbox.updates()[-1].load.step_seconds)
            )
        )
    assert loop.outbox.tokens(5) == []


IMPOSSIBLE = [([], 1, "prompt"), ([1] * 41, 1, "prompt"), ([1] * 30, 11, "max_tokens")]


def test_the_impossible_fails_alone_and_names_its_field() -> None:
    with Running(Spy()) as loop:
        loop.add(1, [1], max_tokens=8)
        for key, (prompt, max_tokens, _) in enumerate(IMPOSSIBLE, start=100):
            loop.add(key, prompt, max_tokens)
        loop.wait(lambda: loop.outbox.finished() and len(loop.outbox.refused()) == len(IMPOSSIBLE))
    refused = {message.key: message for message in loop.outbox.refused()}
    assert [refused[key].error.field for key in sorted(refused)] == [field for _, _, field in IMPOSSIBLE]
    assert all(str(message.error.field) in message.error.message for message in refused.values())
    assert len(loop.outbox.tokens(1)) == 8


def test_no_default_refuses_what_an_encoder_has_read() -> None:
    """The prompt of its decoder is a token or two, of which none is ever cached."""
    rows = EncoderRows(2, b"digest", bytes(32), "float32")
    with Running(Spy(), encoder=EncoderShape(2, 4, vocab_size=384), cache_hit_threshold=0.5) as loop:
        loop.add(1, [5], encoded=rows)
        loop.wait(lambda: loop.outbox.finished())
    assert loop.outbox.finished() == {1: "length"}
    with Running(Spy(), cache_hit_threshold=0.5) as loop:
        loop.add(1, [5])
        loop.add(2, [5], encoded=rows)
        loop.wait(lambda: loop.outbox.finished() and loop.outbox.refused())
    assert loop.outbox.finished() == {1: "cache_threshold"}
    assert "no encoder" in loop.outbox.refused()[0].error.message


def test_an_idle_loop_turns_at_least_once_a_second() -> None:
    with Running(Spy()) as loop:
        loop.wait(lambda: len(loop.outbox.updates()) >= 2)
        beat = loop.outbox.updates()[-1]
    assert not any(beat.updates)
    assert beat.load.free_blocks == BLOCKS


def test_a_model_that_computes_no_numbers_is_refused() -> None:
    class Damaged(Spy):
        def _logprobs(self, token: int, top: int | None) -> Logprobs | None:
            return None if top is None else Logprobs(float("nan"), [], [])

    with pytest.raises(InvalidArgument, match="computes no numbers"), Running(Damaged()):
        pass


def test_what_the_executor_raises_ends_the_loop() -> None:
    class Broken(Spy):
        def _step(self, plan: StepPlan, masks: MaskArray | None) -> StepResult:
            if plan.step > 6:  # warm-up takes some
                raise RuntimeError("out of memory")
            return super()._step(plan, masks)

    with Running(Broken()) as loop:
        loop.add(1, [1], max_tokens=20)
        loop.wait(lambda: loop.error)
    assert str(loop.error) == "out of memory"


def test_a_thread_that_dies_ends_the_loop() -> None:
    with Running(Spy()) as loop:
        loop.core.inbox.fail(RuntimeError("the inbox broke"))
        loop.wait(lambda: loop.error)
    assert str(loop.error) == "the inbox broke"


def test_every_turn_tells_its_step_and_what_was_counted() -> None:
    with Running(Spy()) as loop:
        loop.add(1, list(range(9)), max_tokens=1)
        loop.wait(lambda: 1 in loop.outbox.finished())
        loop.add(2, list(range(9)), max_tokens=1)
        loop.wait(lambda: 2 in loop.outbox.finished())
        told = loop.outbox.updates()
        steps = [(update.stats.tokens, update.stats.sequences) for update in told if update.stats.tokens]
        assert steps == [(9, 1), (1, 1)]
        assert all(update.stats.seconds > 0 for update in told if update.stats.tokens)
        spent = told[-1].totals.sequence_seconds
        assert spent.keys() == {"running"}
        assert spent["running"] > 0
        assert told[-1].totals == EngineTotals(preemptions=0, prefix_queries=18, prefix_hits=8, sequence_seconds=spent)
        for key in range(3, 7):
            loop.add(key, [key], max_tokens=30)
        loop.wait(lambda: len(loop.outbox.finished()) == 6)
        totals = loop.outbox.updates()[-1].totals
        assert totals.preemptions > 0
        assert totals.recomputed_tokens > 0
        assert totals.sequence_seconds["preempted"] > 0


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
        loop.wait(lambda: len(loop.outbox.finished()) == 3)
    assert loop.outbox.finished() == {1: "timeout", 2: "length", 3: "length"}
    assert 10 - ahead - 1 <= len(loop.outbox.tokens(1)) <= 10
    assert loop.cache.free_blocks == BLOCKS


def test_time_runs_out_in_the_line_too() -> None:
    clock = StepClock()
    with Running(Spy(clock.tick), clock=clock, rows=1) as loop:
        loop.add(1, [1], max_tokens=30)
        loop.wait(lambda: loop.outbox.tokens(1))
        loop.add(2, [2], max_tokens=30, timeout=0.5)
        loop.wait(lambda: 1 in loop.outbox.finished())
    assert loop.outbox.finished() == {1: "length", 2: "timeout"}
    assert loop.outbox.tokens(2) == []


def test_an_aborted_sequence_is_not_late() -> None:
    clock = StepClock()
    with Running(Spy(clock.tick), clock=clock, rows=1) as loop:
        loop.add(1, [1], max_tokens=30, timeout=5)
        loop.core.inbox.accept(AbortRequests([1]))
        loop.add(2, [2], max_tokens=20)
        loop.wait(lambda: 2 in loop.outbox.finished())
    assert loop.outbox.finished() == {2: "length"}


class NextTwo:
    """Drafts one token that is right, and one that is not."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [[int([*request.prompt, *request.outputs][-1]) + 1, 0] for request in requests]


def test_metrics_tell_drafters_apart() -> None:
    """A prediction and the configured drafter serve beside each other, and the updates say what each of them did."""
    speculation = Speculation({PREDICTION: PredictionDrafter(), "ngram": NextTwo()}, 2, 32_000)
    speculation.costs.observe_step = lambda *observed: None  # type: ignore[method-assign]  # drafts are always worth it
    prompt, right = np.array([1, 2, 3], np.int32), np.arange(4, 16, dtype=np.int32)
    with Running(FakeExecutor(block_size=BLOCK_SIZE), speculation=speculation) as running:
        for key, prediction in ((1, right), (2, None)):
            spec = SequenceSpec(key=key, prompt=prompt, max_tokens=12, prediction=prediction)
            running.core.inbox.accept(AddRequest(spec))
        running.wait(lambda: len(running.outbox.finished()) == 2)
        assert running.outbox.tokens(1) == running.outbox.tokens(2) == right.tolist()
        drafters = running.outbox.updates()[-1].totals.drafters
    series: dict[str, Counter[str]] = {}
    for reading in EngineState(totals=EngineTotals(drafters=drafters)).readings():
        if drafter := reading.labels.get("drafter"):
            series.setdefault(drafter, Counter())[reading.family] += reading.value
    assert series.keys() == {PREDICTION, "ngram"}
    for name in series:
        accepted = series[name]["charonia_accepted_tokens_total"]
        assert series[name]["charonia_drafting_seconds_total"] > 0
        assert series[name]["charonia_draft_tokens_total"] >= accepted > 0
        assert series[name]["charonia_accepted_tokens_per_position_total"] == accepted
    assert series["ngram"]["charonia_draft_tokens_total"] > series["ngram"]["charonia_accepted_tokens_total"]
