"""Models whose sequences have recurrent states: which are kept, who begins with them, and how often that is so.

The fake executor checks that a row goes on from the state of just the tokens before.
"""

from random import Random

import msgspec
import numpy as np
import pytest

from charonia.engine.worker.executor import Capacity
from charonia.engine.worker.fake_executor import FakeExecutor
from charonia.kvcache.block_table import BlockTable
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig, SnapshotRule
from charonia.scheduler.constraints.constrained_rows import ForcedTokens, with_forced_tokens
from charonia.scheduler.plan import IntArray, StepPlan
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceSpec

BLOCK = 16
VOCABULARY = 50_000
CONFIG = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512, max_model_len=20_000)


class StateTrial:
    """A scheduler over a cache with room for `snapshots` states, and the executor that checks its plans. Without
    `states` the model has none. `host`: blocks and snapshots in the host's memory."""

    def __init__(
        self,
        snapshots: int,
        config: SchedulerConfig = CONFIG,
        blocks: int = 8_000,
        states: bool = True,
        host: tuple[int, int] = (0, 0),
    ) -> None:
        caching = snapshots > 0 or not states
        self.cache = KVCacheManager(blocks, BLOCK, caching, host[0], snapshots, host_snapshots=host[1])
        self.scheduler = Scheduler(config, self.cache)
        capacity = Capacity(VOCABULARY, config.max_model_len, block_bytes=1, free_bytes=blocks, state_bytes=int(states))
        self.executor = FakeExecutor(capacity, block_size=BLOCK, threaded=False, check_contents=False)
        self.executor.allocate(blocks, host[0], snapshots, host[1])
        self.cached: dict[int, int] = {}
        """Tokens that each sequence found, by key."""
        self.plans: list[StepPlan] = []
        self.outputs: dict[int, list[int]] = {}

    def add(self, prompt: IntArray, new: int = 1, snapshot_at: tuple[int, ...] = ()) -> int:
        """A sequence arrives; its key."""
        key = len(self.outputs)
        self.outputs[key] = []
        hashes = self.cache.digest(prompt)
        self.scheduler.add(SequenceSpec(key=key, prompt=prompt, max_tokens=new, hashes=hashes, snapshot_at=snapshot_at))
        return key

    def run(self) -> None:
        """Serve all that has arrived."""
        flights = []
        while self.scheduler.has_work:
            while (plan := self.scheduler.schedule()) is not None:
                self.plans.append(plan)
                flights.append(self.executor.execute(plan).result())
            updates = self.scheduler.apply(flights.pop(0))
            self.cached.update(updates.started)
            tokens = iter(updates.tokens)
            for key, count in zip(updates.keys, updates.counts, strict=True):
                self.outputs[key] += [next(tokens) for _ in range(count)]
        self.scheduler.check_integrity()

    def serve(self, prompt: IntArray, new: int = 1, snapshot_at: tuple[int, ...] = ()) -> int:
        """The tokens that a lone sequence finds."""
        key = self.add(prompt, new, snapshot_at)
        self.run()
        return self.cached[key]

    @property
    def kept(self) -> list[int]:
        """The positions of all states that plans kept, in order."""
        return [position for plan in self.plans for _, position, _ in plan.state_saves.tolist()]


def text(seed: int, tokens: int) -> IntArray:
    """Tokens that no other seed has."""
    return np.random.default_rng(seed).integers(0, VOCABULARY, tokens, dtype=np.int32)


def joined(*parts: IntArray | list[int]) -> IntArray:
    return np.concatenate([np.asarray(part, np.int32) for part in parts])


def rule(**fields: int) -> SchedulerConfig:
    return msgspec.structs.replace(CONFIG, snapshots=SnapshotRule(**fields))


def test_a_prompt_is_kept_at_its_end_and_in_between() -> None:
    trial = StateTrial(40)
    trial.serve(text(0, 2_000))
    assert trial.kept == [512, 1024, 1536, 1968]
    assert trial.serve(text(0, 2_000)) == 1968
    assert len(trial.kept) == 4, "what is kept already is not kept again"


