"""One model in this process that several schedulers take turns with: one for each way of drafting, one without drafts.

Each serves as an engine core's loop does, without sockets, text and HTTP, and is watched: what was drafted, verified
and accepted, and how long that took.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from ..core.errors import Unavailable
from ..engine.config import CacheConfig, EngineConfig, SpeculationConfig
from ..engine.core.drafters import build_drafter
from ..engine.core.messages import AddRequest, FromCore, RequestRejected, RequestUpdates, Shutdown
from ..engine.core.step_loop import EngineCore
from ..engine.drafters.laboratory import Record, SyntheticDrafter, wrong_tokens
from ..engine.worker.executor import StepFuture
from ..engine.worker.inline_executor import InlineExecutor
from ..engine.worker.model_runner import verify_samples
from ..kvcache.manager import KVCacheManager
from ..processes import gc_tuning
from ..scheduler.config import SchedulerConfig
from ..scheduler.plan import IntArray, MaskSource, ResolvedSampling, StepPlan, StepResult
from ..scheduler.scheduler import Scheduler
from ..scheduler.sequence import GREEDY
from ..scheduler.speculation import Drafter, DraftRequest, Speculation
from .inline_loop import BLOCK, PRECISIONS
from .roofline import Precision

Times: TypeAlias = list[float]
_CHUNK = 512
"""Most tokens in a step."""


class Arm(NamedTuple):
    """A way of drafting, by its `label`. `everything`: every draft is verified, worth its cost or not. `commit`: of so
    many drafts of a step at most are right, whatever the drafter knows. `rates`: how often a model that drafts is right
    about a record, of which it cannot know anything, by place."""

    label: str
    config: SpeculationConfig | None = None
    everything: bool = False
    commit: int | None = None
    rates: tuple[float, ...] = ()

    @property
    def k(self) -> int:
        return 0 if self.config is None else self.config.num_speculative_tokens


@dataclass(slots=True)
class Acceptance:
    """`steps` of single sequences that sampled, those of them that verified drafts, and what came of these: `histogram`
    counts them by the drafts that were accepted, `reached` and `right` by place those verified and those accepted."""

    k: int
    steps: int = 0
    drafted: int = 0
    histogram: list[int] = field(init=False)
    reached: list[int] = field(init=False)
    right: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.histogram, self.reached, self.right = [0] * (self.k + 1), [0] * self.k, [0] * self.k

    def count(self, drafts: int, accepted: int) -> None:
        """A sequence got `accepted` of `drafts` tokens and one more."""
        self.steps += 1
        if drafts:
            self.drafted += 1
            self.histogram[accepted] += 1
            for place in range(drafts):
                self.reached[place] += 1
                self.right[place] += place < accepted

    def add(self, other: "Acceptance") -> None:
        self.steps, self.drafted = self.steps + other.steps, self.drafted + other.drafted
        for mine, its in ((self.histogram, other.histogram), (self.reached, other.reached), (self.right, other.right)):
            mine[:] = [one + more for one, more in zip(mine, its, strict=True)]

    @property
    def length(self) -> float:
        """Mean tokens of a step that verified drafts; 1 where none did."""
        return 1 + sum(self.right) / self.drafted if self.drafted else 1.0

    @property
    def tokens_per_step(self) -> float:
        """Over all steps."""
        return 1 + sum(self.right) / self.steps if self.steps else 1.0

    @property
    def rates(self) -> list[float]:
        """Share of the drafts that were accepted, by place; those who were never verified have none."""
        return [right / reached for right, reached in zip(self.right, self.reached, strict=True) if reached]


class RunFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Sequences run at once from the first's first token to the last's last: `tokens` in `seconds`. `tpot`: seconds per
    output token of each; `gaps`: seconds between bursts of tokens. `drafting`: seconds of each call of the drafter, by
    the sequences asked for; `verifying`: of each step that only decodes, by its tokens. `computed`: places of such
    steps, `wasted` of which had a draft that was wrong. `differing`: sampled tokens that are not those without drafts.
    """

    tokens: int
    seconds: float
    tpot: list[float]
    gaps: list[float]
    acceptance: Acceptance
    drafting: dict[int, Times]
    verifying: dict[int, Times]
    computed: int
    wasted: int
    differing: int

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds

    @classmethod
    def of_replay(cls, acceptance: Acceptance, drafting: list[float]) -> "RunFigures":
        """Of drafts for one sequence that no model verified."""
        tokens = acceptance.steps + sum(acceptance.right)
        return cls(
            tokens=tokens,
            seconds=sum(drafting),
            tpot=[],
            gaps=[],
            acceptance=acceptance,
            drafting={1: drafting},
            verifying={},
            computed=0,
            wasted=0,
            differing=0,
        )

    @classmethod
    def together(cls, runs: Sequence["RunFigures"]) -> "RunFigures":
        """Several runs of one contender as if they were one."""
        acceptance, drafting, verifying = Acceptance(runs[0].acceptance.k), dict[int, Times](), dict[int, Times]()
        for run in runs:
            acceptance.add(run.acceptance)
            for whole, part in ((drafting, run.drafting), (verifying, run.verifying)):
                for number, seconds in part.items():
                    whole[number] = [*whole.get(number, ()), *seconds]
        return cls(
            tokens=sum(run.tokens for run in runs),
            seconds=sum(run.seconds for run in runs),
            tpot=[each for run in runs for each in run.tpot],
            gaps=[each for run in runs for each in run.gaps],
            acceptance=acceptance,
            drafting=drafting,
            verifying=verifying,
            computed=sum(run.computed for run in runs),
            wasted=sum(run.wasted for run in runs),
            differing=sum(run.differing for run in runs),
        )


