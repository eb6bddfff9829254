"""Split over ranks and stages, a model says what it says on one rank: greedy, token for token, whatever happens to its
requests. Ranks are threads here; processes have tests of their own."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from charonia.bench.inline_loop import LoopResult
from charonia.core.resolved_sampling import LogitsParams, ResolvedSampling
from charonia.engine.config import CacheConfig, EngineConfig, LoraConfig, ParallelConfig
from charonia.engine.cpu import library
from charonia.engine.worker.executor import Executor, StepFuture
from charonia.engine.worker.loaded_rank import LoadedRank
from charonia.kvcache.layer_groups import ONE_GROUP
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig, SnapshotRule
from charonia.scheduler.drafts.speculation import Drafter, DraftRequest, Speculation
from charonia.scheduler.plan import StepPlan
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceSpec

BLOCK, NEW, VOCAB = 16, 18, 384
LENGTHS = (3, 9, 44, 5, 10, 8, 17, 2, 21, 6)
SHARED = 33
"""Tokens that every second prompt begins with."""
CANCELLED = {4: 2, 9: 5}
"""Step -> who leaves before it."""
BLOCKS = 15
"""A third of what all of them need."""
FEW_BLOCKS = 9
"""The same in each group where some layers have windows, behind which they keep nothing."""
SCARCE_BLOCKS = 5
"""So few that what was shared comes back from the host's memory."""

LAYOUTS = {
    "TP 2": (2,),
    "TP 4": (4,),
    "PP 2": (1, 2),
    "PP 3 uneven": (1, 3, (1, 2, 1)),
    "TP 2 x PP 2": (2, 2),
}
SLIDING = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-linear-biased": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3-moe": {},
    "mixtral": {},
    "phi3": {},
    "gemma2": {"layer_types": SLIDING},
    "gemma3": {"layer_types": SLIDING},
    "gemma4": {},
    "gpt-oss": {"layer_types": SLIDING},
    "deepseek-v3": {},
}
IN_PROOFS: dict[str, dict[str, Any]] = {
    "smollm3": {},
    "olmo2": {},
    "olmo3": {"layer_types": SLIDING},
    "glm4-moe": {},
    "minimax-m2": {},
}
MODELS |= IN_PROOFS
"""Four layers each, and, all but the biased one, fewer key/value heads than four ranks."""
SHAPED = ResolvedSampling(
    0.9, 40, 0.95, 3, logits=LogitsParams(1.3, 0.5, 0.2, logit_bias=((7, 2.0),), bad_words=((5, 9), (11,))), logprobs=2
)


class Asked(NamedTuple):
    """How requests are served, how they choose, and the adapters that they have in turn. `host`: blocks and snapshots
    in the host's memory."""

    chunk: int = 19
    prefix: bool = True
    blocks: int = BLOCKS
    sampling: ResolvedSampling = ResolvedSampling()
    adapters: tuple[str, ...] = ("",)
    drafter: Drafter | None = None
    snapshots: int = 0
    draft_snapshots: int | None = None
    """Slots for the states before drafts, beside those; None: layers keep no states."""
    host: tuple[int, int] = (0, 0)


ALONE = Asked(4096, False, 64)
"""Undisturbed."""


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(17)
    drawn = [torch.randint(1, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]
    common = torch.randint(1, VOCAB, (SHARED,), generator=generator).tolist()
    return [common + own if number % 2 else own for number, own in enumerate(drawn)]


class Events(NamedTuple):
    outcome: LoopResult
    unfinished_chunks: int
    preemptions: int
    blocks_back: int
    """Blocks that came back from the host's memory."""
    snapshots_back: int


def serve(executor: Executor, asked: Asked, stages: int, cancelled: dict[int, int], ahead: int = 0) -> Events:
    """All requests at once, some of which leave, with every stage busy if it can be."""
    ranks: list[LoadedRank] = getattr(executor, "engines", [])
    groups = (ranks[0].groups if ranks else ONE_GROUP)._replace(
        in_flight=((ahead or stages - 1) + 1) * min(asked.chunk, 64)
    )
    scarce = groups.sliding and asked.blocks == BLOCKS
    blocks = (FEW_BLOCKS if scarce else asked.blocks) * groups.total
    host_blocks, host_snapshots = asked.host
    executor.allocate(blocks, host_blocks, asked.snapshots + (asked.draft_snapshots or 0), host_snapshots)
    sizes = blocks, BLOCK, asked.prefix, host_blocks, asked.snapshots, asked.draft_snapshots, groups, host_snapshots
    cache = KVCacheManager(*sizes)
    config = SchedulerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=asked.chunk,
        max_model_len=256,
        ahead=ahead or stages - 1,
        in_flight_per_sequence=1 if stages > 1 else None,
        snapshots=SnapshotRule(least_gain=BLOCK, generated_stride=BLOCK),
    )
    speculation = None if asked.drafter is None else Speculation({"first": asked.drafter}, 4, VOCAB)
    scheduler = Scheduler(config, cache, speculation=speculation)
    for request in requests(cache, asked):
        scheduler.add(request)
    events = turn(scheduler, executor, cancelled)
    scheduler.check_integrity()
    assert cache.free_blocks == blocks
    return events


