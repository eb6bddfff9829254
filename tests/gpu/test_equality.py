"""The engine with the reference attention against transformers, both on the same device.

Also run on the CPU, so that the machines that have no GPU keep this file honest.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from charonia.bench.inline_loop import run_to_end
from charonia.core.resolved_sampling import ResolvedSampling
from charonia.engine.config import CacheConfig, EngineConfig
from charonia.engine.step_batch import SAMPLING_DTYPE
from charonia.engine.worker.inline_executor import InlineExecutor
from charonia.engine.worker.sampler import choose_sampler, counter_uniform, sample
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceSpec

from ..proofs import families

NEW = 16
BLOCKS, BLOCK = 48, 8
LENGTHS = (1, 7, 16, 33, 60, 90)
GREEDY = ResolvedSampling()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return str(request.param)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(1, 384, (length,), generator=generator).tolist() for length in LENGTHS]


def engine_tokens(
    checkpoint: Path, device: str, sampling: ResolvedSampling = GREEDY, chunk: int = 40
) -> list[list[int]]:
    """Chunked prefill, prefix cache, preemption and `ahead` 1 in one run."""
    cache = KVCacheManager(BLOCKS, BLOCK)
    executor = InlineExecutor(
        EngineConfig(model=str(checkpoint), device=device, attention="reference", cache=CacheConfig(block_size=BLOCK))
    )
    try:
        executor.load(lambda phase, fraction: None)
        executor.allocate(BLOCKS)
        requests = []
        for key, prompt in enumerate(prompts()):
            tokens = np.array(prompt, np.int32)
            requests.append(
                SequenceSpec(key=key, prompt=tokens, max_tokens=NEW, hashes=cache.digest(tokens), sampling=sampling)
            )
        config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=chunk, max_model_len=256, ahead=1)
        outcome = run_to_end(Scheduler(config, cache), executor, requests)
    finally:
        executor.close()
    return [outcome.tokens[key] for key in range(len(LENGTHS))]


@torch.inference_mode()
def right_tokens(checkpoint: Path, device: str) -> list[list[int]]:
    """By the attention that is written out: in that of torch some versions leave Gemma 2's soft cap out, unsaid."""
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").to(device)
    model.generation_config.eos_token_id = None
    found = []
    for prompt in prompts():
        ids = torch.tensor([prompt], device=device)
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        found.append(out[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "gemma2", "granite"])
def test_greedy_tokens_are_transformers(checkpoint: Callable[..., Path], name: str, device: str) -> None:
    assert engine_tokens(checkpoint(name), device) == right_tokens(checkpoint(name), device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["llama-llama3-tied", "llama-linear-biased", "qwen2"])
def test_more_greedy_tokens_are_transformers(checkpoint: Callable[..., Path], name: str) -> None:
    """Whose layers tests/engine/ proves on the CPU."""
    test_greedy_tokens_are_transformers(checkpoint, name, "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("family", families.FAMILIES)
def test_sinks_and_unequal_heads_are_transformers(family: str, tmp_path: Path) -> None:
    """As tests/e2e/test_proofs.py and `make proof` on the CPU."""
    if not families.is_known(family):
        pytest.skip(f"transformers {transformers.__version__} has no model type {family}")
    assert list(families.faults(family, tmp_path, "cuda")) == []


def test_seeded_tokens_do_not_depend_on_chunks(checkpoint: Callable[..., Path], device: str) -> None:
    sampling = ResolvedSampling(1.0, 50, 0.9, 3)
    whole = engine_tokens(checkpoint("llama"), device, sampling, chunk=512)
    assert engine_tokens(checkpoint("llama"), device, sampling, chunk=24) == whole


def test_devices_draw_the_same_numbers(device: str) -> None:
    counters = [torch.arange(10_000) * step for step in (2**40 + 1, 3, 1)]
    here = counter_uniform(*(counter.to(device) for counter in counters))
    assert torch.equal(here.cpu(), counter_uniform(*counters))


def test_devices_sample_the_same_tokens(device: str) -> None:
    """Up to sums that round differently: a number that falls between two tokens may fall either way."""
    logits = torch.randn(400, 1000, generator=torch.Generator().manual_seed(1)) * 3
    choices = np.zeros(400, dtype=SAMPLING_DTYPE)
    choices["temperature"], choices["position"] = 1, np.arange(400)
    choices["top_p"] = np.where(np.arange(400) % 2, 1.0, 0.9)
    choices["top_k"] = np.where(np.arange(400) % 3, 0, 40)
    there = choose_sampler(torch.device(device))(logits.to(device), choices).cpu()
    assert (there == sample(logits, choices)).float().mean() > 0.99