class RecordedTarget:
    """Stands in for a target whose weights are random: every product is computed and every token sampled, and then the
    record's next token is taken in place of the sampled one. What was sampled at each place of a record must be the
    same whatever was drafted and whatever ran beside it: `differing` counts the others."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = {tuple(each.prompt_tokens): np.array(each.output_tokens, np.int32) for each in records}
        self._sampled = {prompt: np.full(len(output), -1, np.int32) for prompt, output in self._records.items()}
        self._rows: dict[int, tuple[int, IntArray, IntArray]] = {}
        self.differing = 0

    def note_rows(self, plan: StepPlan) -> None:
        """Learn whose record the new rows of a plan are to follow. Called with every plan: the first steps of a long
        prompt sample nothing."""
        for new in plan.new:
            prompt = tuple(new.tokens[: new.prompt].tolist())
            nothing: IntArray = np.zeros(0, np.int32)
            self._rows[new.row] = new.prompt, self._records.get(prompt, nothing), self._sampled.get(prompt, nothing)

    def dictate(self, plan: StepPlan, tokens: IntArray) -> IntArray:
        """The record's tokens for `tokens` [S] that the plan sampled; see `ModelRunner.dictate`."""
        dictated, first, seen = tokens.copy(), 0, list[tuple[IntArray, int, int]]()
        drafts = plan.drafts if len(plan.drafts) else np.zeros_like(plan.rows)
        ends = plan.starts + plan.counts
        for at in plan.samples.nonzero()[0].tolist():
            prompt_length, output, sampled = self._rows[int(plan.rows[at])]
            count = int(drafts[at]) + 1
            begin = int(ends[at]) - int(drafts[at]) - prompt_length
            known = output[begin : begin + count]
            dictated[first : first + len(known)] = known
            seen.append((sampled, begin, len(known)))
            first += count
        kept = verify_samples(plan, dictated).kept if len(plan.drafts) else np.ones(len(tokens), np.bool_)
        first = 0
        for (sampled, begin, length), count in zip(seen, (drafts[plan.samples] + 1).tolist(), strict=True):
            places = np.flatnonzero(kept[first : first + length])
            before, now = sampled[begin + places], tokens[first + places]
            self.differing += int(((before >= 0) & (before != now)).sum())
            sampled[begin + places] = now
            first += count
        return dictated


class _FullVerification(Speculation):
    """Verifies every draft: it learns no step's cost."""

    def is_due(self, step: int) -> bool:
        return True

    def observe_step(
        self, tokens: int, seconds: float, drafted: int = 0, accepted: int = 0, host_seconds: float = 0.0
    ) -> None:
        pass


class _DictatedProposals:
    """As many tokens as a model proposed, which computed for them; but they are the record's, and right as often as
    `synthetic` says."""

    def __init__(self, synthetic: SyntheticDrafter) -> None:
        self._synthetic = synthetic

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Sequence[int]]:
        """See `Drafter.propose`."""
        tokens = self._synthetic.propose(requests)
        return [own[: len(request.proposed)] for own, request in zip(tokens, requests, strict=True)]