def requests(cache: KVCacheManager, asked: Asked) -> Iterable[SequenceSpec]:
    for key, prompt in enumerate(prompts()):
        tokens, adapter = np.array(prompt, np.int32), asked.adapters[key % len(asked.adapters)]
        yield SequenceSpec(
            key=key,
            prompt=tokens,
            max_tokens=NEW,
            hashes=cache.digest(tokens, (adapter, "", "")),
            sampling=asked.sampling,
            adapter=adapter,
        )


def turn(scheduler: Scheduler, executor: Executor, cancelled: dict[int, int]) -> Events:
    outcome, flying, plans = LoopResult(), deque[StepFuture](), list[StepPlan]()
    while scheduler.has_work:
        if outcome.steps in cancelled:
            scheduler.abort([cancelled[outcome.steps]])
        while plan := scheduler.schedule():
            plans.append(plan)
            flying.append(executor.execute(plan))
        outcome.most_in_flight = max(outcome.most_in_flight, len(flying))
        outcome.steps += 1
        if flying:
            outcome.add(scheduler.apply(flying.popleft().result()))
    unfinished = sum(int((~plan.samples).sum()) for plan in plans)
    blocks_back = sum(int(plan.block_copies[:, 2].sum()) for plan in plans)
    snapshots_back = sum(int(plan.state_copies[:, 2].sum()) for plan in plans)
    return Events(outcome, unfinished, scheduler.totals.preemptions, blocks_back, snapshots_back)


@pytest.fixture(scope="module")
def threads(sibling: Callable[[str], ModuleType]) -> ModuleType:
    return sibling("engine/threads.py")


@pytest.fixture(scope="module")
def config(checkpoint: Callable[..., Path]) -> Callable[..., EngineConfig]:
    def make(name: str, dtype: str = "float32", **changes: Any) -> EngineConfig:
        directory = checkpoint(name, **({"num_hidden_layers": 4} | MODELS[name] if name in MODELS else {}))
        cache = CacheConfig(block_size=BLOCK, layer_groups=True)
        return EngineConfig(model=str(directory), device="cpu", dtype=dtype, cache=cache, **changes)

    return make


@pytest.fixture(scope="module")
def one_rank(threads: ModuleType, config: Callable[..., EngineConfig]) -> Callable[..., LoopResult]:
    """What each model says, undisturbed."""
    known: dict[tuple[str, ResolvedSampling], LoopResult] = {}

    def ask(name: str, sampling: ResolvedSampling = ALONE.sampling) -> LoopResult:
        if (name, sampling) not in known:
            with threads.ranks(config(name), threads.Layout()) as executor:
                known[name, sampling] = serve(executor, ALONE._replace(sampling=sampling), 1, {}).outcome
        return known[name, sampling]

    return ask


SLIDING_MODELS = "olmo3", "gemma2", "gemma3", "gemma4", "gpt-oss", "phi3"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.proof) if name in IN_PROOFS else name for name in MODELS]
)
def test_greedy_tokens_are_those_of_one_rank(
    name: str,
    layout: tuple[Any, ...],
    threads: ModuleType,
    config: Callable[..., EngineConfig],
    one_rank: Callable[..., LoopResult],
) -> None:
    """With chunks, prefix hits, preemption and cancels, all of which happen."""
    split = threads.Layout(*layout)
    with threads.ranks(config(name), split) as executor:
        events = serve(executor, Asked(), split.stages, CANCELLED)
    assert texts(events.outcome, *CANCELLED.values()) == texts(one_rank(name), *CANCELLED.values())
    assert events.outcome.finished.keys().isdisjoint(CANCELLED.values())
    assert events.unfinished_chunks > 2
    assert sum(events.outcome.cached.values()) >= 2 * BLOCK
    # Where all layers have windows, no sequence grows beyond what it was admitted for.
    assert (events.preemptions > 0) == (name != "phi3")
    # Where layers slide, so few blocks hold two steps' tokens.
    assert events.outcome.most_in_flight == split.stages - (name in SLIDING_MODELS and split.stages == 3)