def test_a_long_prompt_is_kept_in_few_places_and_near_its_end() -> None:
    trial = StateTrial(40, rule(most_per_prompt=4))
    trial.serve(text(0, 10_000))
    assert trial.kept == [2048, 4096, 6144, 8192, 9728, 9968]


def test_a_conversation_goes_on_though_its_template_began_the_answer_otherwise() -> None:
    """Some templates end a prompt with tokens that no later prompt has."""
    trial = StateTrial(40)
    history = text(0, 1_590)
    trial.serve(joined(history, text(1, 10)))
    assert trial.serve(joined(history, text(2, 300))) == 1_568


def test_the_first_of_many_chats_keeps_the_end_of_the_message_that_all_begin_with() -> None:
    trial = StateTrial(40)
    system = text(0, 410)
    found = [trial.serve(joined(system, text(seed, 90)), snapshot_at=(410, 495)) for seed in range(1, 4)]
    assert found == [0, 400, 400]
    assert trial.kept == [400, 480, 480, 480], "nothing beside it is kept for a message that ends nearby"


def test_a_question_that_is_asked_anew_begins_behind_the_answer_before() -> None:
    trial = StateTrial(40)
    history = text(0, 900)
    trial.serve(joined(history, text(1, 250)), snapshot_at=(900, 1_150))
    assert trial.serve(joined(history, text(2, 250)), snapshot_at=(900, 1_150)) == 896


def test_states_are_kept_in_the_middle_of_a_chunk() -> None:
    """No chunk is cut for one."""
    config = msgspec.structs.replace(CONFIG, max_num_batched_tokens=1_200, target_itl_ms=0)
    trial = StateTrial(40, config)
    trial.serve(text(0, 2_000))
    assert [plan.counts.tolist() for plan in trial.plans] == [[1200], [800]]
    assert [len(plan.state_saves) for plan in trial.plans] == [2, 2]


def test_the_second_of_a_fork_keeps_its_end_for_the_third() -> None:
    trial = StateTrial(40)
    shared = text(0, 1_400)
    found = [trial.serve(joined(shared, text(seed, 300))) for seed in range(1, 4)]
    assert found == [0, 1024, 1392]
    assert trial.scheduler.totals.state_misses == 1392 - 1024


def test_a_running_sequence_keeps_the_fork_that_waiting_ones_share() -> None:
    trial = StateTrial(40)
    shared = text(0, 1_400)
    keys = [trial.add(joined(shared, text(seed, 300))) for seed in range(1, 9)]
    trial.run()
    assert [trial.cached[key] for key in keys] == [0] + [1392] * 7
    assert trial.scheduler.totals.state_misses == 0


def test_a_row_that_leaves_is_not_asked_for_the_fork_that_waiting_ones_share() -> None:
    """The first is aborted while its first chunk is computed, and holds its row until that is done."""
    config = msgspec.structs.replace(CONFIG, max_num_batched_tokens=64)
    trial = StateTrial(40, config)
    shared = text(0, 1_400)
    first, second = (trial.add(joined(shared, text(seed, 300))) for seed in (1, 2))
    rows = trial.scheduler._rows
    plan = trial.scheduler.schedule()
    assert plan is not None
    flight = trial.executor.execute(plan).result()
    trial.scheduler.abort([first])
    assert rows.releasing
    assert rows.states is not None
    assert rows.states.saves is not None
    asked: list[int] = []
    ask = rows.states.saves.ask

    def listen(block_hash: bytes, position: int, tables: dict[int, BlockTable], scheduled: IntArray) -> None:
        asked.extend(tables)
        ask(block_hash, position, tables, scheduled)

    rows.states.saves.ask = listen  # type: ignore[method-assign, assignment]
    third = trial.add(joined(shared, text(3, 300)))
    assert asked == [row for row in rows.tables if rows.keys[row] == second]
    trial.scheduler.apply(flight)
    trial.run()
    assert trial.cached[third] == 1392


