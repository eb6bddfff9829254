"""Logits against transformers, packed against alone."""

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from itertools import product
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from charonia.engine.attention.backend import CacheSpec
from charonia.engine.attention.selector import create_backend
from charonia.engine.checkpoint.build_context import BuildContext
from charonia.engine.checkpoint.hf_checkpoint import open_checkpoint
from charonia.engine.cpu import library
from charonia.engine.layers.step_context import StepContext
from charonia.engine.models.registry import checkpoint_builder
from charonia.engine.step_batch import StepBatch
from tests.checkpoints import LLAMA_KIN

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
    "gemma3n",
    "gemma4",
    "gemma4-small",
    "gemma4-moe",
    "qwen2-yarn",
    "llama-gelu",
    "llama-quick-gelu",
    "gpt-oss",
    "smollm3",
    *LLAMA_KIN,
]
PARTS = ["gemma3-image", "gemma4-image", "mistral3", "ministral3-image", "llava", "qwen2.5-vl", "qwen3-vl"]
"""The language part of what takes images too."""
LATENTS = ["deepseek-v3", "deepseek-v2", "glm4-lite", "deepseek-v3.2", "glm5"]
MORE_LATENTS = ["deepseek-v2-lite", "deepseek-v3-halves"]
"""Without a latent for queries, or with halves that are rotated against each other."""
SPARSE = (
    "qwen3-moe",
    "mixtral",
    "gemma4-moe",
    "gpt-oss",
    "glm4-moe",
    "dots1",
    "solar-open",
    "minimax-m2",
    "ernie-moe",
    *LATENTS,
)
LENGTHS = (40, 1, 23, 100)


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, 384, (length,), generator=generator) for length in lengths]


def batch(sequences: list[torch.Tensor], block_size: int) -> StepBatch:
    """Whole prompts, one after the other, in blocks one after the other."""
    lengths = [len(tokens) for tokens in sequences]
    width = -(-max(lengths) // block_size)
    blocks = torch.arange(len(lengths) * width).view(len(lengths), width)
    return StepBatch.from_tokens(torch.cat(sequences), [0] * len(lengths), lengths, blocks, block_size)


@torch.inference_mode()
def logits(directory: Path, sequences: list[torch.Tensor], dtype: torch.dtype, backend: str = "auto") -> torch.Tensor:
    """[all tokens, vocabulary] of the sequences in one packed step."""
    found = checkpoint_builder(open_checkpoint(directory))
    model, shape, *_ = found.build(BuildContext(dtype, CPU, found.max_position))
    cache = CacheSpec(shape.cached_attention, shape.heads, shape.kv_heads, shape.head_dim, 16, dtype, CPU)
    attention = create_backend(backend, cache)
    attention.allocate(40)
    step = batch(sequences, 16)
    return next(model.compute_logits(StepContext(step, attention.begin_step(step)), [torch.arange(step.size)])).float()


@cache
@torch.inference_mode()
def right_logits(directory: Path, dtype: torch.dtype) -> torch.Tensor:
    """What transformers says, prompt by prompt."""
    name = json.loads((directory / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, name).from_pretrained(directory, dtype=dtype)
    return torch.cat([model(tokens[None]).logits[0] for tokens in prompts()]).float()


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *product([*NAMES, *KIN, *PARTS, *LATENTS, *MORE_LATENTS], ["auto", "torch"]),
        *product([*NAMES, *LATENTS, *MORE_LATENTS], ["reference"]),
        *(pytest.param(name, "reference", marks=pytest.mark.proof) for name in (*KIN, *PARTS)),  # NAMES' layers
    ],
)
def test_float32_logits_are_transformers(checkpoint: Callable[..., Path], name: str, backend: str) -> None:
    """With our kernels, without any, and with those of the layers alone."""
    right = right_logits(checkpoint(name), torch.float32)
    with patch.object(library, "level", lambda: None) if backend == "torch" else nullcontext():
        found = logits(checkpoint(name), prompts(), torch.float32, "auto" if backend == "torch" else backend)
    assert (found - right).abs().max() < 1e-4 * right.abs().max()


@pytest.mark.parametrize(
    ("name", "dtype", "backend"),
    [
        *product(NAMES, [torch.bfloat16, torch.float16], ["auto", "cpu", "reference"]),
        *product([*KIN, *LATENTS], [torch.bfloat16], ["auto"]),
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


def test_a_language_part_by_its_newer_names(
    checkpoint: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its head is used if it has one, whatever the default for the whole would be."""
    copy = Path(shutil.copytree(checkpoint("mistral3"), tmp_path / "newer"))
    tensors, file = load_file(copy / "model.safetensors"), copy / "config.json"
    newer = (
        ("language_model.model.", "model.language_model."),
        ("language_model.lm_head.", "lm_head."),
        ("", "model."),
    )
    renamed = {}
    for tensor, value in tensors.items():
        old, new = next(pair for pair in newer if tensor.startswith(pair[0]))
        renamed[new + tensor.removeprefix(old)] = value
    save_file(renamed, copy / "model.safetensors")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    found = logits(copy, prompts(), torch.float32)
    assert torch.equal(found, logits(checkpoint("mistral3"), prompts(), torch.float32))
    assert "its language part is served; " in caplog.text
    assert "such as model.multi_modal_projector." in caplog.text


@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
def test_packed_is_one_by_one(checkpoint: Callable[..., Path], backend: str) -> None:
    packed = logits(checkpoint("llama"), prompts(), torch.float32, backend)
    alone = torch.cat([logits(checkpoint("llama"), [tokens], torch.float32, backend) for tokens in prompts()])
    assert torch.allclose(packed, alone, atol=1e-4)