def texts(outcome: LoopResult, *left: int) -> dict[int, list[int]]:
    """Of those who did not leave."""
    return {key: outcome.tokens[key] for key in range(len(LENGTHS)) if key not in left}


def test_queries_that_are_normalised_over_all_heads_may_be_shared(
    threads: ModuleType, config: Callable[..., EngineConfig], one_rank: Callable[..., LoopResult]
) -> None:
    """By more ranks than there are heads of keys, of which two then have the same one."""
    split = threads.Layout(4)
    with threads.ranks(config("olmo2"), split) as executor:
        events = serve(executor, ALONE, split.stages, {})
    assert texts(events.outcome) == texts(one_rank("olmo2"))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("layout", [(2,), (4,), (2, 2)], ids=["TP 2", "TP 4", "TP 2 x PP 2"])
@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "gpt-oss", "deepseek-v3"])
def test_whole_experts_say_the_same(
    name: str,
    layout: tuple[int, ...],
    threads: ModuleType,
    config: Callable[..., EngineConfig],
    one_rank: Callable[..., LoopResult],
) -> None:
    split = threads.Layout(*layout)
    with threads.ranks(config(name, parallel=ParallelConfig(whole_experts=True)), split) as executor:
        events = serve(executor, Asked(), split.stages, {})
    assert texts(events.outcome) == texts(one_rank(name))


@pytest.mark.parametrize("layout", [(4,), (1, 3)], ids=["TP 4", "PP 3"])
def test_slices_need_not_be_equal(
    layout: tuple[int, ...], threads: ModuleType, checkpoint: Callable[..., Path]
) -> None:
    """Nothing here can be divided by four but the heads."""
    directory = checkpoint(
        "qwen3-moe", num_hidden_layers=4, vocab_size=391, intermediate_size=97, moe_intermediate_size=49
    )
    config = EngineConfig(model=str(directory), device="cpu", cache=CacheConfig(block_size=BLOCK))
    with threads.ranks(config, threads.Layout()) as executor:
        whole = serve(executor, ALONE, 1, {}).outcome
    split = threads.Layout(*layout)
    with threads.ranks(config, split) as executor:
        assert texts(serve(executor, Asked(), split.stages, {}).outcome) == texts(whole)


@pytest.mark.parametrize("layout", [(2,), (1, 3), (2, 2)], ids=["TP 2", "PP 3", "TP 2 x PP 2"])
def test_sampled_tokens_are_those_of_one_rank(
    layout: tuple[int, ...],
    threads: ModuleType,
    config: Callable[..., EngineConfig],
    one_rank: Callable[..., LoopResult],
) -> None:
    """With penalties, bans and logprobs: the last stage knows what it chose, and what it was told."""
    split, right = threads.Layout(*layout), one_rank("llama", SHAPED)
    with threads.ranks(config("llama"), split) as executor:
        found = serve(executor, Asked(sampling=SHAPED), split.stages, {}).outcome
    assert texts(found) == texts(right)
    for key, logprobs in found.logprobs.items():
        assert np.allclose(
            [logprob.chosen for logprob in logprobs], [each.chosen for each in right.logprobs[key]], atol=1e-3
        )


NATIVE = pytest.mark.skipif(library.level() is None, reason="torch's own products promise no such thing")


@NATIVE
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_pipeline_changes_no_bit(name: str, threads: ModuleType, config: Callable[..., EngineConfig]) -> None:
    """What travels is what one rank goes on with, in bfloat16 too."""
    half = config(name, "bfloat16")
    with threads.ranks(half, threads.Layout()) as executor:
        whole = serve(executor, ALONE._replace(sampling=SHAPED), 1, {}).outcome
    with threads.ranks(half, threads.Layout(1, 3)) as executor:
        staged = serve(executor, Asked(sampling=SHAPED, blocks=SCARCE_BLOCKS, host=(40, 0)), 3, {})
    assert staged.outcome.tokens == whole.tokens
    assert staged.outcome.logprobs == whole.logprobs
    assert staged.blocks_back


