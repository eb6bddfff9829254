"""Layers with a window in groups of their own: the same bits as with one group, whatever a cache goes through."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from charonia.bench.inline_loop import run_to_end
from charonia.core.resolved_sampling import ResolvedSampling
from charonia.engine.config import CacheConfig, EngineConfig
from charonia.engine.worker.inline_executor import InlineExecutor
from charonia.kvcache.layer_groups import LayerGroups
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.plan import IntArray
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceSpec

BLOCK, ROWS = 16, 3
LAYERS = ["full_attention", *["sliding_attention"] * 3] * 2
"""Two that see all, and six that see nineteen tokens: a block has room for two."""
GEMMA = {"num_hidden_layers": len(LAYERS), "layer_types": LAYERS}
ENDING = GEMMA | {"layer_types": LAYERS[::-1]}
UNLIKE = {
    "gemma4": (ENDING, LayerGroups(1, 3, 19)),
    "gemma4-small": (ENDING | {"num_kv_shared_layers": 1, "global_head_dim": 48}, LayerGroups(1, 2, 19)),
}
"""Gemma 4's layers that see all keep other heads than those that slide: as many numbers, or three times as many; then a
block has one of them, or three of the others."""

Answers = dict[int, tuple[list[int], list[float]]]
"""Tokens and their log-probabilities by key."""


def prompts() -> list[IntArray]:
    """Two beginnings of 90 tokens, three ends of each, and the first of them all again."""
    random = np.random.default_rng(1)
    beginnings = random.integers(1, 384, (2, 90), dtype=np.int32)
    ends = random.integers(1, 384, (3, 21), dtype=np.int32)
    every = [np.concatenate([beginning, end]) for end in ends for beginning in beginnings]
    return [*every, every[0]]


def short_prompts() -> list[IntArray]:
    return [prompt[:length] for prompt in prompts()[:2] for length in (20, 33, 47)]


class Engine:
    def __init__(self, checkpoint: Path, attention: str, groups: bool, kept: str = "auto") -> None:
        config = EngineConfig(
            model=str(checkpoint),
            device="cpu",
            attention=attention,
            cache=CacheConfig(block_size=BLOCK, layer_groups=groups, dtype=kept),
            scheduler=SchedulerConfig(max_num_seqs=ROWS),
            max_model_len=256,
        )
        self.executor = InlineExecutor(config)
        self.groups = self.executor.load(lambda phase, fraction: None).groups

    def answers(
        self, prompts: list[IntArray], new: int, blocks: int, *, chunk: int, ahead: int = 0, host_blocks: int = 0
    ) -> tuple[Answers, Scheduler]:
        """`new` tokens after each prompt; one after the other, or all at once where steps are made `ahead`."""
        groups = self.groups._replace(in_flight=(ahead + 1) * chunk)
        self.executor.allocate(blocks, host_blocks)
        cache = KVCacheManager(blocks, BLOCK, host_blocks=host_blocks, groups=groups)
        rule = SchedulerConfig(max_num_seqs=ROWS, max_num_batched_tokens=chunk, max_model_len=256, ahead=ahead)
        scheduler = Scheduler(rule, cache)
        sampling = ResolvedSampling(logprobs=1)
        requests = [
            SequenceSpec(key=key, prompt=prompt, max_tokens=new, hashes=cache.digest(prompt), sampling=sampling)
            for key, prompt in enumerate(prompts)
        ]
        answers: Answers = {}
        for some in [requests] if ahead else [[request] for request in requests]:
            result = run_to_end(scheduler, self.executor, some)
            answers |= {
                key: (tokens, [scores.chosen for scores in result.logprobs[key]])
                for key, tokens in result.tokens.items()
            }
            scheduler.check_integrity()
        return answers, scheduler


@pytest.mark.parametrize("attention", ["native", "cpu"])
def test_answers_are_those_with_one_group(checkpoint: Callable[..., Path], attention: str) -> None:
    directory = checkpoint("gemma3", **GEMMA)
    engine = Engine(directory, attention, groups=True)
    assert engine.groups == LayerGroups(1, 3, 19)
    alike = Engine(directory, attention, groups=False)
    assert engine.executor.rank.capacity().block_bytes * 4 == alike.executor.rank.capacity().block_bytes
    chunk = 50 if attention == "native" else 200  # torch's sums depend on how a prompt was cut
    plain, _ = alike.answers(prompts(), 20, 60, chunk=chunk)
    hits, scheduler = engine.answers(prompts(), 20, 200, chunk=chunk)
    assert hits == plain
    assert scheduler.totals.prefix_hits >= 4 * 80 + 96
    if attention == "native":
        host, scheduler = engine.answers(prompts(), 20, 60, chunk=17, host_blocks=200)
        assert host == plain
        assert scheduler.totals.restored
        short, _ = alike.answers(short_prompts(), 60, 60, chunk=17, ahead=1)
        scarce, scheduler = engine.answers(short_prompts(), 60, 39, chunk=17, ahead=1)
        assert scarce == short
        assert scheduler.totals.preemptions
    engine.executor.close()
    alike.executor.close()


@pytest.mark.parametrize(
    ("name", "attention", "kept"),
    [
        ("gemma4", "native", "auto"),
        ("gemma4-small", "native", "auto"),
        ("gemma4-small", "native", "int8"),
        ("gemma4-small", "cpu", "auto"),
        ("gemma4-small", "reference", "auto"),
    ],
)
def test_answers_of_unlike_layers_are_those_with_one_group(
    checkpoint: Callable[..., Path], name: str, attention: str, kept: str
) -> None:
    changes, groups = UNLIKE[name]
    directory = checkpoint(name, **changes)
    alike, engine = (Engine(directory, attention, groups=grouped, kept=kept) for grouped in (False, True))
    assert engine.groups == groups
    chunk = 50 if attention == "native" else 200  # torch's sums depend on how a prompt was cut
    asked = prompts()[:3]
    plain, _ = alike.answers(asked, 12, 60, chunk=chunk)
    hits, scheduler = engine.answers(asked, 12, 200, chunk=chunk)
    assert hits == plain
    assert scheduler.totals.prefix_hits >= 80
    host, scheduler = engine.answers([*asked, *asked[:1]], 12, 40, chunk=chunk, host_blocks=200)
    assert {key: host[key] for key in plain} == plain
    assert host[3] == plain[0]
    assert scheduler.totals.restored
    if attention == "native":
        short, _ = alike.answers(short_prompts(), 60, 60, chunk=17, ahead=1)
        scarce, scheduler = engine.answers(short_prompts(), 60, 10 * groups.total - 1, chunk=17, ahead=1)
        assert scarce == short
        assert scheduler.totals.preemptions
    engine.executor.close()
    alike.executor.close()
