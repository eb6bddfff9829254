"""Kernels that are launched while those before them end say what they say one after the other, to the bit: with the
shape of Llama-3.2-1B and random weights, in recorded steps and in launched ones."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from charonia.bench.gpu_engine import BLOCK, SMALL, RandomExecutor
from charonia.bench.inline_loop import run_to_end
from charonia.core.logprobs import Logprobs
from charonia.core.resolved_sampling import ResolvedSampling
from charonia.engine.gpu import runtime
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceSpec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
ROWS, LONGEST, NEW = 8, 1200, 48
BLOCKS = ROWS * -(-LONGEST // BLOCK)


@pytest.fixture(scope="module", params=[False, True], ids=["cuBLAS", "invariant"])
def executor(request: pytest.FixtureRequest) -> Iterator[RandomExecutor]:
    device = torch.device("cuda", 0)
    if runtime.capability(device) < runtime.DEPENDENT_CAPABILITY:
        pytest.skip("the device launches no kernel before the one before it is over")
    cuda = pytest.importorskip("triton.language.extra.cuda")
    if not hasattr(cuda, "gdc_wait"):
        pytest.skip("this Triton has no programmatic dependent launch")
    made = RandomExecutor(SMALL._replace(batch_invariance=request.param), "cuda", ROWS, LONGEST, BLOCKS)
    yield made
    made.close()
    runtime.use_dependent_launch(False)


def answers(executor: RandomExecutor) -> list[tuple[list[int], list[Logprobs]]]:
    cache = KVCacheManager(BLOCKS, BLOCK, prefix_caching=False)
    config = SchedulerConfig(max_num_seqs=ROWS, max_num_batched_tokens=512, max_model_len=LONGEST, ahead=1)
    requests = []
    for key in range(ROWS):
        tokens = np.random.default_rng(key).integers(1, 30_000, 1 + 150 * key).astype(np.int32)
        sampling = ResolvedSampling(key % 2 * 0.8, 0, 0.95, key, logprobs=2)
        hashes = cache.digest(tokens)
        requests.append(SequenceSpec(key=key, prompt=tokens, max_tokens=NEW, hashes=hashes, sampling=sampling))
    outcome = run_to_end(Scheduler(config, cache), executor, requests)
    return [(outcome.tokens[key], outcome.logprobs[key]) for key in range(ROWS)]


def test_dependent_launches_change_no_bit(executor: RandomExecutor) -> None:
    """Ten times over: what reads too early does so by chance."""
    graphs = executor.rank.runner.computer.graphs
    assert graphs is not None
    runtime.use_dependent_launch(False)
    apart = answers(executor)
    graphs.forget()
    runtime.use_dependent_launch(True)
    for _ in range(10):
        assert answers(executor) == apart
    executor.rank.runner.computer.graphs = None  # every step is launched
    assert answers(executor) == apart