def test_no_state_is_kept_that_spares_little() -> None:
    trial = StateTrial(40)
    shared = text(0, 1_040)
    found = [trial.serve(joined(shared, text(seed, 100))) for seed in range(1, 4)]
    assert found == [0, 1024, 1024]
    assert trial.kept == [512, 1024, 1120, 1120, 1120]


@pytest.mark.parametrize("tokens", [65, 80, 96])
def test_a_short_prompt_that_comes_again_is_found(tokens: int) -> None:
    """From the host's memory too, by the next turns of its conversation, and while the first runs."""
    trial = StateTrial(4, host=(40, 40))
    prompt = text(0, tokens)
    assert [trial.serve(prompt, new=30), trial.serve(prompt)] == [0, 64]
    for seed in range(1, 5):  # makes room of it
        trial.serve(text(seed, 200))
    assert trial.serve(prompt) == 64
    assert trial.cache.states is not None
    assert trial.cache.states.brought_back == 1
    turn = joined(prompt, trial.outputs[0], text(9, 130 - tokens))
    assert [trial.serve(turn), trial.serve(turn)] == [64, 128]
    keys = [trial.add(text(8, tokens)) for _ in range(2)]
    trial.run()
    assert [trial.cached[key] for key in keys] == [0, (tokens - 1) // BLOCK * BLOCK]


def test_generated_text_is_kept_near_its_end() -> None:
    trial = StateTrial(40)
    prompt = text(0, 500)
    trial.serve(prompt, new=600)
    assert trial.kept == [480, 512, 640, 768, 896, 1024]
    history = joined(prompt, trial.outputs[0], text(1, 50))
    assert trial.serve(history) == 1024


def test_a_long_answer_takes_the_room_of_few_snapshots() -> None:
    trial = StateTrial(4)
    kept = text(1, 90)
    trial.serve(kept)
    trial.serve(text(0, 90), new=3_000)
    assert trial.serve(kept) == 64, "older states of the answer made room for newer ones"


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_preempted_sequence_goes_on_from_its_last_state(ahead: int) -> None:
    config = msgspec.structs.replace(
        CONFIG, ahead=ahead, max_num_seqs=4, snapshots=SnapshotRule(generated_stride=32, least_gain=16)
    )
    recomputed: list[int] = []
    for states in (False, True):
        trial = StateTrial(12 * states, config, blocks=30, states=states)
        for seed in range(4):
            trial.add(text(seed, 160 - 40 * seed), new=40 + 20 * seed)
        trial.run()
        assert all(len(tokens) == 40 + 20 * key for key, tokens in trial.outputs.items())
        totals = trial.scheduler.totals
        assert totals.preemptions
        recomputed.append(totals.recomputed_tokens)
    assert recomputed[1] <= recomputed[0] + totals.preemptions * 32, "as much as its blocks allow, but for a stride"


def test_without_room_for_snapshots_every_prompt_is_computed() -> None:
    trial = StateTrial(0)
    assert [trial.serve(text(0, 2_000)) for _ in range(2)] == [0, 0]


SHARED, OWN = 4_096, 200


def test_mix_of_one_long_lived_prefix_with_others_between() -> None:
    """32 requests over a beginning of 4 k tokens; after each, two prompts that come once. The snapshots suffice for
    those of four prompts."""
    trial = StateTrial(40)
    shared, hits = text(0, SHARED), 0
    for number in range(32):
        hits += trial.serve(joined(shared, text(100 + number, OWN)), new=20) >= SHARED - BLOCK
        for other in range(2):
            trial.serve(text(1_000 + 2 * number + other, 3_000), new=20)
    assert hits >= 30
    assert trial.cache.states is not None
    assert trial.cache.states.evicted
    shifted = [
        trial.serve(joined(shared[: SHARED - 100], text(200 + number, OWN))) >= SHARED - 100 - BLOCK - 512
        for number in range(32)
    ]
    assert sum(shifted) == 32


def test_mix_of_conversations_that_grow() -> None:
    """Eight conversations of eight turns over a beginning of 4 k tokens, in turn and each answered with 150 tokens: a
    turn finds what the last one had, but for its answer's last tokens."""
    trial = StateTrial(60)
    shared, hits = text(0, SHARED), 0
    histories = [joined(shared, text(10 + number, OWN)) for number in range(8)]
    for turn in range(8):
        for number, history in enumerate(histories):
            known = len(history) - OWN if turn else SHARED
            found = trial.serve(history, new=150)
            hits += found >= known - 150 - 2 * BLOCK
            answer = trial.outputs[len(trial.outputs) - 1]
            histories[number] = joined(history, answer, text(100 * turn + number, OWN))
    assert hits >= 62
    shifted = [
        trial.serve(joined(history[: -OWN - 100], text(2_000 + number, 100)))
        for number, history in enumerate(histories)
    ]
    assert [found >= len(history) - OWN - 512 - 150 for found, history in zip(shifted, histories, strict=True)] == (
        [True] * 8
    )


@pytest.mark.parametrize(("host", "hit"), [((0, 0), 0), ((900, 0), 0), ((0, 40), 0), ((900, 40), 1_072)])
def test_conversations_that_the_device_has_no_room_for_go_on_from_the_host(host: tuple[int, int], hit: int) -> None:
    """Of six, the device has some blocks and two states: both of the others have to be on the host."""
    trial = StateTrial(6, blocks=150, host=host)
    texts = [text(seed, 1_100) for seed in range(6)]
    for history in texts:
        trial.serve(history)
    hits = [trial.serve(joined(history, text(9, 30))) for history in texts]
    assert hits == [hit] * 6
    assert trial.cache.states is not None
    assert (trial.cache.states.brought_back, trial.scheduler.totals.restored) == (5 if hit else 0, 6 * hit)


def test_requests_at_once_over_one_prefix_wait_for_its_state() -> None:
    trial = StateTrial(40, msgspec.structs.replace(CONFIG, ahead=1))
    shared = text(0, SHARED - 7)
    keys = [trial.add(joined(shared, text(1 + number, OWN)), new=8) for number in range(64)]
    trial.run()
    assert sum(trial.cached[key] >= SHARED - 7 - BLOCK for key in keys) == 63


def test_a_prompt_is_compared_with_a_preempted_sequence_whose_last_tokens_have_no_hash_yet() -> None:
    """They were forced, more than it got blocks for, and it was preempted before it computed them."""
    trial = StateTrial(8, blocks=16)
    trial.add(text(0, 90), new=60)
    spec = SequenceSpec(
        key=1,
        prompt=text(1, 60),
        max_tokens=150,
        hashes=trial.cache.digest(text(1, 60)),
        priority=1,
        constrained=True,
    )
    trial.scheduler.add(spec)
    plan = trial.scheduler.schedule()
    assert plan is not None
    result = trial.executor.execute(plan).result()
    [row] = trial.scheduler.constrained_rows
    trial.scheduler.apply(with_forced_tokens(result, {row: ForcedTokens([7] * 120)}))
    trial.outputs[1] = []
    trial.add(joined(text(1, 60), result.tokens[1:], [7] * 110), new=2)
    trial.run()
    assert trial.scheduler.totals.preemptions == 1
    assert len(trial.outputs[2]) == 2


def test_any_order_of_conversations_is_served_right() -> None:
    """The executor checks each state; answers are the same whatever was found."""
    random = Random(0)
    trial = StateTrial(7, msgspec.structs.replace(CONFIG, ahead=1), blocks=900)
    streams = [text(seed, 3_000) for seed in range(3)]
    for _ in range(12):
        for _ in range(random.randint(1, 6)):
            trial.add(random.choice(streams)[: random.randint(1, 3_000)], random.randint(1, 40))
        trial.run()
    assert sum(trial.cached.values()) > 10_000
