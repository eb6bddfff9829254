"""A scheduler, its cache and the fake executor under any interleaving of calls, checked after each.

Used by the tests (random and under hypothesis) and by `tests.proofs.scheduler`. The fake's next token is the
last one plus one, so every token of every sequence is known beforehand.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import msgspec
import numpy as np

from charonia.core.resolved_sampling import ResolvedSampling
from charonia.engine.core.cache_events import CacheEventRecorder
from charonia.engine.worker.executor import Capacity
from charonia.engine.worker.fake_executor import FakeBehaviour, FakeExecutor
from charonia.kvcache.layer_groups import ONE_GROUP, LayerGroups
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.adapters.adapter_room import MAX_WAIT_STEPS
from charonia.scheduler.config import SchedulerConfig, SnapshotRule
from charonia.scheduler.constraints.constrained_rows import ForcedTokens, with_forced_tokens
from charonia.scheduler.drafts.speculation import DraftRequest, Speculation
from charonia.scheduler.encoders.encoder_rows import EmbeddedSpan
from charonia.scheduler.plan import StepPlan, StepResult, StepUpdates
from charonia.scheduler.prefill_budget import MIN_CHUNK_TOKENS
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceSpec
from charonia.scheduler.waiting_queue import RANK_ONLY_INTERVAL

SMALL = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8, max_model_len=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerWorld:
    """The sizes, rules and load of a trial. `host_blocks`, `host_snapshots`: for evicted ones. `snapshots`: of states,
    which the model has unless it is None: then each step brings a token where it samples; `draft_states`: those that
    all rows' drafts may take. `groups`: of its layers. `live`: sequences that it adds at once. Of a random trial's
    prompts, `long_prompts` may be of any length; `outputs`: the most new tokens that it asks for.
    `tenants`: their number; each weighs twice the one before. `adapters`: their number, beside the model itself.
    `token_seconds`: the time of a token that the scheduler is told, roughly; 0 for none.
    `drafts`: the most tokens that are drafted for a sequence in a step, each right with `draft_accuracy`.
    """

    blocks: int = 24
    block_size: int = 4
    prefix_caching: bool = True
    host_blocks: int = 0
    snapshots: int | None = None
    host_snapshots: int = 0
    draft_states: int = 0
    groups: LayerGroups = ONE_GROUP
    burst: tuple[int, int] = (1, 1)
    live: int = 16
    long_prompts: float = 0.3
    outputs: int = 20
    tenants: int = 1
    adapters: int = 0
    token_seconds: float = 0.0
    drafts: int = 0
    draft_accuracy: float = 0.0
    scheduler: SchedulerConfig = SMALL

    @classmethod
    def drawn(cls, random: Random) -> "SchedulerWorld":
        rows = random.choice((1, 2, 4, 8))
        ahead = random.choice((0, 1, 2))
        adapters = random.choice((0, 0, 2, 5))
        world = cls(
            blocks=random.choice((8, 12, 24, 64)),
            block_size=random.choice((1, 2, 4)),
            prefix_caching=random.random() < 0.8,
            host_blocks=random.choice((0, 0, 1, 7, 40)),
            burst=random.choice(((1, 1), (1, 1), (0, 1), (1, 3), (0, 3))),
            live=4 * rows,
            long_prompts=random.choice((0.0, 0.1, 0.4)),
            outputs=random.choice((4, 20, 60)),
            tenants=random.choice((1, 1, 2, 4)),
            adapters=adapters,
            token_seconds=random.choice((0.0, 0.0, 1e-4, 0.02, 0.2)),
            drafts=random.choice((0, 0, 1, 2, 5)),
            draft_accuracy=random.choice((0.0, 0.5, 0.9, 1.0)),
            scheduler=SchedulerConfig(
                max_num_seqs=rows,
                max_num_batched_tokens=rows + random.choice((0, 1, 4, 16)),
                max_model_len=random.choice((16, 48, 96)),
                ahead=ahead,
                in_flight_per_sequence=random.choice((None, None, 1)),
                admission=random.choice(("optimistic", "optimistic", "no_evict")),
                ageing_steps=random.choice((1, 4, 16)),
                target_ttft_ms=random.choice((None, None, 100)),
                target_itl_ms=random.choice((None, None, 0, 50)),
                max_loras=random.choice((1, 2)) if adapters else 0,
            ),
        )
        kept = random.random()
        if kept > 0.65:
            world = world.with_windows(random)
        return world.with_states(random) if 0.3 < kept < 0.8 else world

    def with_states(self, random: Random) -> "SchedulerWorld":
        """The same for a model whose sequences have states."""
        rule = SnapshotRule(
            prompt_stride=random.choice((1, 4, 12)),
            most_per_prompt=random.choice((1, 3, 8)),
            generated_stride=random.choice((1, 5, 16)),
            least_gain=random.choice((1, 4, 10)),
            prompt_tail=random.choice((0, 1, 6)),
        )
        return replace(
            self,
            snapshots=random.choice((0, 1, 2, 4, 9, 40)),
            host_snapshots=random.choice((0, 0, 1, 3, 12)),
            burst=(max(self.burst[0], 1), max(self.burst)),
            draft_states=random.choice((0, 1, 3, 8, 40)),
            scheduler=msgspec.structs.replace(self.scheduler, snapshots=rule),
        )

    def with_windows(self, random: Random) -> "SchedulerWorld":
        """The same for a model with layers that keep the last tokens alone, or with no others."""
        full, sliding = random.choice(((1, 1), (1, 1), (1, 3), (2, 3), (0, 1)))
        window = random.choice((1, 2, 5, 8, 20))
        return replace(self, blocks=self.blocks * (full + sliding), groups=LayerGroups(full, sliding, window))

    def staged(self, stages: int) -> "SchedulerWorld":
        """The same over a pipeline, as a step loop schedules it; unchanged for one stage."""
        if stages == 1:
            return self
        scheduler = msgspec.structs.replace(self.scheduler, ahead=stages - 1, in_flight_per_sequence=1)
        return replace(self, scheduler=scheduler)


VOCABULARY = 1000
FAMILY = 250  # a family's prompts are prefixes of one stream, so they share blocks, generated ones too


@dataclass(slots=True)
class ExpectedSequence:
    """The tokens that a sequence has yet to give. In plans: when it arrived, until when newcomers may overtake it, and
    when it must have been admitted. `work`: plans it needs for itself. Of its prompt's tokens from position `scored` to
    `prompt`, scores are to come."""

    tokens: deque[int]
    reason: str
    arrived: int
    overtaken_until: int
    deadline: int
    work: int
    prompt: int
    scored: int
    started: bool = False


class _RandomDrafter:
    """Each drafted token is the right one with this probability; now and then there are fewer, or none."""

    def __init__(self, random: Random, accuracy: float) -> None:
        self._random, self._accuracy = random, accuracy

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [self._guess(request) for request in requests]

    def _guess(self, request: DraftRequest) -> list[int]:
        last = int([*request.prompt, *request.outputs][-1])
        tokens = range(last + 1, last + 1 + self._random.choice((0, 1, request.k, request.k + 1)))
        wrong = (self._random.random() > self._accuracy for _ in tokens)
        return [
            self._random.randrange(-1, VOCABULARY + 1) if each else token
            for token, each in zip(tokens, wrong, strict=True)
        ]


class SchedulerTrial:
    """Each method is one call of the scheduler or the cache, then a check of everything; `operations` counts them.
    `recorder`: follows the cache, and publishes after each call.

    A method raises AssertionError when a check fails.
    """

    def __init__(self, world: SchedulerWorld, seed: int = 0, recorder: CacheEventRecorder | None = None) -> None:
        self.world = world
        self._recorder = recorder
        snapshots = world.snapshots or 0
        prefix_caching = world.prefix_caching and world.snapshots != 0
        draft_states = None if world.snapshots is None else world.draft_states
        steps = world.scheduler.ahead + 1
        groups = world.groups._replace(in_flight=steps * world.scheduler.max_num_batched_tokens)
        sizes = world.blocks, world.block_size, prefix_caching, world.host_blocks, snapshots, draft_states
        self.cache = KVCacheManager(*sizes, groups, world.host_snapshots, recorder)
        drafter = _RandomDrafter(Random(seed + 1), world.draft_accuracy)
        speculation = Speculation({"trial": drafter}, world.drafts, VOCABULARY) if world.drafts else None
        if speculation is not None:
            speculation.possible_drafts = lambda key, drafts, most: drafts[:most]
        self.scheduler = Scheduler(world.scheduler, self.cache, speculation=speculation)
        self.executor = FakeExecutor(
            Capacity(
                VOCABULARY,
                world.scheduler.max_model_len,
                block_bytes=1,
                free_bytes=world.blocks,
                state_bytes=0 if world.snapshots is None else 1,
                groups=world.groups,
            ),
            block_size=world.block_size,
            behaviour=FakeBehaviour(burst=world.burst, seed=seed),
            threaded=False,
        )
        states = snapshots + world.draft_states
        self.executor.allocate(world.blocks, world.host_blocks, states, world.host_snapshots)
        self.executor.adapters.update(f"adapter {number}" for number in range(1, world.adapters + 1))
        self._adapter_of: dict[int, str] = {}  # by row
        self.operations = 0
        self.plans = 0
        self.resumed = 0  # rows that went on from a state before wrong drafts
        self.longest_wait = 0.0  # of the patience a sequence had
        self.expected: dict[int, ExpectedSequence] = {}
        self._flights: deque[tuple[StepPlan, StepResult]] = deque()
        self._random = Random(seed)
        self._arrivals = 0

    @property
    def crowded(self) -> bool:
        return len(self.expected) >= self.world.live

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    def longest(self) -> int:
        """The tokens, prompt and new ones, that a sequence may have here."""
        return min(self.world.scheduler.max_model_len, self.cache.longest)

    def arrive(
        self,
        *,
        family: int,
        prompt: int,
        new: int,
        priority: int = 0,
        stop: int | None = None,
        tenant: int = 0,
        scored: bool = False,
        constrained: bool = False,
        adapter: int = 0,
        drafts_wanted: int | None = None,
        embedded: tuple[EmbeddedSpan, ...] = (),
    ) -> int:
        """Add a sequence with `prompt` tokens of a family. `stop`: which of its new tokens is a stop token, from 1;
        `scored`: it asks for the log-probabilities of its prompt; `constrained`: what follows its tokens may come of
        the host; `adapter`: 0 is none; `drafts_wanted` and `embedded`: as in `SequenceSpec`."""
        key, self._arrivals = self._arrivals, self._arrivals + 1
        first = FAMILY * family
        tokens = np.arange(first, first + prompt, dtype=np.int32)
        least = max(new, 1)
        ends = least if stop is None else min(stop, least)
        outputs = [(first + prompt + n) % VOCABULARY for n in range(ends)]
        reason = "stop" if stop is not None and stop <= least else "length"
        overtaken_until, deadline = self._patience(prompt, priority)
        work = self._work(prompt, new)
        self._burden_others(work)
        unscored = 1 if scored else prompt
        self.expected[key] = ExpectedSequence(
            deque(outputs), reason, self.plans, overtaken_until, deadline, work, prompt, unscored
        )
        stops = frozenset() if stop is None else frozenset([(first + prompt + stop - 1) % VOCABULARY])
        name = f"adapter {adapter}" if adapter else ""
        spec = SequenceSpec(
            key=key,
            prompt=tokens,
            max_tokens=new,
            sampling=ResolvedSampling(prompt_logprobs=1 if scored else None),
            stop_token_ids=stops,
            priority=priority,
            tenant=f"tenant {tenant}",
            weight=float(1 << tenant),
            constrained=constrained,
            drafts_wanted=drafts_wanted,
            adapter=name,
            embedded=embedded,
        )
        self.scheduler.add(msgspec.structs.replace(spec, hashes=self.cache.digest(tokens, spec.extras)))
        self._check()
        return key

    def _work(self, prompt: int, new: int) -> int:
        """Plans a sequence needs that nobody keeps from running: the others decode beside it, each result may be
        late, and some bring nothing. Where steps are timed, a prompt gets its least chunk, or half of it, or the next
        time."""
        config = self.world.scheduler
        chunk = config.max_num_batched_tokens - config.max_num_seqs + 1
        if self.world.token_seconds:
            chunk, new = max(min(chunk, MIN_CHUNK_TOKENS) // 2, 1), new + prompt
        chances = 1 if self.world.burst[0] else 8
        return (-(-prompt // chunk) + max(new, 1)) * (config.ahead + 1) * chances

    def _patience(self, prompt: int, priority: int) -> tuple[int, int]:
        """Until when newcomers may overtake, and when it must be admitted if none does: the most senior sequence
        always gets on, so everybody before it runs in turn at worst; then those that took the rows while it stood
        aside for a block it can share, twice for good measure."""
        config = self.world.scheduler
        overtaken = priority * config.ageing_steps + prompt // config.rank_step_tokens
        before = sum(expected.work for expected in self.expected.values())
        aside = 2 * config.max_num_seqs * self._longest_work()
        if self.world.tenants > 1:  # everybody before it goes by rank, and that is one admission in so many
            before = (len(self.expected) + 1) * RANK_ONLY_INTERVAL * self._longest_work()
        if self.world.adapters:  # all others may be held for longer, and go first
            aside += MAX_WAIT_STEPS + 2 * before
        return self.plans + overtaken, self.plans + overtaken + before + aside

    def _longest_work(self) -> int:
        return self._work(self.longest(), min(self.world.outputs, self.longest()))

    def _burden_others(self, work: int) -> None:
        """Extend the deadlines of the sequences that a newcomer may overtake."""
        if self.world.tenants > 1 or self.world.adapters:
            work = RANK_ONLY_INTERVAL * self._longest_work()
        for expected in self.expected.values():
            if (
                self.plans <= expected.overtaken_until or self.world.token_seconds or self.world.adapters
            ):  # its prompt may be a long one
                expected.deadline += work

    def leave(self, key: int) -> None:
        """Abort a sequence; no update may mention it any more."""
        del self.expected[key]
        self.scheduler.abort([key])
        self._check()

    def schedule(self) -> StepPlan | None:
        """Plan a step; the executor computes it at once, the result stays in flight until `apply`."""
        plan = self.scheduler.schedule()
        if plan is None:
            config = self.world.scheduler
            assert self._flights or not self.scheduler.has_work, "work, and nothing to run"
            assert len(self._flights) <= config.ahead + 1
        else:
            self.plans += 1
            self._check_plan(plan)
            self._flights.append((plan, self.executor.execute(plan).result()))
        self._check()
        return plan

    def _check_plan(self, plan: StepPlan) -> None:
        config = self.world.scheduler
        self.resumed += len(plan.state_restores)
        assert plan.tokens <= config.max_num_batched_tokens, "over the budget"
        assert len(self._flights) <= config.ahead, "too many plans ahead"
        self._adapter_of.update((new.row, new.adapter) for new in plan.new)
        running = {self._adapter_of[row] for row in plan.rows.tolist()} - {""}
        assert len(running) <= (config.max_loras or len(running)), "too many adapters"
        cap = config.in_flight_per_sequence or config.ahead + 1
        in_flight = Counter(row for flight, _ in self._flights for row in flight.rows.tolist())
        assert all(in_flight[row] < cap for row in plan.rows.tolist()), "a row is in too many plans"
        drafting = [row for row, drafts in zip(plan.rows.tolist(), plan.drafts.tolist(), strict=False) if drafts]
        assert not any(map(in_flight.__getitem__, drafting)), "drafts after a token that the host does not know"

    def apply(self) -> StepUpdates | None:
        """Apply the oldest result in flight, if there is one."""
        if not self._flights:
            return None
        plan, result = self._flights.popleft()
        updates = self.scheduler.apply(self._continued(result), self._seconds(plan))
        self._take_started(updates)
        self._take_scores(updates)
        self._take_tokens(updates)
        for key, reason in updates.finished:
            expected = self.expected.pop(key)
            assert expected.scored == expected.prompt, f"{key} lacks scores"
            assert (reason, len(expected.tokens)) == (expected.reason, 0), f"{key} ended early or for another reason"
        self._check()
        return updates

    def _continued(self, result: StepResult) -> StepResult:
        """With some tokens that follow in some constrained rows; where those are the last, the host may say so."""
        found: dict[int, ForcedTokens] = {}
        tokens, at = result.tokens.tolist(), 0
        for row, count in zip(result.rows.tolist(), result.counts.tolist(), strict=True):
            at += count
            key = self.scheduler.constrained_rows.get(row)
            if count and key in self.expected and self._random.random() < 0.4:
                more = self._random.randint(0, 3)
                left = len(self.expected[key].tokens) - count
                ends = left == more and self.expected[key].reason == "stop"
                follows = [(tokens[at - 1] + step) % VOCABULARY for step in range(1, more + 1)]
                found[row] = ForcedTokens(follows, ends)
        return with_forced_tokens(result, found) if found else result

    def _seconds(self, plan: StepPlan) -> float | None:
        """The measured time of a step, of which any part may be noise."""
        steady = 0.01 + self.world.token_seconds * plan.tokens
        return steady * self._random.uniform(0.3, 3) if self.world.token_seconds else None

    def _take_started(self, updates: StepUpdates) -> None:
        for key, _ in updates.started:
            expected = self.expected[key]
            assert not expected.started, "started twice"
            expected.started = True
            waited = (self.plans - expected.arrived) / (expected.deadline - expected.arrived)
            self.longest_wait = max(self.longest_wait, waited)

    def _take_tokens(self, updates: StepUpdates) -> None:
        assert len(set(updates.keys)) == len(updates.keys)
        assert sum(updates.counts) == len(updates.tokens)
        tokens = iter(updates.tokens)
        for key, count in zip(updates.keys, updates.counts, strict=True):
            expected = self.expected[key]
            assert expected.started, "tokens before the start"
            for _ in range(count):
                assert next(tokens) == expected.tokens.popleft(), f"{key} got another token than last + 1"

    def _take_scores(self, updates: StepUpdates) -> None:
        """Check that each token comes once, in order, and follows the one before."""
        for key, scores in updates.prompt_logprobs:
            expected, found = self.expected[key], scores.to_list()
            assert scores.start == expected.scored, f"{key} got scores twice, or not all"
            assert {score.rank for score in found} == {1}, f"{key} got another token's score"
            expected.scored += len(found)

    def drain(self) -> list[int]:
        """Run until nothing is left, then check that nothing is held; returns the keys that were admitted meanwhile, in
        order."""
        admitted: list[int] = []
        while self.scheduler.has_work:
            self.schedule()
            updates = self.apply()
            admitted += [key for key, _ in updates.started] if updates else []
        assert not self.expected, "a sequence was forgotten"
        assert self.cache.free_blocks == self.world.blocks, "a block leaked"
        return admitted

    def _check(self) -> None:
        self.operations += 1
        if self._recorder is not None:
            self._recorder.flush()
        self.scheduler.check_integrity()
        for key, expected in self.expected.items():
            assert expected.started or self.plans <= expected.deadline, f"{key} is never admitted"
