"""Drafts change no text, and never cost: `python -m tests.proofs.speculation`.

Never slower: the real scheduler decodes on simulated machines, with drafters that are right often, seldom, never, in
spells, or for some sequences only; time is the sum of what steps take there, and no model computes. Exact: the demo
model answers the laboratory's texts in every precision, greedily and drawn, with each drafter and without, few and many
at once; every token is compared. Exits with 1 where a bound or a token does not hold.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
from cyclopts import App
from msgspec.structs import replace
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from charonia.bench.inline_loop import PRECISIONS, run_to_end
from charonia.bench.roofline import Precision
from charonia.core.resolved_sampling import ResolvedSampling
from charonia.engine.config import CacheConfig, EngineConfig
from charonia.engine.core.drafters import build_drafter
from charonia.engine.core.warm_up import WARM_UP_NEW_TOKENS
from charonia.engine.drafters.laboratory import Record
from charonia.engine.options import read_speculation_config
from charonia.engine.worker.inline_executor import InlineExecutor
from charonia.engine.worker.model_runner import verify_samples
from charonia.extras.optimizer.simulated_machine import SimulatedMachine, StepLoad, StepSpread
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.drafts.draft_costs import DraftCosts
from charonia.scheduler.drafts.speculation import Drafter, DraftRequest, Speculation
from charonia.scheduler.plan import IntArray, StepPlan, StepResult, StepWork
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceSpec

from .scheduler_latency import BF16, INT8, INT8_TILES, INT8_VNNI

MACHINES = {
    "bf16": BF16,
    "int8": INT8,
    "VNNI": INT8_VNNI,
    "tiles": INT8_TILES,
    "computing": SimulatedMachine(weights=0.0, token=4e-3, rest=1e-3),
    "noisy": replace(INT8_VNNI, spread=(StepSpread(1.0, (1.0, 1.3)),)),
}
"""Where decoding waits for memory, where it does not, and where the time of a step says little of the next."""

LEAST_SPEED, MOST_TPOT = 0.98, 1.05
"""Of none: throughput, and the 99th percentile over sequences of the time per output token."""

STREAMS = (1, 4, 16, 64)
DEMO = Path(__file__).parents[2] / "examples" / "model_repository" / "demo" / "1"
SAMPLINGS = {"greedy": ResolvedSampling(), "drawn": ResolvedSampling(0.9, 40, 0.95, seed=7)}
TEXTS = Path(__file__).with_name("speculation_texts.jsonl")
DRAFTERS: Mapping[str, Mapping[str, object]] = {
    "ngram": {"method": "ngram"},
    "ngram of 1": {"method": "ngram", "prompt_lookup_min": 1},
    "oracle": {"method": "oracle"},
    "synthetic": {"method": "synthetic", "synthetic_acceptance_rates": [0.8, 0.6, 0.45, 0.35]},
    "random": {"method": "random"},
}
_PROMPT, _K, _TOKENS, _BLOCK_SIZE = 64, 4, 1000, 16
_CHUNK = 512
"""Most tokens in a step of the demo model."""

app = App(name="python -m tests.proofs.speculation", help=__doc__)


class Spells(NamedTuple):
    """How often a draft is right: `chance` for `length` tokens of a text, then `other` for as many, and so on. Of the
    sequences one in `share` is so, the rest have no drafts."""

    chance: float
    other: float
    length: int = 1 << 30
    share: int = 1


GUESSES = {
    "never right": Spells(0.0, 0.0),
    "seldom right": Spells(0.2, 0.2),
    "half right": Spells(0.5, 0.5),
    "mostly right": Spells(0.85, 0.85),
    "always right": Spells(1.0, 1.0),
    "in spells": Spells(1.0, 0.0, 40),
    "in short spells": Spells(0.95, 0.05, 12),
    "some never right": Spells(0.0, 0.0, share=3),
    "some right": Spells(0.8, 0.8, share=3),
}


class SpellDrafter:
    """Knows that the token at each place is the place's number, and errs as `spells` say."""

    def __init__(self, spells: Spells, seed: int) -> None:
        self._spells, self._random = spells, Random(seed)

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """See `Drafter.propose`."""
        return [self._guess(request) for request in requests]

    def _guess(self, request: DraftRequest) -> list[int]:
        chance, other, length, share = self._spells
        if int(request.prompt[0]) % share:
            return []
        first = len(request.outputs)
        chances = [(chance, other)[(first + place) // length % 2] for place in range(request.k)]
        right = [self._random.random() < each for each in chances]
        return [(_PROMPT + first + place + (not good)) % _TOKENS for place, good in enumerate(right)]


class SimulatedRun(NamedTuple):
    """Tokens a second, and the time per output token of each sequence."""

    speed: float
    tpot: list[float]


def simulate(machine: SimulatedMachine, streams: int, new: int, spells: Spells | None, seed: int = 0) -> SimulatedRun:
    """Decode `streams` sequences of about `new` tokens, twice as many in all, after a warm-up as an engine's."""
    blocks = streams * ((_PROMPT + new) // _BLOCK_SIZE + 3)
    cache = KVCacheManager(blocks, _BLOCK_SIZE, prefix_caching=False)
    speculation = None if spells is None else Speculation({"spells": SpellDrafter(spells, seed)}, _K, _TOKENS)
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=streams), cache, speculation=speculation)
    random = Random(seed)
    _decode(scheduler, machine, [WARM_UP_NEW_TOKENS], random)
    scheduler.reset_totals()
    return _decode(scheduler, machine, [new - random.randrange(new // 4) for _ in range(2 * streams)], random)


def _decode(scheduler: Scheduler, machine: SimulatedMachine, lengths: Sequence[int], random: Random) -> SimulatedRun:
    for key, length in enumerate(lengths):
        scheduler.add(SequenceSpec(key=key, prompt=np.full(_PROMPT, key, np.int32), max_tokens=length))
    begun, ended, now = dict[int, float](), dict[int, float](), 0.0
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan is not None
        seconds = machine.draw_seconds(StepLoad(_work(plan), int(plan.num_logits.sum())), random)
        now += seconds
        for key in scheduler.apply(_sampled(plan), seconds).keys:
            begun.setdefault(key, now)
            ended[key] = now
    tpot = [(ended[key] - begun[key]) / length for key, length in enumerate(lengths)]
    return SimulatedRun(sum(lengths) / now, tpot)


def _work(plan: StepPlan) -> StepWork:
    prompts = plan.starts < _PROMPT
    attended = plan.counts * plan.starts
    counts = int(plan.counts[~prompts].sum()), int(plan.counts[prompts].sum())
    return StepWork(counts[0], int(attended[~prompts].sum()), counts[1], int(attended[prompts].sum()))


def _sampled(plan: StepPlan) -> StepResult:
    """The token at each place is the place's number."""
    drafts = plan.drafts if len(plan.drafts) else np.zeros_like(plan.rows)
    drafts, ends = drafts[plan.samples], (plan.starts + plan.counts)[plan.samples]
    places = [np.arange(end - drafted, end + 1) for end, drafted in zip(ends.tolist(), drafts.tolist(), strict=True)]
    none: IntArray = np.zeros(0, np.int32)
    tokens = (np.concatenate([none, *places]) % _TOKENS).astype(np.int32)
    if not len(plan.drafts):
        return StepResult(plan.step, plan.rows[plan.samples], ends, np.ones_like(ends), tokens)
    rows, offsets, counts, kept = verify_samples(plan, tokens)
    return StepResult(plan.step, rows, offsets, counts, tokens[kept])


class NeverSlower(NamedTuple):
    """A drafter on a machine beside none: of its speed, and of its 99th percentile of the time per output token."""

    machine: str
    guesses: str
    streams: int
    speed: float
    tpot: float

    @property
    def holds(self) -> bool:
        return self.speed >= LEAST_SPEED and self.tpot <= MOST_TPOT


def never_slower(
    machines: Sequence[str], guesses: Sequence[str], streams: Sequence[int], new: int, seed: int
) -> Iterator[NeverSlower]:
    for machine in machines:
        for count in streams:
            none = simulate(MACHINES[machine], count, new, None, seed)
            for name in guesses:
                run = simulate(MACHINES[machine], count, new, GUESSES[name], seed)
                tpot = float(np.percentile(run.tpot, 99) / np.percentile(none.tpot, 99))
                yield NeverSlower(machine, name, count, run.speed / none.speed, tpot)


class RecordedText(Record, frozen=True, kw_only=True):
    """A text as the demo model's token ids; its kind is `edit` (a file) or `code` (to complete)."""

    kind: str


def read_texts(kinds: Sequence[str]) -> list[RecordedText]:
    """The recorded texts of these kinds."""
    texts = [msgspec.json.decode(line, type=RecordedText) for line in TEXTS.read_bytes().splitlines()]
    return [text for text in texts if text.kind in kinds]


class UnmeasuredCosts(DraftCosts):
    """Learns no step's cost."""

    def observe_step(
        self, tokens: int, seconds: float, drafted: int = 0, accepted: int = 0, host_seconds: float = 0.0
    ) -> None:
        pass


class FullVerification(Speculation):
    """Verifies every draft."""

    def __init__(self, drafters: Mapping[str, Drafter], most: int, vocab_size: int) -> None:
        super().__init__(drafters, most, vocab_size)
        self.costs = UnmeasuredCosts()

    def is_due(self, step: int) -> bool:
        return True


class DemoEngine:
    """The demo model in this process, for up to `streams` sequences of the texts at once."""

    def __init__(self, precision: Precision, texts: Sequence[Record], streams: int, new: int) -> None:
        longest = max(len(text.prompt_tokens) for text in texts) + new
        plain = EngineConfig(model=str(DEMO), max_model_len=longest, cache=CacheConfig(block_size=_BLOCK_SIZE))
        self._executor = InlineExecutor(replace(plain, **PRECISIONS[precision]))
        self.vocab_size = self._executor.load(lambda phase, fraction: None).vocab_size
        self._texts, self._new = texts, new
        self._blocks = streams * (-(-longest // _BLOCK_SIZE) + 2)
        self._executor.allocate(self._blocks)
        self._rule = SchedulerConfig(max_num_seqs=streams, max_num_batched_tokens=_CHUNK, max_model_len=longest)

    def answer(self, streams: int, sampling: ResolvedSampling, drafter: Drafter | None = None) -> list[list[int]]:
        """What the model says to each text, `streams` of them at once; texts are repeated to fill that number."""
        texts = [self._texts[at % len(self._texts)] for at in range(max(streams, len(self._texts)))]
        speculation = None if drafter is None else FullVerification({"proof": drafter}, _K, self.vocab_size)
        cache = KVCacheManager(self._blocks, _BLOCK_SIZE, prefix_caching=False)
        scheduler, answers = Scheduler(self._rule, cache, speculation=speculation), list[list[int]]()
        for first in range(0, len(texts), streams):
            requests = [
                SequenceSpec(
                    key=key, prompt=np.array(text.prompt_tokens, np.int32), max_tokens=self._new, sampling=sampling
                )
                for key, text in enumerate(texts[first : first + streams])
            ]
            tokens = run_to_end(scheduler, self._executor, requests).tokens
            answers += (tokens[key] for key in range(len(requests)))
        return answers

    def close(self) -> None:
        self._executor.close()


Differing: TypeAlias = dict[tuple[Precision, str, int, str], int]


def exactness(
    precisions: Sequence[Precision],
    samplings: Sequence[str],
    streams: Sequence[int],
    drafters: Mapping[str, Mapping[str, object]],
    kinds: Sequence[str],
    new: int,
    tell: Callable[[], None] = lambda: None,
) -> Differing:
    """How many tokens of the demo model's answers are others with each drafter, by precision, sampling, number of
    streams and drafter; whatever a run has beside itself, the texts are those of a sequence that is alone. A drafter is
    told as in --speculative-config, but for the record of those texts."""
    differing: Differing = {}
    texts = read_texts(kinds)
    for precision in precisions:
        with (
            TemporaryDirectory(prefix="charonia-proof-") as folder,
            closing(DemoEngine(precision, texts, max(streams), new)) as engine,
        ):
            for name in samplings:
                alone = engine.answer(1, SAMPLINGS[name])
                record = Path(folder) / f"{name}.jsonl"
                records = [Record(text.prompt_tokens, tokens) for text, tokens in zip(texts, alone, strict=True)]
                record.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in records))
                for label, keys in {"none": None, **drafters}.items():
                    for count in streams:
                        drafter = None if keys is None else _build_drafter(keys, record, engine.vocab_size)
                        answers = engine.answer(count, SAMPLINGS[name], drafter)
                        differing[precision, name, count, label] = sum(
                            one != other
                            for at, tokens in enumerate(answers)
                            for one, other in zip(tokens, alone[at % len(alone)], strict=True)
                        )
                        tell()
    return differing


def _build_drafter(keys: Mapping[str, object], record: Path, vocab_size: int) -> Drafter:
    recorded = {"record": str(record)} if keys["method"] in ("oracle", "synthetic") else {}
    config = read_speculation_config(msgspec.json.encode({**keys, **recorded}).decode())
    return build_drafter(config, vocab_size)


def _measured(console: Console, new: int, seeds: int) -> tuple[list[NeverSlower], Differing]:
    """All that `main` judges, with progress."""
    precisions: tuple[Precision, ...] = ("bf16", "int8", "int4")
    counts, kinds, runs = STREAMS[:3], ("edit", "code"), list[NeverSlower]()
    with Progress(console=console) as progress:
        cells = len(MACHINES) * len(STREAMS) * len(GUESSES)
        simulated = progress.add_task("on simulated machines", total=seeds * cells)
        cells = len(precisions) * len(SAMPLINGS) * len(counts) * (len(DRAFTERS) + 1)
        compared = progress.add_task("cells of texts", total=cells)
        for seed in range(seeds):
            for run in never_slower(list(MACHINES), list(GUESSES), STREAMS, new, seed):
                runs.append(run)
                progress.advance(simulated)
        differing = exactness(
            precisions, list(SAMPLINGS), counts, DRAFTERS, kinds, new // 2, lambda: progress.advance(compared)
        )
    return runs, differing


@app.default
def main(new: int = 400, seeds: int = 3) -> None:
    """Prove both; the exit code is 0 if every bound holds and every token is the same."""
    console, broken, cells = Console(), 0, 0
    table = Table(title="on simulated machines, of none: speed, and p99 of the time per output token; medians")
    for name in ("machine", "guesses", *(f"{count} at once" for count in STREAMS)):
        table.add_column(name)
    runs, differing = _measured(console, new, seeds)
    for machine in MACHINES:
        for guesses in GUESSES:
            said = []
            for count in STREAMS:
                own = [run for run in runs if (run.machine, run.guesses, run.streams) == (machine, guesses, count)]
                middle = own[0]._replace(
                    speed=median(each.speed for each in own), tpot=median(each.tpot for each in own)
                )
                style = "" if middle.holds else "red"
                said.append(Text(f"{middle.speed:.2f} {middle.tpot:.2f}", style))
                cells, broken = cells + 1, broken + (not middle.holds)
            table.add_row(machine, guesses, *said)
    console.print(table)
    for (precision, sampling, count, drafter), tokens in differing.items():
        if tokens:
            console.print(f"[red]{precision}, {sampling}, {count} at once, {drafter}: {tokens} tokens differ[/red]")
    broken += sum(map(bool, differing.values()))
    console.print(f"{len(differing)} cells of texts compared, {cells} on simulated machines, {broken} broken")
    sys.exit(bool(broken))


if __name__ == "__main__":
    app()