class _WatchedDrafter:
    """`drafter`, timed; of its drafts at most `commit` are left right."""

    def __init__(self, drafter: Drafter, commit: int | None) -> None:
        self._drafter, self._commit = drafter, commit
        self.seconds = defaultdict[int, list[float]](list)

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Sequence[int]]:
        """See `Drafter.propose`."""
        begun = perf_counter()
        proposed = self._drafter.propose(requests)
        self.seconds[len(requests)].append(perf_counter() - begun)
        most = self._commit
        if most is None:
            return proposed
        return [[*tokens[:most], *wrong_tokens(tokens[most:])] for tokens in proposed]


class _WatchedExecutor(InlineExecutor):
    """Keeps plans and results, with the times at which they came. `watch` sees each plan before it runs."""

    def __init__(self, config: EngineConfig, watch: Callable[[StepPlan], None]) -> None:
        super().__init__(config)
        self._watch = watch
        self.steps: list[tuple[StepPlan, StepResult, float]] = []

    def execute(self, plan: StepPlan, masks: MaskSource | None = None) -> "_WatchedFuture":  # type: ignore[override]
        self._watch(plan)
        return _WatchedFuture(self, plan, perf_counter(), super().execute(plan, masks))


class _WatchedFuture(NamedTuple):
    executor: _WatchedExecutor
    plan: StepPlan
    begun: float
    future: StepFuture

    def result(self, timeout: float | None = None) -> StepResult:
        """See `StepFuture.result`."""
        found = self.future.result(timeout)
        self.executor.steps.append((self.plan, found, perf_counter() - self.begun))
        return found


