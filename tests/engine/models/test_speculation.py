"""Whatever is drafted, the text is the one without drafts: greedy or drawn, with whatever else a step does."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from charonia.bench.inline_loop import LoopResult, run_to_end
from charonia.core.errors import InvalidArgument
from charonia.core.logprobs import Logprobs
from charonia.core.resolved_sampling import LogitsParams, ResolvedSampling
from charonia.engine.attention.torch_attention import ReferenceAttention
from charonia.engine.config import CacheConfig, EngineConfig, SpeculationConfig
from charonia.engine.core.drafters import ProposedDrafts
from charonia.engine.cpu import library
from charonia.engine.drafters.ngram import NgramDrafter
from charonia.engine.drafters.prediction import PredictionDrafter
from charonia.engine.drafters.suffix import SuffixDrafter
from charonia.engine.worker.inline_executor import InlineExecutor
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.drafts.speculation import PREDICTION, Drafter, DraftRequest, Speculation
from charonia.scheduler.plan import StepPlan
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceSpec
from charonia.tokenization.tokenizer_json import read_tokenizer

VOCABULARY, BLOCK, NEW, MOST = 384, 16, 32, 5
NAME = "drafter"
LENGTHS = (1, 7, 16, 31, 40, 64, 65, 90)
ALIKE = (30,) * 9
"""All of them get somewhere, and then lack blocks at once."""

SAMPLINGS = {
    "greedy": ResolvedSampling(),
    "drawn": ResolvedSampling(1.0, seed=5),
    "filtered": ResolvedSampling(0.8, 20, 0.9, seed=2**64 - 1, min_p=0.01),
    "penalties": ResolvedSampling(
        0.9, seed=3, logits=LogitsParams(1.3, 0.4, 0.2, ((5, 2.0),), ((7, 8),), min_tokens=9, stop_token_ids=(1, 2))
    ),
    "log-probabilities": ResolvedSampling(logprobs=2, prompt_logprobs=1),
}


class HalfRight:
    """Knows what each prompt is answered with; after some right tokens, as chance has it, it guesses wrong."""

    def __init__(self, answers: Sequence[tuple[list[int], list[int]]]) -> None:
        self._answers = {tuple(prompt): answer for prompt, answer in answers}
        self._random = Random(7)

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [self._guess(request) for request in requests]

    def _guess(self, request: DraftRequest) -> list[int]:
        done = len(request.outputs)
        tokens = self._answers[tuple(request.prompt.tolist())][done : done + request.k]
        for place in range(self._random.randint(0, len(tokens)), len(tokens)):
            tokens[place] = (tokens[place] + 1) % VOCABULARY
        return tokens


class Model:
    """An executor with its model, whose requests are all of one sampling."""

    def __init__(self, checkpoint: Path, **config: object) -> None:
        cache = CacheConfig(block_size=BLOCK)
        self.has_draft, self.directory = "speculation" in config, checkpoint
        self.executor = InlineExecutor(EngineConfig(model=str(checkpoint), device="cpu", cache=cache, **config))  # type: ignore[arg-type]
        self.executor.load(lambda phase, fraction: None)

    def run(
        self,
        sampling: ResolvedSampling,
        drafter: Drafter | None = None,
        tight: bool = False,
        lengths: Sequence[int] = LENGTHS,
        predictions: Mapping[int, list[int]] = {},
        name: str = NAME,
        **scheduling: int,
    ) -> tuple[LoopResult, list[StepPlan], Speculation | None]:
        asked, plans = prompts(lengths), list[StepPlan]()
        blocks = 24 if tight else 100
        has_states = any(self.executor.rank.shape.states)
        snapshots, draft_states = (6, 4 * MOST) if has_states else (0, None)
        cache = KVCacheManager(blocks, BLOCK, snapshots=snapshots, draft_states=draft_states)
        config = SchedulerConfig(max_num_seqs=8, max_model_len=128, **scheduling)  # type: ignore[arg-type]
        self.executor.allocate(blocks, snapshots=snapshots + (draft_states or 0))
        speculation = None
        if drafter is not None:
            speculation = Speculation({name: drafter}, MOST, VOCABULARY, draft_model=self.has_draft)
        scheduler = Scheduler(config, cache, speculation=speculation)
        requests = [
            SequenceSpec(
                key=key,
                prompt=np.array(prompt, np.int32),
                max_tokens=NEW,
                hashes=cache.digest(prompt),
                sampling=sampling,
                stop_token_ids=frozenset((1, 2)),
                prediction=np.array(predictions[key], np.int32) if key in predictions else None,
            )
            for key, prompt in enumerate(asked)
        ]
        outcome = run_to_end(scheduler, self.executor, requests, observe=plans.append)
        scheduler.check_integrity()
        return outcome, plans, speculation


def prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    random = Random(11)
    return [[random.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def models(checkpoint: Callable[..., Path]) -> Iterator[Callable[..., Model]]:
    made: dict[str, Model] = {}

    def make(name: str = "llama", **config: object) -> Model:
        key = f"{name} {config}"
        if key not in made:
            made[key] = Model(checkpoint(name), **config)
        return made[key]

    yield make
    for model in made.values():
        model.executor.close()


def assert_the_same(
    model: Model, sampling: ResolvedSampling, tight: bool = False, lengths: Sequence[int] = LENGTHS, **scheduling: int
) -> None:
    plain, _, _ = model.run(sampling, lengths=lengths)
    answers = [(prompt, plain.tokens[key]) for key, prompt in enumerate(prompts(lengths))]
    drafter = ProposedDrafts() if model.has_draft else HalfRight(answers)
    outcome, plans, speculation = model.run(sampling, drafter, tight, lengths, **scheduling)
    assert outcome.tokens == plain.tokens
    assert outcome.finished == plain.finished
    assert outcome.logprobs.keys() == plain.logprobs.keys()
    exact = not isinstance(model.executor.rank.runner.computer.attention, ReferenceAttention)
    for key, logprobs in plain.logprobs.items():
        assert [token.ids for token in outcome.logprobs[key]] == [token.ids for token in logprobs]
        if exact:  # torch's attention may sum in another order where a row has drafts
            assert outcome.logprobs[key] == logprobs
        for token, same in zip(outcome.logprobs[key], logprobs, strict=True):
            assert token.values == pytest.approx(same.values, abs=2e-5)
    assert outcome.scores.keys() == plain.scores.keys()
    assert speculation is not None
    totals = speculation.totals[NAME]
    assert totals.draft_tokens > totals.accepted_tokens > 20, "nothing was right, or nothing was wrong"
    assert sum(totals.accepted_by_place) == totals.accepted_tokens
    assert (sum(len(plan.new) for plan in plans) > len(lengths)) == tight


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_drafts_change_no_text(sampling: ResolvedSampling, models: Callable[..., Model]) -> None:
    assert_the_same(models(), sampling)


@pytest.mark.parametrize(
    ("tight", "scheduling"),
    [
        (False, {"max_num_batched_tokens": 23}),
        (True, {}),
        (True, {"ahead": 1}),
        (False, {"ahead": 2, "in_flight_per_sequence": 1}),
    ],
    ids=["chunks", "preempted", "ahead and preempted", "as in a pipeline"],
)
def test_drafts_change_no_text_whatever_the_scheduler_does(
    tight: bool, scheduling: dict[str, int], models: Callable[..., Model]
) -> None:
    assert_the_same(models(), SAMPLINGS["drawn"], tight, **scheduling)


@pytest.mark.parametrize(
    "config",
    [
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "quantization": "int8"},
        {"dtype": "bfloat16", "quantization": "int4"},
        {"attention": "reference"},
    ],
    ids=["bfloat16", "int8", "int4", "torch"],
)
def test_drafts_change_no_text_in_any_precision(config: dict[str, str], models: Callable[..., Model]) -> None:
    """The products of a row do not depend on the rows beside it, nor its attention on the tokens that come with it."""
    assert_the_same(models(**config), SAMPLINGS["greedy"])
    assert_the_same(models(**config), SAMPLINGS["drawn"])


@pytest.mark.parametrize(
    ("name", "sampling", "tight", "config", "scheduling"),
    [
        ("qwen3.5", "log-probabilities", False, {}, {"max_num_batched_tokens": 23}),
        ("qwen3.5", "drawn", True, {"dtype": "bfloat16"}, {"ahead": 1}),
        ("qwen3.5", "drawn", True, {"attention": "reference"}, {}),
        ("lfm2", "filtered", True, {}, {}),
        ("granite-hybrid", "drawn", False, {}, {"ahead": 2, "in_flight_per_sequence": 1}),
        *(
            pytest.param(
                name, sampling, tight, {"dtype": "bfloat16", "quantization": "int8"}, {}, marks=pytest.mark.proof
            )
            for name in ("qwen3.5", "lfm2", "granite-hybrid", "qwen3-next", "lfm2-moe")
            for sampling in ("drawn", "filtered")
            for tight in (False, True)
        ),
    ],
)
def test_drafts_change_no_text_of_a_model_with_states(
    name: str,
    sampling: str,
    tight: bool,
    config: dict[str, str],
    scheduling: dict[str, int],
    models: Callable[..., Model],
) -> None:
    """A row goes on from the state after the accepted ones."""
    lengths = ALIKE if tight and "quantization" in config else LENGTHS
    assert_the_same(models(name, **config), SAMPLINGS[sampling], tight, lengths, **scheduling)


@pytest.mark.parametrize("tight", [False, True], ids=["", "preempted"])
def test_states_computed_by_torch_go_back_behind_wrong_drafts(tight: bool, checkpoint: Callable[..., Path]) -> None:
    with patch.object(library, "level", lambda: None):
        model = Model(checkpoint("qwen3.5"))
        assert_the_same(model, SAMPLINGS["drawn"], tight)
        model.executor.close()


@pytest.mark.parametrize("name", ["llama", "gemma4-small"])
def test_what_repeats_itself_is_drafted_from_the_text(name: str, models: Callable[..., Model]) -> None:
    plain, steps, _ = models(name).run(ResolvedSampling())
    outcome, fewer, speculation = models(name).run(ResolvedSampling(), NgramDrafter(1, 4))
    assert outcome.tokens == plain.tokens
    assert speculation is not None
    assert speculation.totals[NAME].accepted_tokens > 0
    assert len(fewer) <= len(steps)


def test_what_was_answered_before_is_drafted_from_suffixes(models: Callable[..., Model]) -> None:
    """The same answers again, drawn from the same seed, are known; others are not."""
    drafter, sampling = SuffixDrafter(), ResolvedSampling(0.9, seed=4)
    plain, steps, _ = models().run(sampling)
    for accepted, most in ((0, len(steps)), (20, len(steps) - 1)):
        outcome, fewer, speculation = models().run(sampling, drafter)
        assert outcome.tokens == plain.tokens
        assert speculation is not None
        assert speculation.totals[NAME].accepted_tokens >= accepted
        assert len(fewer) <= most


@pytest.fixture
def half_right(checkpoint: Callable[..., Path]) -> SpeculationConfig:
    """A draft model that is the model itself with four bits: it agrees often enough, and not always."""
    return SpeculationConfig(method="draft_model", model=str(checkpoint("llama")), quantization="int4")


@pytest.mark.parametrize("sampling", ["greedy", "drawn", "filtered", "log-probabilities"])
def test_a_draft_model_changes_no_text(
    sampling: str, models: Callable[..., Model], half_right: SpeculationConfig
) -> None:
    assert_the_same(models(speculation=half_right), SAMPLINGS[sampling])


@pytest.mark.parametrize(
    ("tight", "scheduling"),
    [
        (False, {"max_num_batched_tokens": 23}),
        (True, {}),
        (True, {"ahead": 1}),
        (False, {"ahead": 2, "in_flight_per_sequence": 1}),
    ],
    ids=["chunks", "preempted", "ahead and preempted", "as in a pipeline"],
)
def test_a_draft_model_changes_no_text_whatever_the_scheduler_does(
    tight: bool, scheduling: dict[str, int], models: Callable[..., Model], half_right: SpeculationConfig
) -> None:
    assert_the_same(
        models(speculation=half_right), SAMPLINGS["greedy"], tight, ALIKE if tight else LENGTHS, **scheduling
    )


@pytest.mark.parametrize("config", [{}, {"attention": "reference"}], ids=["programs", "torch"])
@pytest.mark.parametrize("tight", [False, True], ids=["", "preempted"])
def test_a_draft_model_that_is_the_model_itself_is_always_right(
    tight: bool, config: dict[str, str], models: Callable[..., Model], checkpoint: Callable[..., Path]
) -> None:
    """So its cache has what it should: after chunks, drafts, preemptions, prefix hits and steps without proposals."""
    itself = SpeculationConfig(method="draft_model", model=str(checkpoint("llama")))
    model = models(speculation=itself, **config)
    _, plans, speculation = model.run(
        SAMPLINGS["greedy"], ProposedDrafts(), tight, ALIKE, max_num_batched_tokens=512 if tight else 40
    )
    assert speculation is not None
    totals = speculation.totals[NAME]
    assert totals.accepted_tokens == totals.draft_tokens > 100
    assert (sum(len(plan.new) for plan in plans) > len(ALIKE)) == tight


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_draft_model_computes_with_the_models_threads_but_behind_no_later_step(
    ahead: int, models: Callable[..., Model], half_right: SpeculationConfig
) -> None:
    model = models(speculation=half_right, scheduler=SchedulerConfig(ahead=ahead))
    model.run(SAMPLINGS["greedy"], ProposedDrafts(), lengths=(30,), ahead=ahead)
    rank = model.executor.rank
    assert rank.runner.draft is not None
    own, threads = (each.program.threads for each in (rank.runner.draft.model, rank.runner.computer.decoder))  # type: ignore[union-attr]
    assert (own is threads) == (not ahead)


@pytest.mark.parametrize("tight", [False, True], ids=["", "preempted"])
def test_a_draft_model_drafts_for_a_model_with_states(
    tight: bool, models: Callable[..., Model], checkpoint: Callable[..., Path]
) -> None:
    """It has another family's random weights, so hardly any proposal is right."""
    draft = SpeculationConfig(method="draft_model", model=str(checkpoint("llama")))
    plain, _, _ = models("qwen3.5").run(ResolvedSampling(logprobs=2))
    outcome, _, speculation = models("qwen3.5", speculation=draft).run(
        ResolvedSampling(logprobs=2), ProposedDrafts(), tight
    )
    assert outcome.tokens == plain.tokens
    assert outcome.logprobs == plain.logprobs
    assert speculation is not None
    assert speculation.totals[NAME].draft_tokens > 100