@NATIVE
def test_a_pipeline_of_layers_with_states_changes_no_bit(threads: ModuleType, checkpoint: Callable[..., Path]) -> None:
    """Each stage restores and keeps the states of its own layers, on the host too."""
    directory = checkpoint("qwen3.5", num_hidden_layers=8)
    config = EngineConfig(model=str(directory), device="cpu", cache=CacheConfig(block_size=BLOCK))
    with threads.ranks(config, threads.Layout()) as executor:
        whole = serve(executor, ALONE, 1, {}).outcome
    with threads.ranks(config, threads.Layout(1, 2)) as executor:
        staged = serve(executor, Asked(snapshots=2, blocks=SCARCE_BLOCKS, host=(40, 8)), 2, {})
    assert staged.outcome.tokens == whole.tokens
    assert sum(staged.outcome.cached.values()) >= 2 * BLOCK
    assert staged.blocks_back
    assert staged.snapshots_back


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen3.5", (2, 2)),
        ("granite-hybrid", (4,)),
        pytest.param("lfm2", (2,), marks=pytest.mark.proof),
        pytest.param("falcon-h1", (4,), marks=pytest.mark.proof),
        pytest.param("nemotron-h", (2,), marks=pytest.mark.proof),
        pytest.param("nemotron-h", (4,), marks=pytest.mark.proof),
        pytest.param("nemotron-3", (2,), marks=pytest.mark.proof),
        pytest.param("mamba2", (4,), marks=pytest.mark.proof),
        pytest.param("bamba", (2,), marks=pytest.mark.proof),
        pytest.param("granite-hybrid-moe", (2,), marks=pytest.mark.proof),
        pytest.param("lfm2-moe", (4,), marks=pytest.mark.proof),
        pytest.param("qwen3-next", (2,), marks=pytest.mark.proof),
        pytest.param("qwen3.5-moe", (2,), marks=pytest.mark.proof),
    ],
)
def test_ranks_share_the_heads_of_states(
    name: str, layout: tuple[int, ...], threads: ModuleType, checkpoint: Callable[..., Path]
) -> None:
    """With preemption, snapshots and drafts, of which the last token is wrong."""
    changes = {"num_hidden_layers": 8} if name == "qwen3.5" else {}
    config = EngineConfig(model=str(checkpoint(name, **changes)), device="cpu", cache=CacheConfig(block_size=BLOCK))
    with threads.ranks(config, threads.Layout()) as executor:
        whole = serve(executor, ALONE, 1, {}).outcome
    split, drafter = threads.Layout(*layout), _FirstRight(whole.tokens)
    with threads.ranks(config, split) as executor:
        drafted = Asked(snapshots=12, drafter=drafter, draft_snapshots=6)
        both = [serve(executor, asked, split.stages, CANCELLED) for asked in (Asked(snapshots=6), drafted)]
    for events in both:
        assert texts(events.outcome, *CANCELLED.values()) == texts(whole, *CANCELLED.values())
        assert sum(events.outcome.cached.values()) >= 2 * BLOCK
    assert both[0].preemptions > 0
    assert drafter.drafted > 20


@NATIVE
def test_on_two_ranks_too_a_request_gets_the_same_in_any_company(
    threads: ModuleType, config: Callable[..., EngineConfig]
) -> None:
    """Bit for bit: the sum of two is the same in either order."""
    with threads.ranks(config("llama", "bfloat16"), threads.Layout(2)) as executor:
        alone = serve(executor, ALONE._replace(sampling=SHAPED), 1, {}).outcome
        found = serve(executor, Asked(sampling=SHAPED), 1, {}).outcome
    assert found.tokens == alone.tokens
    assert found.logprobs == alone.logprobs


def test_ranks_choose_alike_while_plans_run_ahead(
    threads: ModuleType, config: Callable[..., EngineConfig], one_rank: Callable[..., LoopResult]
) -> None:
    """A row's next step is planned before the host knows its token: every rank has it by then."""
    with threads.ranks(config("llama"), threads.Layout(2)) as executor:
        found = serve(executor, Asked(sampling=SHAPED), 1, {}, ahead=2).outcome
    assert texts(found) == texts(one_rank("llama", SHAPED))
    assert found.most_in_flight == 3


