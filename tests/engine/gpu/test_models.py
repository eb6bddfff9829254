"""Whole models on the path of a GPU, interpreted: what they say is what transformers generates, through real steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from transformers import AutoModelForCausalLM

from charonia.bench.inline_loop import run_to_end
from charonia.core.logprobs import Logprobs
from charonia.core.resolved_sampling import ResolvedSampling
from charonia.engine.attention import selector
from charonia.engine.attention.backend import AttentionBackend
from charonia.engine.attention.triton_attention import TritonAttention
from charonia.engine.attention.triton_latents import TritonLatents
from charonia.engine.config import CacheConfig, EngineConfig
from charonia.engine.gpu.norm import TritonNorm
from charonia.engine.worker.inline_executor import InlineExecutor
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig, SnapshotRule
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceSpec
from tests.engine.kept_attention import KeptReference

BLOCK, NEW = 16, 4
SHARED = [7, 8, 9, 10] * 5
PROMPTS = [SHARED, [*SHARED, 3, 4, 5], [*SHARED, 11]]
LATENTS = ("deepseek-v2", "deepseek-v3", "glm4-lite")
OTHERS = (
    "llama-llama3-tied",
    "phi4-mini",
    "qwen2",
    "qwen2-window",
    "qwen3",
    "gemma2",
    "gemma3",
    "gemma3n",
    "gemma4",
    "gemma4-small",
    "phi3",
    "mixtral",
    "gpt-oss",
    "smollm3",
    "ministral3",
    "glm4-moe",
    "minimax-m2",
    "olmo3",
    "exaone4",
    "glm4",
    "mistral",
    "qwen3.5",
    "lfm2",
    "granite-hybrid",
    "nemotron-3",
    "falcon-h1",
    "mamba",
    "mamba2",
    *LATENTS,
)


@pytest.mark.parametrize("name", ["llama", *(pytest.param(each, marks=pytest.mark.proof) for each in OTHERS)])
def test_greedy_text_is_that_of_transformers(
    interpreted: None, checkpoint: Callable[[str], Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, normed = checkpoint(name), list[int]()
    norm = TritonNorm.add_and_norm
    monkeypatch.setattr(TritonNorm, "add_and_norm", lambda *own: normed.append(1) or norm(*own))
    found = generate(directory, PROMPTS, TritonLatents if name in LATENTS else TritonAttention)
    assert normed
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        right = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
        assert tokens == right[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kept", [pytest.param("int8", marks=pytest.mark.proof), "fp8"])
def test_greedy_text_over_codes_is_that_of_torch_over_the_same(
    interpreted: None, checkpoint: Callable[[str], Path], kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the layers are the same, and attention alone is by torch, over what the codes stand for."""
    monkeypatch.setitem(selector.BACKENDS, "kept", KeptReference)
    directory, prompts = checkpoint("llama"), PROMPTS[:2]
    found = generate(directory, prompts, TritonAttention, kept)
    assert found == generate(directory, prompts, KeptReference, kept, "kept")


@pytest.mark.proof
@pytest.mark.usefixtures("sums_of_a_gpu")
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_request_has_the_same_bits_in_company_and_in_pieces(
    interpreted: None, checkpoint: Callable[[str], Path], quantization: str
) -> None:
    """Tokens and log-probabilities, in half precision: alone, among others, with its prompt cut elsewhere and after a
    prefix that is cached."""
    config = EngineConfig(
        model=str(checkpoint("llama")),
        device="cpu",
        dtype="float16",
        quantization=quantization,
        batch_invariance=True,
        cache=CacheConfig(block_size=BLOCK),
    )
    executor = InlineExecutor(config)
    executor.load(lambda phase, fraction: None)
    prompt, others = [*SHARED, 3, 4, 5] * 2, [[9, 8] * 11, [5], [17, 3, 2] * 5]

    def answer(cache: KVCacheManager, company: list[list[int]], chunk: int) -> tuple[list[int], list[Logprobs]]:
        requests = [_request(cache, key, tokens) for key, tokens in enumerate([*company, prompt])]
        requests[-1] = structs.replace(requests[-1], sampling=ResolvedSampling(0.8, 0, 0.9, 11, logprobs=2))
        scheduling = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=chunk, max_model_len=64)
        outcome = run_to_end(Scheduler(scheduling, cache), executor, requests)
        return outcome.tokens[len(company)], outcome.logprobs[len(company)]

    said = []
    for company, chunk in (([], 64), (others, 64), ([], 13), (others, 17)):
        executor.allocate(40)
        cache = KVCacheManager(40, BLOCK, prefix_caching=True)
        said.append(answer(cache, company, chunk))
    said.append(answer(cache, others[:1], 64))
    executor.close()
    assert said == said[:1] * 5
    assert len({logprob.chosen for logprob in said[0][1]}) == NEW


def generate(
    directory: Path,
    prompts: list[list[int]],
    backend: type[AttentionBackend],
    kept: str = "auto",
    attention: str = "auto",
    **changes: Any,
) -> list[list[int]]:
    """What the engine says. Chunks, prefix hits and preemption included: the cache has room for two of PROMPTS."""
    sizes = CacheConfig(block_size=BLOCK, dtype=kept, layer_groups=True)
    config = EngineConfig(model=str(directory), device="cpu", attention=attention, cache=sizes, **changes)
    executor = InlineExecutor(config)
    executor.load(lambda phase, fraction: None)
    assert isinstance(executor.rank.runner.computer.attention, backend)
    snapshots = 4 if executor.rank.runner.computer.stores.states is not None else 0
    groups = executor.rank.groups._replace(in_flight=13)
    cache = KVCacheManager(5 * groups.total, BLOCK, prefix_caching=True, snapshots=snapshots, groups=groups)
    executor.allocate(5 * groups.total, 0, snapshots)
    rule = SnapshotRule(least_gain=BLOCK)
    scheduling = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=13, max_model_len=64, snapshots=rule)
    requests = [_request(cache, key, prompt) for key, prompt in enumerate(prompts)]
    found = run_to_end(Scheduler(scheduling, cache), executor, requests)
    executor.close()
    return [found.tokens[key] for key in range(len(prompts))]


def _request(cache: KVCacheManager, key: int, prompt: list[int]) -> SequenceSpec:
    tokens = np.array(prompt, np.int32)
    return SequenceSpec(
        key=key, prompt=tokens, max_tokens=NEW, hashes=cache.digest(tokens), sampling=ResolvedSampling()
    )
