"""The heart of it: whatever the scheduler does to a request, its greedy tokens are those of transformers.generate."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from charonia.bench.inline_loop import LoopResult, run_to_end
from charonia.core.resolved_sampling import ResolvedSampling
from charonia.engine.config import CacheConfig, EngineConfig
from charonia.engine.cpu import library
from charonia.engine.worker.inline_executor import InlineExecutor
from charonia.kvcache.manager import KVCacheManager
from charonia.kvcache.sliding.sliding_groups import SpanDemand
from charonia.scheduler.config import SchedulerConfig, SnapshotRule
from charonia.scheduler.plan import StepPlan
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceSpec
from tests.checkpoints import LLAMA_KIN

from .transformers_choices import chosen_after

BLOCK = 16
GREEDY = ResolvedSampling()
NEW = 32
LENGTHS = (1, 2, 7, 8, 9, 16, 23, 31, 40, 50, 64, 65, 77, 90, 100, 120)
SNAPSHOTS, RULE = 12, SnapshotRule(prompt_stride=32, generated_stride=16, least_gain=16)
"""Of states, of a model that has some."""
SHARED = 33
"""Tokens that every second prompt begins with: two whole blocks and a bit."""


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    drawn = [torch.randint(1, 384, (length,), generator=generator).tolist() for length in LENGTHS]
    common = torch.randint(1, 384, (SHARED,), generator=generator).tolist()
    return [common + own if number % 2 else own for number, own in enumerate(drawn)]


@dataclass(frozen=True)
class Setting:
    """What is done to the requests. `tight`: a cache for a sixth of them."""

    chunk: int = 4096
    prefix: bool = False
    tight: bool = False
    ahead: int = 0
    rows: int = 16


SETTINGS = {
    "plain": Setting(),
    "chunked": Setting(chunk=29),
    "prefix": Setting(prefix=True),
    "preempted": Setting(tight=True),
    "ahead 1": Setting(ahead=1),
    "ahead 2": Setting(ahead=2),
    "everything, ahead 1": Setting(chunk=29, prefix=True, tight=True, ahead=1),
    "everything, ahead 2": Setting(chunk=29, prefix=True, tight=True, ahead=2),
}


class Events:
    """What really happened, read off the plans."""

    def __init__(self) -> None:
        self.unfinished_chunks = self.admissions = 0

    def observe(self, plan: StepPlan) -> None:
        self.unfinished_chunks += int((~plan.samples).sum())
        self.admissions += len(plan.new)


class Bench:
    """One loaded executor, and schedulers as the settings want them."""

    longest = 256
    """Tokens of a sequence."""

    def __init__(
        self, checkpoint: Path, backend: str, length: int | None = None, how: Mapping[str, Any] | None = None
    ) -> None:
        """`backend` "torch" is the machine without a compiler. `how`: other fields of the configuration."""
        config = EngineConfig(
            model=str(checkpoint),
            device="cpu",
            attention="auto" if backend == "torch" else backend,
            cache=CacheConfig(block_size=BLOCK, layer_groups=True),
            max_model_len=length,
        )
        self.executor = InlineExecutor(msgspec.structs.replace(config, **how or {}))
        with patch.object(library, "level", lambda: None) if backend == "torch" else nullcontext():
            self.executor.load(lambda phase, fraction: None)

    def run(
        self, setting: Setting, sampling: ResolvedSampling = GREEDY, asked: Sequence[list[int]] = ()
    ) -> tuple[LoopResult, Events]:
        asked, events = asked or prompts(), Events()
        groups = self.executor.rank.groups
        spans = [-(-(len(prompt) + NEW) // BLOCK) for prompt in asked]
        blocks = sum(spans) * groups.total
        if setting.tight and groups.sliding:  # room for the longest and no more
            groups = groups._replace(in_flight=(setting.ahead + 1) * min(setting.chunk, 64))
            blocks = SpanDemand(groups, BLOCK).blocks(max(spans))
        elif setting.tight:
            blocks = blocks // 6
        snapshots = SNAPSHOTS if self.executor.rank.runner.computer.stores.states is not None else 0
        cache = KVCacheManager(blocks, BLOCK, setting.prefix, snapshots=snapshots, groups=groups)
        config = SchedulerConfig(
            max_num_seqs=setting.rows,
            max_num_batched_tokens=setting.chunk,
            max_model_len=self.longest,
            ahead=setting.ahead,
            snapshots=RULE,
        )
        self.executor.allocate(blocks, 0, snapshots)
        requests = [self.request(cache, key, prompt, sampling) for key, prompt in enumerate(asked)]
        outcome = run_to_end(Scheduler(config, cache), self.executor, requests, observe=events.observe)
        cache.check_integrity()
        return outcome, events

    def request(self, cache: KVCacheManager, key: int, prompt: list[int], sampling: ResolvedSampling) -> SequenceSpec:
        tokens = np.array(prompt, np.int32)
        hashes = cache.digest(tokens)
        return SequenceSpec(key=key, prompt=tokens, max_tokens=NEW, hashes=hashes, sampling=sampling)


@pytest.fixture(scope="module")
def generated(checkpoint: Callable[..., Path]) -> Callable[[str], list[list[int]]]:
    """What transformers generates for each prompt, alone and greedily, by configuration."""
    known: dict[str, list[list[int]]] = {}

    def generate(name: str) -> list[list[int]]:
        if name not in known:
            model: Any = AutoModelForCausalLM.from_pretrained(checkpoint(name), dtype=torch.float32)
            model.generation_config.eos_token_id = None
            known[name] = [continued(model, prompt) for prompt in prompts()]
        return known[name]

    return generate


@torch.inference_mode()
def continued(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    return list(out[0, len(prompt) :].tolist())


@pytest.fixture(scope="module")
def followed(checkpoint: Callable[..., Path]) -> Callable[..., list[list[int]]]:
    """What transformers chooses greedily after each prompt and after each of the tokens given for it, in one pass: the
    tokens themselves exactly where they are what it would generate."""
    models: dict[str, Any] = {}

    def follow(name: str, texts: list[list[int]], asked: Sequence[list[int]] = ()) -> list[list[int]]:
        if name not in models:
            models[name] = AutoModelForCausalLM.from_pretrained(checkpoint(name), dtype=torch.float32)
        return [chosen_after(models[name], *each) for each in zip(asked or prompts(), texts, strict=True)]

    return follow


@pytest.fixture(scope="module")
def bench(checkpoint: Callable[..., Path]) -> Iterator[Callable[[str, str], Bench]]:
    made: dict[tuple[str, str], Bench] = {}

    def make(name: str, backend: str) -> Bench:
        if (name, backend) not in made:
            made[name, backend] = Bench(checkpoint(name), backend)
        return made[name, backend]

    yield make
    for value in made.values():
        value.executor.close()


@pytest.mark.one_in(5)
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=list(SETTINGS))
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "auto") for name in ("llama", "llama-llama3-tied", "llama-linear-biased", "qwen2")),
        *((name, "torch") for name in ("llama", "qwen2")),
        ("llama", "reference"),
    ],
)
def test_greedy_tokens_are_transformers(
    name: str,
    backend: str,
    setting: Setting,
    bench: Callable[[str, str], Bench],
    followed: Callable[[str, list[list[int]]], list[list[int]]],
) -> None:
    outcome, events = bench(name, backend).run(setting)
    texts = [outcome.tokens[key] for key in range(len(LENGTHS))]
    assert texts == followed(name, texts)
    assert {len(text) for text in texts} == {NEW}
    assert set(outcome.finished.values()) == {"length"}
    assert_it_happened(setting, outcome, events)


OTHERS = ("qwen2-window", "mixtral", "gemma3", "gemma4-small", "gpt-oss", "smollm3", "deepseek-v3", "starcoder2", "opt")
"""One of each kind that scheduling may touch in a way of its own: windows everywhere, experts, windows in some layers,
caches that layers share, sinks, layers without positions, latents, and families of transformers' code that have
windows, or positions that are learned."""
MORE = (
    "qwen2-yarn",
    "mistral",
    "qwen3",
    "qwen3-moe",
    "phi3",
    "gemma2",
    "gemma4",
    "gemma4-moe",
    "gemma3n",
    "gpt-neox",
    "granite",
    "cohere2",
    *LLAMA_KIN,
    "deepseek-v2",
    "glm4-lite",
    "deepseek-v3.2",
    "glm5",
)
"""Whose layers are of those kinds; what they compute themselves is compared in test_models.py."""
RECURRENT = ("qwen3.5", "lfm2", "granite-hybrid")
OTHER_RECURRENT = ("nemotron-h", "falcon-h1", "mamba", "mamba2")
MORE_RECURRENT = ("nemotron-3", "bamba", "falcon-mamba", "zamba2")
"""The same layers in other families, or with experts, which know nothing of how they are scheduled."""


@pytest.mark.parametrize("setting", [pytest.param("plain", marks=pytest.mark.proof), "everything, ahead 1"])
@pytest.mark.parametrize(
    "name",
    [*OTHERS, *(pytest.param(name, marks=pytest.mark.proof) for name in MORE)],
)
def test_other_architectures_are_transformers(
    name: str,
    setting: str,
    bench: Callable[[str, str], Bench],
    followed: Callable[[str, list[list[int]]], list[list[int]]],
) -> None:
    """Windows here are shorter than most prompts."""
    test_greedy_tokens_are_transformers(name, "auto", SETTINGS[setting], bench, followed)


@pytest.mark.parametrize(
    ("name", "backend", "setting"),
    [
        ("qwen3.5", "auto", "prefix"),
        *(pytest.param(name, "auto", "prefix", marks=pytest.mark.proof) for name in RECURRENT[1:]),
        *((name, "auto", "everything, ahead 2") for name in RECURRENT),
        ("qwen3.5", "torch", "everything, ahead 1"),
        *(pytest.param(name, "torch", "everything, ahead 1", marks=pytest.mark.proof) for name in RECURRENT[1:]),
    ],
)
def test_models_with_states_are_transformers(
    name: str,
    backend: str,
    setting: str,
    bench: Callable[[str, str], Bench],
    followed: Callable[[str, list[list[int]]], list[list[int]]],
) -> None:
    """Sequences that share a prefix, or begin again, go on from snapshots."""
    test_greedy_tokens_are_transformers(name, backend, SETTINGS[setting], bench, followed)


@pytest.mark.parametrize(
    "name", [*OTHER_RECURRENT, *(pytest.param(name, marks=pytest.mark.proof) for name in MORE_RECURRENT)]
)
def test_other_models_with_states_are_transformers(
    name: str, bench: Callable[[str, str], Bench], followed: Callable[[str, list[list[int]]], list[list[int]]]
) -> None:
    test_greedy_tokens_are_transformers(name, "auto", SETTINGS["everything, ahead 1"], bench, followed)


@pytest.mark.parametrize("length", [None, 256])
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *(("phi3.5", backend) for backend in ("auto", "torch", "cpu")),
        ("phi4-mini", "auto"),
        *(pytest.param("phi4-mini", backend, marks=pytest.mark.proof) for backend in ("torch", "cpu")),
    ],
)
def test_longrope_is_transformers_on_either_side_of_its_length(
    name: str,
    length: int | None,
    backend: str,
    checkpoint: Callable[..., Path],
    generated: Callable[[str], list[list[int]]],
) -> None:
    """transformers changes factors when a text becomes longer than 64 tokens, the keys it has cached keep the old ones.
    Here the length that is asked for decides: texts that stay on its side come out the same."""
    bench = Bench(checkpoint(name), backend, length)
    whole = list(zip(prompts(), generated(name), strict=True))
    texts = [each for each in whole if (len(each[0]) > 64 if length else len(each[0]) + NEW <= 64)]
    outcome, _ = bench.run(Setting(chunk=29), asked=[prompt for prompt, _ in texts])
    assert len(texts) > 3
    assert [outcome.tokens[key] for key in range(len(texts))] == [right for _, right in texts]
    bench.executor.close()


@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
def test_one_row_at_a_time_says_the_same(
    backend: str, bench: Callable[[str, str], Bench], followed: Callable[..., list[list[int]]]
) -> None:
    asked = prompts()[::3]
    outcome, _ = bench("llama", backend).run(Setting(rows=1), asked=asked)
    texts = [outcome.tokens[key] for key in range(len(asked))]
    assert texts == followed("llama", texts, asked)


def assert_it_happened(setting: Setting, outcome: LoopResult, events: Events) -> None:
    """A scenario that did not occur proves nothing."""
    preemptions = events.admissions - len(LENGTHS)
    assert (events.unfinished_chunks > 5) == (setting.chunk < 100)
    assert (sum(outcome.cached.values()) > 100) == setting.prefix
    assert (preemptions > 0) == setting.tight
    assert outcome.most_in_flight == setting.ahead + 1


@pytest.mark.parametrize("setting", ["chunked", "preempted", "everything, ahead 1", "everything, ahead 2"])
@pytest.mark.parametrize(
    "sampling",
    [
        ResolvedSampling(1.0, 0, 1.0, 5),
        ResolvedSampling(0.8, 20, 0.9, 2**64 - 1),
        ResolvedSampling(1.5, 300, 0.95, 7, 3),
    ],
    ids=["temperature", "top-k and top-p", "large top-k"],
)
def test_seeded_tokens_do_not_depend_on_what_happens(
    sampling: ResolvedSampling, setting: str, bench: Callable[[str, str], Bench]
) -> None:
    llama = bench("llama", "auto")
    undisturbed, _ = llama.run(SETTINGS["plain"], sampling)
    outcome, _ = llama.run(SETTINGS[setting], sampling)
    assert outcome.tokens == undisturbed.tokens


def test_another_seed_or_choice_is_another_text(bench: Callable[[str, str], Bench]) -> None:
    llama = bench("llama", "auto")
    texts = [
        llama.run(SETTINGS["plain"], ResolvedSampling(1.0, 0, 1.0, seed, choice))[0].tokens
        for seed, choice in ((1, 0), (2, 0), (1, 1))
    ]
    assert texts[0] != texts[1]
    assert texts[0] != texts[2]
