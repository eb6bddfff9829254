"""A request has the same bits whatever shares its steps, with the shape of Llama-3.2-1B and random weights: alone,
among 63 and 255 others, with its prompt cut elsewhere, in recorded steps and in launched ones.

CHARONIA_KERNELS=triton runs a tiny shape on the interpreter.
"""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from charonia.bench.gpu_engine import BLOCK, SMALL, RandomExecutor
from charonia.bench.inline_loop import run_to_end
from charonia.core.logprobs import Logprobs
from charonia.core.resolved_sampling import ResolvedSampling
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceSpec

INTERPRETED = os.environ.get("CHARONIA_KERNELS") == "triton"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="no CUDA device"),
]
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
}
LENGTHS, COMPANIES, LONGEST, NEW, CUT = (1000, 257, 20), (63, 255), 1200, 24, 700
if INTERPRETED:
    LENGTHS, COMPANIES, LONGEST, NEW, CUT = (40, 17, 3), (5,), 48, 3, 19
ROWS = max(COMPANIES) + len(LENGTHS)
BLOCKS = ROWS * -(-LONGEST // BLOCK)


@pytest.fixture(scope="module")
def executor() -> Iterator[RandomExecutor]:
    work = SMALL._replace(batch_invariance=True)
    if INTERPRETED:
        work = work._replace(config=work.config | TINY, dtype="float16")
    made = RandomExecutor(work, "cpu" if INTERPRETED else "cuda", ROWS, LONGEST, BLOCKS)
    yield made
    made.close()


Answer = tuple[list[int], list[Logprobs]]


def answers(executor: RandomExecutor, company: int, chunk: int = 8192, cached: bool = False) -> list[Answer]:
    """What the watched requests get among so many others; `cached`: after they were answered once before."""
    cache = KVCacheManager(BLOCKS, BLOCK, prefix_caching=True)
    config = SchedulerConfig(max_num_seqs=ROWS, max_num_batched_tokens=chunk, max_model_len=LONGEST, ahead=1)
    lengths = np.random.default_rng(company).integers(1, LONGEST // 2, company)
    for _ in range(1 + cached):
        others = [request(cache, 1000 + number, int(length)) for number, length in enumerate(lengths)]
        watched = [request(cache, number, length) for number, length in enumerate(LENGTHS)]
        outcome = run_to_end(Scheduler(config, cache), executor, [*others[::2], *watched, *others[1::2]])
    return [(outcome.tokens[key], outcome.logprobs[key]) for key in range(len(LENGTHS))]


def request(cache: KVCacheManager, key: int, length: int) -> SequenceSpec:
    tokens = np.random.default_rng(key).integers(1, TINY["vocab_size"], length).astype(np.int32)
    sampling = ResolvedSampling(key % 3 * 0.4, 0, 0.95, key, logprobs=2 if key < len(LENGTHS) else None)
    return SequenceSpec(key=key, prompt=tokens, max_tokens=NEW, hashes=cache.digest(tokens), sampling=sampling)


def test_a_request_has_the_same_bits_whatever_shares_its_steps(executor: RandomExecutor) -> None:
    alone = answers(executor, 0)
    assert len({tuple(tokens) for tokens, _ in alone}) == len(LENGTHS)
    for company in COMPANIES:
        assert answers(executor, company) == alone
    assert answers(executor, COMPANIES[0], CUT) == alone
    assert answers(executor, 0, CUT, cached=True) == alone
    executor.rank.runner.computer.graphs = None  # every step is launched
    assert answers(executor, COMPANIES[0]) == alone
