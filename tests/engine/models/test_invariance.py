"""Batch invariance: a request gets the same whatever shares its steps, however its prompt is cut, whatever is cached.

Bit for bit: tokens, and the logprobs of tokens and their likeliest neighbours.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from charonia.bench.inline_loop import LoopResult, run_to_end
from charonia.core.logprobs import Logprobs
from charonia.core.resolved_sampling import ResolvedSampling
from charonia.engine.config import CacheConfig, EngineConfig
from charonia.engine.cpu import library
from charonia.engine.worker.inline_executor import InlineExecutor
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceSpec

pytestmark = pytest.mark.skipif(library.level() is None, reason="torch's own products promise no such thing")

BLOCK, BLOCKS, NEW = 16, 256, 12
LENGTHS = (3, 40, 130)
"""Prompt tokens of the requests that are watched: less than a block, a few, and more than a chunk of the longest."""

WATCHED = [
    ResolvedSampling(logprobs=3),
    ResolvedSampling(0.9, 0, 1.0, 17, logprobs=3),
    ResolvedSampling(1.2, 40, 0.9, 5, logprobs=3),
]
OTHERS = 9
MODELS = [
    ("qwen2", "float32", "none"),
    ("qwen2", "bfloat16", "none"),
    ("qwen2", "bfloat16", "int8"),
    ("qwen3-moe", "bfloat16", "int8"),
    ("gemma2", "bfloat16", "none"),
    ("gemma4-small", "bfloat16", "int8"),
    pytest.param(("gemma3n", "bfloat16", "none"), marks=pytest.mark.proof),
    pytest.param(("deepseek-v3", "bfloat16", "int8"), marks=pytest.mark.proof),
    ("deepseek-v3", "float32", "none"),
]


@dataclass(frozen=True)
class Answer:
    """What one request got."""

    tokens: list[int]
    logprobs: list[Logprobs]


class Engine:
    """An executor, and schedulers over one cache of it after another."""

    def __init__(self, checkpoint: Path, dtype: str, quantization: str) -> None:
        cache = CacheConfig(block_size=BLOCK)
        self.executor = InlineExecutor(
            EngineConfig(model=str(checkpoint), device="cpu", dtype=dtype, quantization=quantization, cache=cache)
        )
        self.executor.load(lambda phase, fraction: None)
        self.empty()

    def empty(self) -> None:
        self.executor.allocate(BLOCKS)
        self.cache = KVCacheManager(BLOCKS, BLOCK, True)

    def run(self, requests: list[SequenceSpec], chunk: int = 4096) -> LoopResult:
        config = SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=chunk, max_model_len=256)
        return run_to_end(Scheduler(config, self.cache), self.executor, requests)

    def request(self, key: int, prompt: list[int], sampling: ResolvedSampling) -> SequenceSpec:
        tokens = np.array(prompt, np.int32)
        hashes = self.cache.digest(tokens)
        return SequenceSpec(key=key, prompt=tokens, max_tokens=NEW, hashes=hashes, sampling=sampling)

    def watched(self) -> list[SequenceSpec]:
        prompts = [drawn(length, seed=length) for length in LENGTHS]
        return [self.request(key, *each) for key, each in enumerate(zip(prompts, WATCHED, strict=True))]

    def others(self, seed: int) -> list[SequenceSpec]:
        lengths = np.random.default_rng(seed).integers(1, 120, OTHERS)
        return [
            self.request(
                100 + number, drawn(int(length), seed=1000 * seed + number), ResolvedSampling(1.0, 0, 1.0, number)
            )
            for number, length in enumerate(lengths)
        ]


def drawn(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, 384, length).tolist()


def answers(outcome: LoopResult) -> list[Answer]:
    return [Answer(outcome.tokens[key], outcome.logprobs[key]) for key in range(len(LENGTHS))]


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: "-".join(model))
def engine(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Iterator[Engine]:
    name, dtype, quantization = request.param
    made = Engine(checkpoint(name), dtype, quantization)
    yield made
    made.executor.close()


@pytest.fixture(scope="module")
def alone(engine: Engine) -> list[Answer]:
    """Each request with the engine to itself."""
    found = []
    for key, request in enumerate(engine.watched()):
        engine.empty()
        outcome = engine.run([request])
        found.append(Answer(outcome.tokens[key], outcome.logprobs[key]))
    return found


def test_companions_change_nothing(engine: Engine, alone: list[Answer]) -> None:
    engine.empty()
    others = engine.others(1)
    outcome = engine.run([*others[:4], *engine.watched(), *others[4:]])
    assert answers(outcome) == alone
    assert outcome.steps < 2 * NEW, "they did not share steps"


@pytest.mark.parametrize("chunk", [33, 64])
def test_chunks_change_nothing(engine: Engine, alone: list[Answer], chunk: int) -> None:
    engine.empty()
    others = engine.others(3)
    assert answers(engine.run([*others, *engine.watched()], chunk)) == alone


def test_a_cached_prefix_changes_nothing(engine: Engine, alone: list[Answer]) -> None:
    engine.empty()
    engine.run([*engine.watched(), *engine.others(4)])
    outcome = engine.run([*engine.others(5), *engine.watched()])
    assert [outcome.cached[key] for key in range(len(LENGTHS))] == [0, 32, 128]
    assert answers(outcome) == alone


def test_the_requests_say_something_of_their_own(alone: list[Answer]) -> None:
    """A model that always said the same would be invariant too."""
    assert len({tuple(answer.tokens) for answer in alone}) == len(LENGTHS)
    assert all(len(answer.logprobs) == NEW for answer in alone)
    assert len({logprobs.chosen for answer in alone for logprobs in answer.logprobs}) > NEW