def test_a_draft_model_that_keeps_states_is_refused(checkpoint: Callable[..., Path]) -> None:
    draft = SpeculationConfig(method="draft_model", model=str(checkpoint("qwen3.5")))
    with pytest.raises(InvalidArgument, match="keeps states, from which no proposal can be taken back") as refused:
        Model(checkpoint("llama"), speculation=draft)
    assert refused.value.field == "speculative_config"


def write_draft(directory: Path, target: Path, tokenizer: Tokenizer) -> str:
    """The target with another tokenizer: what both know it computes alike, and what only it knows is random."""
    theirs, own = read_tokenizer(target)[0].get_vocab(), tokenizer.get_vocab()
    same = torch.tensor([theirs.get(text, -1) for text in sorted(own, key=own.__getitem__)])
    weights = load_file(target / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        known = weights[name][same]
        weights[name] = torch.where(same[:, None] >= 0, known, torch.randn_like(known) * 0.02)
    save_file(weights, directory / "model.safetensors")
    config = json.loads((target / "config.json").read_text()) | {"vocab_size": len(own)}
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer.save(str(directory / "tokenizer.json"))
    return str(directory)


@pytest.fixture(scope="module")
def other_vocabulary(
    checkpoint: Callable[..., Path], making: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> str:
    """One of fewer tokens, with other numbers, and another special one."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=374, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(making.LINES, trainer)
    return write_draft(tmp_path_factory.mktemp("other"), checkpoint("llama"), tokenizer)


@pytest.mark.parametrize("config", [{}, {"attention": "reference"}], ids=["programs", "torch"])
@pytest.mark.parametrize(
    ("sampling", "method", "scheduling"),
    [
        ("greedy", "greedy", {"max_num_batched_tokens": 23}),
        ("filtered", "probabilistic", {}),
        ("log-probabilities", "greedy", {"ahead": 1}),
    ],
)
def test_a_draft_model_of_another_vocabulary_changes_no_text(
    sampling: str,
    method: Any,
    scheduling: dict[str, int],
    config: dict[str, str],
    models: Callable[..., Model],
    other_vocabulary: str,
) -> None:
    drafts = SpeculationConfig(method="draft_model", model=other_vocabulary, draft_sample_method=method)
    assert_the_same(models(speculation=drafts, **config), SAMPLINGS[sampling], **scheduling)


@pytest.mark.parametrize("config", [{}, {"attention": "reference"}], ids=["programs", "torch"])
def test_a_draft_model_whose_tokens_have_other_numbers_is_always_right(
    config: dict[str, str], models: Callable[..., Model], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """It is the model itself, with its tokens in another order."""
    written = json.loads((checkpoint("llama") / "tokenizer.json").read_text())
    vocabulary = written["model"]["vocab"]
    order = dict(zip(vocabulary, Random(3).sample([*vocabulary.values()], len(vocabulary)), strict=True))
    written["model"]["vocab"] = order
    for token in written["added_tokens"]:
        token["id"] = order[token["content"]]
    written["added_tokens"].sort(key=lambda token: token["id"])
    itself = write_draft(tmp_path, checkpoint("llama"), Tokenizer.from_str(json.dumps(written)))
    drafts = SpeculationConfig(method="draft_model", model=itself)
    _, _, speculation = models(speculation=drafts, **config).run(
        SAMPLINGS["greedy"], ProposedDrafts(), True, ALIKE, max_num_batched_tokens=40
    )
    assert speculation is not None
    totals = speculation.totals[NAME]
    assert totals.accepted_tokens == totals.draft_tokens > 100


@pytest.mark.parametrize("sampling", [SAMPLINGS["greedy"], SAMPLINGS["penalties"]], ids=["greedy", "penalties"])
def test_a_prediction_is_followed_to_the_same_text_in_fewer_steps(
    sampling: ResolvedSampling, models: Callable[..., Model]
) -> None:
    """Of some answers, with a token replaced, one left out, and text of its own before; and one that is wrong."""
    plain, steps, _ = models().run(sampling)
    predictions = {}
    for key, answer in plain.tokens.items():
        predictions[key] = [9, 9, *answer[:8], 7, *answer[9:17], *answer[18:]] if key % 3 else answer
    predictions[2] = [5] * NEW
    outcome, fewer, speculation = models().run(sampling, PredictionDrafter(), predictions=predictions, name=PREDICTION)
    assert outcome.tokens == plain.tokens
    assert outcome.finished == plain.finished
    assert speculation is not None
    assert speculation.totals[PREDICTION].accepted_tokens > 40
    assert sum(plan.tokens for plan in fewer) > sum(plan.tokens for plan in steps)
    assert len(fewer) <= len(steps)


class OneOf:
    """Guesses tokens that are likely somewhere, without regard to what stands before."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens, self._random = tokens, Random(3)

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [self._random.choices(self._tokens, k=request.k) for request in requests]


REPETITIVE = "def add(a, b):\n    return a + b\n\n\n" * 4 + "def add(a, b):\n   "
DRAWN, AMONG = 3, 3
"""Tokens of an answer, and those that each is drawn among."""


class Draws:
    """Answers to one prompt, each from a seed of its own, by the paths that the model may take."""

    def __init__(self, model: Model, temperature: float, top_p: float) -> None:
        self._model, self._sampling = model, ResolvedSampling(temperature, AMONG, top_p)
        self._prompt = read_tokenizer(model.directory)[0].encode(REPETITIVE).ids
        self.expected: dict[tuple[int, ...], float] = {(): 1.0}
        for _ in range(DRAWN):
            self.expected = {
                (*path, token): before * share
                for (path, before), shares in zip(self.expected.items(), self._shares([*self.expected]), strict=True)
                for token, share in shares.items()
            }

    def _shares(self, paths: Sequence[tuple[int, ...]]) -> list[dict[int, float]]:
        """What may follow each path, and how likely it is, by the log-probabilities that the model reports."""
        outcome, _ = self._run([(path, ResolvedSampling(logprobs=AMONG)) for path in paths], 1, None)
        return [self._filtered(outcome.logprobs[key][0]) for key in range(len(paths))]

    def _filtered(self, found: Logprobs) -> dict[int, float]:
        weights = np.exp(np.array(found.values[:AMONG]) / self._sampling.temperature)
        weights /= weights.sum()
        weights[np.cumsum(weights) - weights >= self._sampling.top_p] = 0
        return dict(zip(found.ids, (weights / weights.sum()).tolist(), strict=False))

    def draw(self, count: int, drafter: Drafter) -> tuple[Counter[tuple[int, ...]], Speculation]:
        asked = [((), self._sampling._replace(seed=seed)) for seed in range(count)]
        outcome, speculation = self._run(asked, DRAWN, drafter)
        assert speculation is not None
        return Counter(tuple(tokens) for tokens in outcome.tokens.values()), speculation

    def _run(
        self, asked: Sequence[tuple[tuple[int, ...], ResolvedSampling]], new: int, drafter: Drafter | None
    ) -> tuple[LoopResult, Speculation | None]:
        draft_states = 16 * DRAWN if any(self._model.executor.rank.shape.states) else None
        cache = KVCacheManager(400, BLOCK, draft_states is None, draft_states=draft_states)
        self._model.executor.allocate(400, snapshots=draft_states or 0)
        speculation = None
        if drafter is not None:
            speculation = Speculation({NAME: drafter}, DRAWN, 4096, draft_model=isinstance(drafter, ProposedDrafts))
        config = SchedulerConfig(max_num_seqs=128, max_model_len=128)
        scheduler = Scheduler(config, cache, speculation=speculation)
        requests = [
            SequenceSpec(
                key=key,
                prompt=(prompt := np.array([*self._prompt, *path], np.int32)),
                max_tokens=new,
                hashes=cache.digest(prompt),
                sampling=sampling,
            )
            for key, (path, sampling) in enumerate(asked)
        ]
        return run_to_end(scheduler, self._model.executor, requests), speculation


def deviation(found: Counter[tuple[int, ...]], expected: Mapping[tuple[int, ...], float], count: int) -> float:
    """How far Pearson's sum over `count` draws is from what chance makes of it, in standard deviations of a normal
    variable (Wilson and Hilferty: The distribution of chi-square, 1931). Paths hardly ever taken are one."""
    often = [path for path, share in expected.items() if count * share >= 5]
    cells = [(found[path], count * expected[path]) for path in often]
    rare = count - sum(right for _, right in cells)
    if rare > 1:
        cells.append((count - sum(drawn for drawn, _ in cells), rare))
    free = len(cells) - 1
    total = sum((drawn - right) ** 2 / right for drawn, right in cells)
    return float(((total / free) ** (1 / 3) - 1 + 2 / (9 * free)) / (2 / (9 * free)) ** 0.5)


@pytest.mark.parametrize(
    ("temperature", "top_p", "count"),
    [
        (1.0, 1.0, 400),
        *(pytest.param(t, p, 4_000, marks=pytest.mark.proof) for t, p in ((0.5, 1.0), (1.0, 0.8), (1.7, 0.95))),
    ],
)
@pytest.mark.parametrize(
    "method",
    [*(pytest.param(m, marks=pytest.mark.proof) for m in ("ngram", "suffix", "draft_model")), "custom", "eagle3"],
)  # one that proposes tokens, and one that says their chances: what accepts them knows no other difference
def test_what_is_drawn_beside_drafts_is_distributed_as_the_models(
    method: Any, temperature: float, top_p: float, count: int, root: Path
) -> None:
    """Pearson's test, over whole paths: the model's own chances are told by its log-probabilities."""
    config = {}
    if (directory := {"draft_model": "draft", "eagle3": "eagle3"}.get(method)) is not None:
        drawn = {"draft_sample_method": "probabilistic", "model": str(root / "examples" / directory)}
        config = {"speculation": SpeculationConfig(method=method, **drawn)}
    model = Model(root / "examples/model_repository/demo/1", **config)
    try:
        draws = Draws(model, temperature, top_p)
        likely = sorted({token for path in draws.expected for token in path})
        drafters: dict[str, Drafter] = {"custom": OneOf(likely), "ngram": NgramDrafter(1, 4), "suffix": SuffixDrafter()}
        found, speculation = draws.draw(count, drafters.get(method, ProposedDrafts()))
    finally:
        model.executor.close()
    assert speculation.totals[NAME].accepted_tokens > count / 50
    check_draws(found, draws, count)


@pytest.mark.proof
@pytest.mark.parametrize("name", ["qwen3.5", "lfm2", "granite-hybrid"])
def test_what_a_model_with_states_draws_beside_drafts_is_distributed_as_its_own(
    name: str, checkpoint: Callable[..., Path]
) -> None:
    count = 3_000
    model = Model(checkpoint(name), scheduler=SchedulerConfig(max_num_seqs=128))
    try:
        draws = Draws(model, 1.0, 1.0)
        likely = sorted({token for path in draws.expected for token in path})
        found, speculation = draws.draw(count, OneOf(likely))
    finally:
        model.executor.close()
    assert speculation.totals[NAME].accepted_tokens > count / 50
    check_draws(found, draws, count)


def check_draws(found: Counter[tuple[int, ...]], draws: Draws, count: int) -> None:
    assert found.keys() <= draws.expected.keys()
    assert abs(deviation(found, draws.expected, count)) < 4, "chance does that once in ten thousand times"
