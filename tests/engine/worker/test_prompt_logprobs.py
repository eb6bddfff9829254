"""Logprobs of prompts: transformers' own, and bit for bit the same whatever the scheduler does to the requests."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from charonia.bench.inline_loop import LoopResult, run_to_end
from charonia.core.logprobs import RankedLogprobs
from charonia.core.resolved_sampling import ResolvedSampling
from charonia.engine.config import CacheConfig, EngineConfig
from charonia.engine.cpu import library
from charonia.engine.worker import logprobs
from charonia.engine.worker.executor import Executor
from charonia.engine.worker.inline_executor import InlineExecutor
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.plan import StepPlan
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceSpec

BLOCK, NEW = 16, 32
LENGTHS = (1, 2, 40, 17, 90, 33, 150, 8)
PLAIN = (3, 5)
"""Those who ask for no scores, and share a prefix with the one before."""
SHARED = 32
MOST = 3


@dataclass(frozen=True)
class Setting:
    """What is done to the requests; `blocks` for all of them, or few."""

    chunk: int = 4096
    blocks: int = 64
    prefix: bool = False
    ahead: int = 0
    stages: int = 1


SETTINGS = {
    "plain": Setting(),
    "chunked": Setting(chunk=29),
    "preempted": Setting(blocks=12),
    "everything": Setting(chunk=29, blocks=12, prefix=True, ahead=1),
}


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    drawn = [torch.randint(1, 384, (length,), generator=generator).tolist() for length in LENGTHS]
    for place in PLAIN:
        drawn[place] = drawn[place - 1][:SHARED] + drawn[place]
    return drawn


def config(checkpoint: Path) -> EngineConfig:
    return EngineConfig(model=str(checkpoint), device="cpu", cache=CacheConfig(block_size=BLOCK))


def serve(executor: Executor, setting: Setting) -> tuple[LoopResult, list[StepPlan]]:
    """All requests at once."""
    cache, plans = KVCacheManager(setting.blocks, BLOCK, setting.prefix), list[StepPlan]()
    scheduler = SchedulerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=setting.chunk,
        max_model_len=256,
        ahead=setting.ahead or setting.stages - 1,
        in_flight_per_sequence=1 if setting.stages > 1 else None,
    )
    executor.allocate(setting.blocks)
    outcome = run_to_end(Scheduler(scheduler, cache), executor, requests(cache), observe=plans.append)
    assert cache.free_blocks == setting.blocks
    return outcome, plans


def requests(cache: KVCacheManager) -> Iterator[SequenceSpec]:
    for key, prompt in enumerate(prompts()):
        tokens = np.array(prompt, np.int32)
        sampling = ResolvedSampling(prompt_logprobs=None if key in PLAIN else MOST, logprobs=MOST)
        yield SequenceSpec(key=key, prompt=tokens, max_tokens=NEW, hashes=cache.digest(tokens), sampling=sampling)


@pytest.fixture(scope="module")
def right(checkpoint: Callable[..., Path]) -> Callable[[str], list[torch.Tensor]]:
    """log_softmax [P, vocabulary] of each prompt, alone, by transformers."""
    known: dict[str, list[torch.Tensor]] = {}

    @torch.inference_mode()
    def ask(name: str) -> list[torch.Tensor]:
        if name not in known:
            model: Any = AutoModelForCausalLM.from_pretrained(checkpoint(name), dtype=torch.float32)
            known[name] = [model(torch.tensor([prompt])).logits[0].log_softmax(-1) for prompt in prompts()]
        return known[name]

    return ask


def assert_right(outcome: LoopResult, right: list[torch.Tensor]) -> None:
    scored = {key: prompt for key, prompt in enumerate(prompts()) if key not in PLAIN and len(prompt) > 1}
    assert outcome.scores.keys() == scored.keys()
    for key, prompt in scored.items():
        assert_prompt(outcome.scores[key], right[key][:-1], torch.tensor(prompt[1:]))


def assert_prompt(scores: list[RankedLogprobs], right: torch.Tensor, tokens: torch.Tensor) -> None:
    """What the model gives `tokens` [T], and the likeliest in their places, by `right` [T, vocabulary]."""
    own = right.gather(-1, tokens.unsqueeze(-1))
    values, ids = right.topk(MOST)
    assert len(scores) == len(tokens)
    torch.testing.assert_close(torch.tensor([score.logprobs.chosen for score in scores]), own[:, 0], rtol=0, atol=5e-5)
    torch.testing.assert_close(torch.tensor([score.logprobs.values for score in scores]), values, rtol=0, atol=5e-5)
    assert [score.logprobs.ids for score in scores] == ids.tolist()
    assert [score.rank for score in scores] == ((right > own).sum(-1) + 1).tolist()


@pytest.fixture(scope="module")
def executor(checkpoint: Callable[..., Path]) -> Iterator[Callable[[str], InlineExecutor]]:
    made: dict[str, InlineExecutor] = {}

    def make(name: str) -> InlineExecutor:
        if name not in made:
            made[name] = InlineExecutor(config(checkpoint(name)))
            made[name].load(lambda phase, fraction: None)
        return made[name]

    yield make
    for value in made.values():
        value.close()


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=list(SETTINGS))
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-neox"])
def test_scores_are_transformers(
    name: str,
    setting: Setting,
    executor: Callable[[str], InlineExecutor],
    right: Callable[[str], list[torch.Tensor]],
) -> None:
    outcome, plans = serve(executor(name), setting)
    assert_right(outcome, right(name))
    cut = any(not plan.samples.all() for plan in plans)
    again = sum(len(plan.new) for plan in plans) > len(LENGTHS)
    assert (cut, again) == (setting.chunk < 100, setting.blocks < 64), "it did not happen"


def test_pieces_of_any_size_say_the_same(
    executor: Callable[[str], InlineExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = serve(executor("llama"), Setting())
    monkeypatch.setattr(logprobs, "LOGITS_PIECE", 7)
    cut, _ = serve(executor("llama"), Setting())
    assert (cut.scores, cut.tokens) == (whole.scores, whole.tokens)


@pytest.mark.skipif(library.level() is None, reason="torch's own products promise no such thing")
def test_nothing_changes_a_bit(executor: Callable[[str], InlineExecutor]) -> None:
    """Nor does it change what those get who do not ask."""
    plain, _ = serve(executor("llama"), Setting())
    for setting in SETTINGS.values():
        outcome, _ = serve(executor("llama"), setting)
        assert (outcome.scores, outcome.tokens, outcome.logprobs) == (plain.scores, plain.tokens, plain.logprobs)


@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (1, 2)], ids=["TP 2", "PP 2"])
def test_ranks_score_as_one(
    tensor: int,
    stages: int,
    sibling: Callable[[str], ModuleType],
    checkpoint: Callable[..., Path],
    right: Callable[[str], list[torch.Tensor]],
) -> None:
    threads = sibling("engine/threads.py")
    with threads.ranks(config(checkpoint("llama")), threads.Layout(tensor, stages)) as executor:
        outcome, _ = serve(executor, Setting(chunk=29, blocks=14, prefix=True, stages=stages))
    assert_right(outcome, right("llama"))


def test_heads_are_only_as_long_as_asked_for(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are computed where a token is sampled or scored alone; in pieces where those are many places."""
    monkeypatch.setattr(logprobs, "LOGITS_PIECE", 16)
    with closing(InlineExecutor(config(checkpoint("llama")))) as executor:
        executor.load(lambda phase, fraction: None)
        decoder, sizes = executor.rank.runner.computer.decoder, list[int]()
        begun = decoder.begin_step

        def begin_step(context: Any, places: Any, samples: Any) -> Any:
            step = begun(context, places, samples)
            more_logits = step.more_logits

            def more(selections: Any) -> Any:
                sizes.extend(len(places) for places in selections)
                return more_logits(selections)

            sizes.append(len(places))
            monkeypatch.setattr(step, "more_logits", more)
            return step

        monkeypatch.setattr(decoder, "begin_step", begin_step)
        executor.allocate(8)
        for wanted, prompt, expected in ((None, 40, [1]), (0, 40, [1, 16, 16, 7]), (0, 12, [12])):
            cache = KVCacheManager(8, BLOCK)
            asked = SequenceSpec(
                key=0,
                prompt=np.arange(1, prompt + 1, dtype=np.int32),
                max_tokens=1,
                sampling=ResolvedSampling(prompt_logprobs=wanted),
            )
            sizes.clear()
            run_to_end(
                Scheduler(SchedulerConfig(max_num_batched_tokens=64, max_model_len=256), cache), executor, [asked]
            )
            assert sizes == expected
