"""Whole models on the path of a GPU, interpreted: what they say is what transformers generates, through real steps."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from charonia.bench.inline_loop import run_to_end
from charonia.engine.attention.triton_attention import TritonAttention
from charonia.engine.config import CacheConfig, EngineConfig
from charonia.engine.gpu.norm import TritonNorm
from charonia.engine.worker.inline_executor import InlineExecutor
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.plan import SamplerParams
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceRequest

BLOCK, NEW = 16, 6
OTHERS = (
    "llama-llama3-tied",
    "phi4-mini",
    "qwen2",
    "qwen2-window",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    "mixtral",
    "mistral",
)


@pytest.mark.parametrize("name", ["llama", *(pytest.param(each, marks=pytest.mark.proof) for each in OTHERS)])
def test_greedy_text_is_that_of_transformers(
    interpreted: None, checkpoint: Callable[[str], Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, prefix hits and preemption included: the cache has room for two of three."""
    directory, normed = checkpoint(name), list[int]()
    norm = TritonNorm.add_and_norm
    monkeypatch.setattr(TritonNorm, "add_and_norm", lambda *own: normed.append(1) or norm(*own))
    shared = [7, 8, 9, 10] * 5
    prompts = [shared, [*shared, 3, 4, 5], [*shared, 11]]
    executor = InlineExecutor(EngineConfig(model=str(directory), device="cpu", cache=CacheConfig(block_size=BLOCK)))
    executor.load(lambda phase, fraction: None)
    assert isinstance(executor.rank.runner.attention, TritonAttention)
    cache = KVCacheManager(5, BLOCK, prefix_caching=True)
    executor.allocate(5)
    config = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=13, max_model_len=64)
    requests = [_request(cache, key, prompt) for key, prompt in enumerate(prompts)]
    found = run_to_end(Scheduler(config, cache), executor, requests)
    executor.close()
    assert normed
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for key, prompt in enumerate(prompts):
        right = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
        assert found.tokens[key] == right[0, len(prompt) :].tolist()


def _request(cache: KVCacheManager, key: int, prompt: list[int]) -> SequenceRequest:
    tokens = np.array(prompt, np.int32)
    return SequenceRequest(
        key=key, prompt=tokens, max_tokens=NEW, hashes=cache.digest(tokens), sampling=SamplerParams()
    )