class Laboratory:
    """A model that serves up to `streams` sequences of `records` at once; with `recorded` it says what these say, else
    what it says itself. `computing`: the draft model that one of the arms has."""

    def __init__(
        self,
        checkpoint: str,
        precision: Precision,
        records: Sequence[Record],
        streams: int,
        *,
        recorded: bool,
        sampling: ResolvedSampling = GREEDY,
        computing: SpeculationConfig | None = None,
    ) -> None:
        longest = max(len(each.prompt_tokens) + len(each.output_tokens) for each in records)
        cache = CacheConfig(block_size=BLOCK)
        plain = EngineConfig(model=checkpoint, max_model_len=longest, cache=cache, speculation=computing)
        self._target = RecordedTarget(records)
        config = msgspec.structs.replace(plain, **PRECISIONS[precision])
        self._executor = _WatchedExecutor(config, self._target.note_rows)
        capacity = self._executor.load(lambda phase, fraction: None)
        self._vocab_size, self.machine = capacity.vocab_size, capacity.machine
        self._blocks = streams * (-(-longest // BLOCK) + 2)
        self._executor.allocate(self._blocks)
        self._rule = SchedulerConfig(max_num_seqs=streams, max_num_batched_tokens=_CHUNK, max_model_len=longest)
        if recorded:
            self._executor.rank.runner.dictate = self._target.dictate
        self._recorded = records if recorded else ()
        self._said: dict[tuple[int, ...], list[int]] = {}
        self._runs, self._sampling = 0, sampling

    def close(self) -> None:
        self._executor.close()

    def contender(self, arm: Arm) -> "Contender":
        """A scheduler that drafts as `arm` says, warm.

        Raises:
            InvalidArgument: such a drafter there cannot be.
        """
        cache, speculation, watched = KVCacheManager(self._blocks, BLOCK, prefix_caching=False), None, None
        if arm.config is not None:
            drafter = build_drafter(arm.config, self._vocab_size)
            if arm.config.computes and self._recorded:
                drafter = _DictatedProposals(SyntheticDrafter(self._recorded, arm.rates, 0))
            watched = _WatchedDrafter(drafter, arm.commit)
            made = _FullVerification if arm.everything else Speculation
            speculation = made({arm.config.method: watched}, arm.k, self._vocab_size, draft_model=arm.config.computes)
        scheduler = Scheduler(self._rule, cache, speculation=speculation)
        contender = Contender(arm, scheduler, cache, self._executor, watched)
        EngineCore(scheduler, cache, self._executor).warm_up()
        gc_tuning.collect_and_freeze()
        return contender

    def run(self, contender: "Contender", records: Sequence[Record], new: int) -> RunFigures:
        """Let it answer all of the records at once, with `new` tokens each at most."""
        self._runs += 1
        self._executor.steps.clear()
        if contender.drafter is not None:
            contender.drafter.seconds.clear()
        before = self._target.differing
        # A tenant of its own for each run: what drafters learnt of others is not for it.
        arrivals = contender.answer(records, new, f"run {self._runs}", self._sampling)
        differing = self._target.differing - before
        for record, said in zip(records, arrivals, strict=True):
            tokens, prompt = said.tokens, tuple(record.prompt_tokens)
            known = self._said.setdefault(prompt, tokens)
            shorter = min(len(known), len(tokens))
            differing += sum(one != other for one, other in zip(known[:shorter], tokens[:shorter], strict=True))
            if len(tokens) > len(known):
                self._said[prompt] = tokens
        return self._figures(contender, arrivals, differing)

    def said(self, record: Record) -> Record:
        """What the model said when it was asked for the longest answer so far."""
        return Record(record.prompt_tokens, self._said[tuple(record.prompt_tokens)])

    def _figures(self, contender: "Contender", arrivals: Sequence["Arrivals"], differing: int) -> RunFigures:
        acceptance, verifying = Acceptance(contender.arm.k), defaultdict[int, list[float]](list)
        computed = wasted = 0
        for plan, result, seconds in self._executor.steps:
            drafts = plan.drafts if len(plan.drafts) else np.zeros_like(plan.rows)
            if len(plan.new) or (plan.counts != 1 + drafts).any():
                continue  # it computes prompts too
            verifying[plan.tokens].append(seconds)
            computed += plan.tokens
            wasted += plan.tokens - int(result.counts.sum())
            for drafted, count in zip(drafts.tolist(), result.counts.tolist(), strict=True):
                acceptance.count(drafted, count - 1)
        begun, ended = min(each.times[0] for each in arrivals), max(each.times[-1] for each in arrivals)
        return RunFigures(
            tokens=sum(len(each.tokens) - each.first for each in arrivals),
            seconds=ended - begun,
            tpot=[each.tpot for each in arrivals],
            gaps=[gap for each in arrivals for gap in np.diff(each.times).tolist()],
            acceptance=acceptance,
            drafting={} if contender.drafter is None else dict(contender.drafter.seconds),
            verifying=dict(verifying),
            computed=computed,
            wasted=wasted,
            differing=differing,
        )


@dataclass(slots=True)
class Arrivals:
    """A sequence's tokens, the times at which some came, and how many came `first`."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    first: int = 0

    @property
    def tpot(self) -> float:
        return (self.times[-1] - self.times[0]) / max(len(self.tokens) - self.first, 1)


class Contender(NamedTuple):
    """An arm's scheduler; what it learns of steps it keeps from run to run, as a server does."""

    arm: Arm
    scheduler: Scheduler
    cache: KVCacheManager
    executor: _WatchedExecutor
    drafter: _WatchedDrafter | None

    def predicted(self, tokens: int) -> float | None:
        """Seconds that its scheduler believes a step of so many tokens takes; None where it was not to learn it."""
        speculation = self.scheduler.speculation
        return None if speculation is None else speculation.expected_seconds(tokens)

    def answer(self, records: Sequence[Record], new: int, tenant: str, sampling: ResolvedSampling) -> list[Arrivals]:
        """Raises Unavailable: the engine refused one."""
        core = EngineCore(self.scheduler, self.cache, self.executor)
        arrivals, running = [Arrivals() for _ in records], len(records)
        for key, record in enumerate(records):
            most = min(new, len(record.output_tokens))
            prompt = record.prompt_tokens
            core.inbox.accept(AddRequest(key=key, prompt=prompt, max_tokens=most, sampling=sampling, tenant=tenant))

        def send(message: FromCore) -> None:
            nonlocal running
            if isinstance(message, RequestRejected):
                raise Unavailable(f"a recorded text does not fit: {message.message}")
            if isinstance(message, RequestUpdates):
                _take(message, arrivals)
                running -= len(message.updates.finished)
                if not running:
                    core.inbox.accept(Shutdown())

        core.run(send)
        core.close()
        return arrivals


def _take(message: RequestUpdates, arrivals: Sequence[Arrivals]) -> None:
    now, stream = perf_counter(), iter(message.updates.tokens)
    for key, count in zip(message.updates.keys, message.updates.counts, strict=True):
        if count:
            seen = arrivals[key]
            seen.tokens += [next(stream) for _ in range(count)]
            seen.times.append(now)
            seen.first = seen.first or count