class _FirstRight:
    """Of what other rows are answered with: the first tokens are right, the last one of a draft is wrong."""

    def __init__(self, answers: dict[int, list[int]]) -> None:
        self._answers = {tuple(prompt): answers[key] for key, prompt in enumerate(prompts())}
        self.drafted = 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        self.drafted += len(requests)
        found = []
        for request in requests:
            answer, done = self._answers[tuple(request.prompt.tolist())], len(request.outputs)
            found.append([*answer[done : done + request.k - 1], 0][: request.k])
        return found


@pytest.mark.parametrize("layout", [(2,), (1, 3)], ids=["TP 2", "PP 3"])
def test_drafts_are_verified_on_ranks_as_on_one(
    layout: tuple[int, ...],
    threads: ModuleType,
    config: Callable[..., EngineConfig],
    one_rank: Callable[..., LoopResult],
) -> None:
    """Every stage has the drafts, and later the token in place of the wrong one."""
    split, right = threads.Layout(*layout), one_rank("llama", SHAPED)
    drafter = _FirstRight(right.tokens)
    with threads.ranks(config("llama"), split) as executor:
        events = serve(executor, Asked(sampling=SHAPED, drafter=drafter), split.stages, {})
    assert texts(events.outcome) == texts(right)
    assert drafter.drafted > 20


def test_int8_on_two_ranks_is_as_near_as_on_one(threads: ModuleType, config: Callable[..., EngineConfig]) -> None:
    """Activations of a row-parallel layer are scaled by the largest number of a rank's slice, not of the whole: what
    comes out is not the same, and about as good."""

    def first_logprobs(layout: Any, quantization: str) -> np.ndarray:
        asked = ALONE._replace(sampling=ResolvedSampling(logprobs=VOCAB))
        with threads.ranks(config("llama", quantization=quantization), layout) as executor:
            outcome = serve(executor, asked, 1, {}).outcome
        firsts = [outcome.logprobs[key][0] for key in range(len(LENGTHS))]
        return np.array([np.array(each.values)[np.argsort(each.ids)] for each in firsts])

    right = first_logprobs(threads.Layout(), "none")
    one, two = (first_logprobs(threads.Layout(tensor), "int8") - right for tensor in (1, 2))
    assert not np.array_equal(one, two)
    assert np.square(two).mean() < 2 * np.square(one).mean()


@pytest.mark.parametrize(
    ("name", "layout", "whole_experts"),
    [
        ("llama-linear-biased", (2,), False),
        ("qwen2", (1, 3), False),
        ("qwen3-moe", (2,), True),
        pytest.param("qwen3-moe", (2, 2), True, marks=pytest.mark.proof),
        pytest.param("qwen3-moe", (4,), False, marks=pytest.mark.proof),
        pytest.param("phi3", (2, 2), False, marks=pytest.mark.proof),
        pytest.param("qwen2", (4,), False, marks=pytest.mark.proof),
        pytest.param("qwen3.5", (2,), False, marks=pytest.mark.proof),
        pytest.param("falcon-h1", (2,), False, marks=pytest.mark.proof),
        pytest.param("granite-hybrid", (4,), False, marks=pytest.mark.proof),
    ],
)
def test_rows_with_adapters_say_what_they_do_on_one_rank(
    name: str,
    layout: tuple[int, ...],
    whole_experts: bool,
    threads: ModuleType,
    sibling: Callable[[str], ModuleType],
    config: Callable[..., EngineConfig],
    tmp_path: Path,
) -> None:
    """Each rank has its share of an adapter's matrices, or those of its experts."""
    parallel = ParallelConfig(whole_experts=whole_experts)
    snapshots = 0 if name in MODELS else 6
    adapters, settings = sibling("adapters.py"), config(name, lora=LoraConfig(max_bytes=1 << 26), parallel=parallel)
    layers = adapters.layers_of(Path(settings.model))
    paths = [str(adapters.write_adapter(tmp_path / str(seed), layers, seed)) for seed in range(2)]

    def texts_on(split: Any, asked: Asked) -> dict[int, list[int]]:
        with threads.ranks(settings, split) as executor:
            found = [executor.load_adapter(path) for path in paths]
            asked = asked._replace(adapters=("", *(digest for digests in found for digest in digests)))
            assert len(asked.adapters) == 3, "ranks agree about what they read"
            return texts(serve(executor, asked, split.stages, {}).outcome)

    whole, split = texts_on(threads.Layout(), ALONE), texts_on(threads.Layout(*layout), Asked(snapshots=snapshots))
    assert split == whole
