"""Quantising while loading: what it takes, what it says, whom it refuses."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from charonia.core.errors import InvalidArgument
from charonia.engine.checkpoint.model_spec import CheckpointError
from charonia.engine.config import EngineConfig
from charonia.engine.cpu import library
from charonia.engine.worker.inline_executor import InlineExecutor

HIDDEN, INNER, VOCAB, LAYERS = 1024, 4096, 16384, 2

MEASURE = """
import sys, torch
from pathlib import Path
from charonia.engine.checkpoint.hf_checkpoint import open_checkpoint
from charonia.engine.models.registry import checkpoint_builder
from charonia.engine.checkpoint.build_context import BuildContext, Shard
from charonia.engine.checkpoint.build_context import SingleRank

class Half(SingleRank):
    size = 2

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

torch.set_num_threads(2)
found, seen = checkpoint_builder(open_checkpoint(sys.argv[1])), []
# What the first product of a process takes once is no part of it.
torch.zeros(4, 4).bfloat16().float()
before = anonymous()
cpu, quantization = torch.device("cpu"), sys.argv[2]
group = Half() if sys.argv[3] == "2" else SingleRank()
shard, look = Shard(group), lambda _: seen.append(anonymous())
built = found.build(BuildContext(torch.bfloat16, cpu, 64, shard, look, quantization))
print(before, max(seen), anonymous())
"""


def write_middling(directory: Path) -> int:
    """A Llama of random bf16 weights, quickly; returns how many numbers its packed matrices have."""
    shapes = {"model.embed_tokens": (VOCAB, HIDDEN), "lm_head": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.self_attn.{one}_proj": (HIDDEN, HIDDEN) for one in "qkvo"}
        shapes |= {f"{name}.mlp.{one}_proj": (INNER, HIDDEN) for one in ("gate", "up")}
        shapes[f"{name}.mlp.down_proj"] = (HIDDEN, INNER)
    norms = ["model.norm"] + [
        f"model.layers.{layer}.{one}_layernorm" for layer in range(LAYERS) for one in ("input", "post_attention")
    ]
    block = torch.randn(1 << 20).bfloat16()
    tensors = {
        f"{name}.weight": block.repeat(rows * columns >> 20).view(rows, columns)
        for name, (rows, columns) in shapes.items()
    }
    tensors |= {f"{name}.weight": torch.ones(HIDDEN).bfloat16() for name in norms}
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "vocab_size": VOCAB}
    config |= {"intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": 16, "dtype": "bfloat16"}
    config |= {"max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
    (directory / "config.json").write_text(json.dumps(config))
    return sum(rows * columns for rows, columns in shapes.values()) - VOCAB * HIDDEN


@pytest.fixture(scope="module")
def middling(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    directory = tmp_path_factory.mktemp("middling") / "1"
    return directory, write_middling(directory)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.one_in(3)
@pytest.mark.parametrize(("quantization", "ranks", "each"), [("int8", 1, 1), ("none", 1, 2), ("none", 2, 1)])
def test_loading_takes_little_more_than_the_result(
    middling: tuple[Path, int], quantization: str, ranks: int, each: float
) -> None:
    """At its end, and after every tile on the way; `each`: bytes of a number."""
    directory, numbers = middling
    command = [sys.executable, "-c", MEASURE, str(directory), quantization, str(ranks)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    before, most, after = map(int, said.split())
    assert after - before > 0.9 * numbers * each, "where are the weights?"
    assert most - before < 1.2 * numbers * each
    assert after - before < 1.2 * numbers * each


def executor(directory: Path, **settings: Any) -> InlineExecutor:
    return InlineExecutor(EngineConfig(model=str(directory), **settings))


def load(directory: Path, **settings: Any) -> None:
    made = executor(directory, **settings)
    try:
        made.load(lambda phase, fraction: None)
    finally:
        made.close()


def test_an_unknown_quantization_is_refused(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(InvalidArgument, match="quantization must be none, int8, fp8 or int4, got 'int3'"):
        load(checkpoint("llama"), quantization="int3")


def test_chunks_of_recurrences_are_refused_beside_batch_invariance(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(InvalidArgument, match="recurrence_chunks: what shares a step decides on them"):
        load(checkpoint("qwen3.5"), recurrence_chunks=True, batch_invariance=True)


def test_a_foreign_model_is_not_quantised(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match="whose weights we can't quantise; use quantization none"):
        load(checkpoint("gpt-neox"), quantization="int8")


def test_without_kernels_int8_is_served_too(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "supports", lambda *_: False)
    load(checkpoint("qwen3-moe"), quantization="int8", device="cpu", attention="cpu")
