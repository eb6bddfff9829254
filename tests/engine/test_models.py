"""Logits against transformers, packed against alone, one rank against two."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from charonia.engine.attention.base import Batch, CacheSpec
from charonia.engine.attention.registry import attention_backend
from charonia.engine.checkpoint import open_checkpoint
from charonia.engine.kernels import library
from charonia.engine.layers.group import Alone, Group, kv_part, part
from charonia.engine.models.registry import recipe
from charonia.engine.place import Place, Seat

CPU = torch.device("cpu")
NAMES = ["llama", "llama-llama3-tied", "llama-linear-biased", "qwen2"]
KIN = [
    "qwen2-window",
    "mistral",
    "qwen3",
    "qwen3-moe",
    "mixtral",
    "phi3",
    "gemma2",
    "gemma3",
]
SPARSE = ("qwen3-moe", "mixtral")
LENGTHS = (40, 1, 23, 100)


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, 384, (length,), generator=generator) for length in lengths]


def batch(lengths: list[int], block_size: int) -> Batch:
    """Whole prompts, one after the other, in blocks one after the other."""
    counts = np.array(lengths)
    width = -(-max(lengths) // block_size)
    tables = torch.arange(len(lengths) * width).view(len(lengths), width)
    positions = torch.cat([torch.arange(length) for length in lengths])
    return Batch(
        np.zeros_like(counts), counts, tables, positions, torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
    )


@torch.inference_mode()
def logits(
    directory: Path,
    sequences: list[torch.Tensor],
    dtype: torch.dtype,
    backend: str = "auto",
    group: Group | None = None,
) -> torch.Tensor:
    """[all tokens, vocabulary] of the sequences in one packed step."""
    group, found = group or Alone(), recipe(open_checkpoint(directory))
    model, shape = found.build(Place(dtype, CPU, found.max_position, Seat(group)))
    heads, kv_heads = part(shape.heads, group), kv_part(shape.kv_heads, group)
    cache = CacheSpec(
        shape.views, heads.stop - heads.start, kv_heads.stop - kv_heads.start, shape.head_dim, 16, dtype, CPU
    )
    attention = attention_backend(backend, cache)
    attention.allocate(40)
    step = batch([len(tokens) for tokens in sequences], 16)
    tokens = torch.cat(sequences)
    return model.logits(tokens, step.positions, attention.begin(step), torch.arange(len(tokens))).float()


@cache
@torch.inference_mode()
def right_logits(directory: Path, dtype: torch.dtype) -> torch.Tensor:
    """What transformers says, prompt by prompt."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    return torch.cat([model(tokens[None]).logits[0] for tokens in prompts()]).float()


@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
@pytest.mark.parametrize("name", [*NAMES, *KIN])
def test_float32_logits_are_transformers(checkpoint: Callable[..., Path], name: str, backend: str) -> None:
    """With our kernels, without any, and with those of the layers alone."""
    right = right_logits(checkpoint(name), torch.float32)
    with library.absent() if backend == "torch" else nullcontext():
        found = logits(checkpoint(name), prompts(), torch.float32, "auto" if backend == "torch" else backend)
    assert (found - right).abs().max() < 1e-4 * right.abs().max()


@pytest.mark.parametrize(
    ("name", "dtype", "backend"),
    [
        *product(NAMES, [torch.bfloat16, torch.float16], ["auto", "cpu", "reference"]),
        *product(KIN, [torch.bfloat16], ["auto"]),
    ],
    ids=str,
)
def test_half_precision_is_as_near_as_transformers(
    checkpoint: Callable[..., Path], name: str, dtype: torch.dtype, backend: str
) -> None:
    """Both round; ours may be off by what theirs is, with a little room for luck."""
    right = right_logits(checkpoint(name), torch.float32)
    theirs = typical_error(right_logits(checkpoint(name), dtype), right, name)
    ours = typical_error(logits(checkpoint(name), prompts(), dtype, backend), right, name)
    assert ours < 1.25 * theirs


def typical_error(found: torch.Tensor, right: torch.Tensor, name: str) -> torch.Tensor:
    """Over tokens; with experts the middle one's, for a rounding may send a token to another expert."""
    squares = (found - right).pow(2).mean(-1)
    return (squares.median() if name in SPARSE else squares.mean()).sqrt()


@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
def test_packed_is_one_by_one(checkpoint: Callable[..., Path], backend: str) -> None:
    packed = logits(checkpoint("llama"), prompts(), torch.float32, backend)
    alone = torch.cat([logits(checkpoint("llama"), [tokens], torch.float32, backend) for tokens in prompts()])
    assert torch.allclose(packed, alone, atol=1e-4)


class Threads:
    """A group whose ranks are threads of this process."""

    def __init__(self, rank: int, parts: list[torch.Tensor], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(parts)
        self._parts, self._barrier = parts, barrier

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(partial)).sum(0)

    def gather(self, part: torch.Tensor, total: int) -> torch.Tensor:
        whole = torch.cat(self._exchange(part), -1)
        assert whole.shape[-1] == total
        return whole

    def _exchange(self, mine: torch.Tensor) -> list[torch.Tensor]:
        self._parts[self.rank] = mine
        self._barrier.wait(timeout=30)
        everyone = list(self._parts)
        self._barrier.wait(timeout=30)
        return everyone


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", [*NAMES, "qwen3", "qwen3-moe", "mixtral", "phi3", "gemma3"])
def test_ranks_that_share_the_weights_agree_with_one(checkpoint: Callable[..., Path], name: str, ranks: int) -> None:
    """Four ranks are more than some of these have key/value heads: those are held twice."""
    directory = checkpoint(name)
    parts, barrier = [torch.empty(0)] * ranks, threading.Barrier(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        groups = [Threads(rank, parts, barrier) for rank in range(ranks)]
        shared = list(pool.map(lambda group: logits(directory, prompts(), torch.float32, "auto", group), groups))
    whole = logits(directory, prompts(), torch.float32)
    for found in shared:
        assert torch.allclose(found, whole, atol=2e-4)
