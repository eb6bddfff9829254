"""Checkpoints with random weights, written by transformers: shapes to measure and to compare with, not models. Their
tokenizers have printable characters, and invented words for all other ids: every token is whole characters.

    python -m charonia.bench.checkpoint DIR [--shape llama-3.2-1b] [--w8a8]
"""

import json
import math
import string
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeAlias

from cyclopts import App
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from .command import Log

QWEN2_HALF_BILLION: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
"""Qwen2.5-0.5B's config.json, as far as it shapes the computation."""

LLAMA_ONE_BILLION: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
"""Llama-3.2-1B's config.json, as far as it shapes the computation."""

QWEN3_5_SMALL: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "intermediate_size": 3584,
    "vocab_size": 248320,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "max_position_embeddings": 32768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
"""Qwen3.5-0.8B's config.json, as far as it shapes the computation."""

LFM2_ONE_BILLION: dict[str, Any] = {
    "model_type": "lfm2",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 12288,
    "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "block_dim": 2048,
    "conv_dim": 2048,
    "conv_L_cache": 3,
    "layer_types": ["full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)],
    "vocab_size": 65536,
    "max_position_embeddings": 128000,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
"""LFM2-1.2B's config.json, as far as it shapes the computation."""

GRANITE_TINY: dict[str, Any] = {
    "model_type": "granite",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 384,
    "max_position_embeddings": 256,
    "dtype": "float32",
}
"""A model that transformers computes and that has hardly a weight: starting it costs what any start costs."""

ShapeName: TypeAlias = Literal["qwen2.5-0.5b", "llama-3.2-1b", "qwen3.5-0.8b", "lfm2-1.2b", "granite-tiny"]
SHAPES: dict[ShapeName, dict[str, Any]] = {
    "qwen2.5-0.5b": QWEN2_HALF_BILLION,
    "llama-3.2-1b": LLAMA_ONE_BILLION,
    "qwen3.5-0.8b": QWEN3_5_SMALL,
    "lfm2-1.2b": LFM2_ONE_BILLION,
    "granite-tiny": GRANITE_TINY,
}

app = App(name="python -m charonia.bench.checkpoint", help=__doc__)


def write_random(
    directory: Path, config: Mapping[str, Any], *, seed: int = 0, shard: str = "5GB", device: str = "cpu"
) -> None:
    """Write config.json and safetensors of a causal language model, or of one that takes images or sounds too.

    `config` is an AutoConfig's fields with `model_type` among them; its `dtype` is the one the weights are stored
    in. Every parameter is random, norms and biases included, and large enough for attention to matter. `shard` is
    the largest size of one file. They are drawn on `device`: a GPU draws billions in a moment.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM

    torch.manual_seed(seed)
    parsed = AutoConfig.for_model(**config)
    # Some families' whole configs also make a model of text alone.
    parts = hasattr(parsed, "vision_config") or hasattr(parsed, "audio_config")
    auto: Any = AutoModelForMultimodalLM if parts else AutoModelForCausalLM
    with torch.device(device):
        model = auto.from_config(parsed, dtype=parsed.dtype)
    for name, parameter in model.named_parameters():
        _randomise(name, parameter.data)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.5, 1.5)
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.1)
    model.save_pretrained(directory, max_shard_size=shard)


def _randomise(name: str, parameter: Any) -> None:
    """Norms around 1, small biases, and matrices that double what goes through: then no token is an easy favourite."""
    if "norm" in name:
        parameter.normal_(1.0, 0.1)
    elif parameter.dim() == 1:
        parameter.normal_(0.0, 0.1)
    else:
        parameter.normal_(0.0, 2 / math.sqrt(parameter.shape[-1]))


@app.default
def write_shape(directory: Path, /, *, shape: ShapeName = "qwen2.5-0.5b", w8a8: bool = False) -> None:
    """Write a checkpoint of a known model's shape and a tokenizer that fits it; nothing where one is already.

    Parameters
    ----------
    directory
        Where to; made if need be.
    shape
        Whose shape.
    w8a8
        Matrices of layers in int8, by output, and what they multiply token by token: compressed-tensors' w8a8.
    """

    if (directory / "tokenizer.json").exists():
        return
    write_random(directory, SHAPES[shape])
    if w8a8:
        _quantize(directory)
    write_tokenizer(directory, SHAPES[shape]["vocab_size"])


def _quantize(directory: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name, tensor in tensors.items() if tensor.dim() == 2]:
        if "embed_tokens" in name or name == "lm_head.weight" or not name.endswith(".weight"):
            continue
        scales = tensors[name].float().abs().amax(1, keepdim=True) / 127
        tensors[name + "_scale"] = scales.to(tensors[name].dtype)
        tensors[name] = (tensors[name].float() / scales).round().char()
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    numbers = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": numbers | {"strategy": "channel"},
        "input_activations": numbers | {"strategy": "token", "dynamic": True},
    }
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    (directory / "config.json").write_text(json.dumps(config))


_PRINTABLE = string.digits + string.ascii_letters + string.punctuation + "ĠĊ"
"""The characters that the byte-level pre-tokenizer makes of printable text; space and newline are the last two."""


def build_tokenizer(vocab: int) -> Tokenizer:
    """Single characters to read prompts with, and invented words to fill a vocabulary of `vocab` tokens up."""
    pieces = [*_PRINTABLE, *(f"Ġw{number}" for number in range(vocab - len(_PRINTABLE)))]
    made = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces[:vocab])}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def write_tokenizer(directory: Path, vocab: int) -> None:
    """Write the tokenizer files of a checkpoint."""
    build_tokenizer(vocab).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


@contextmanager
def prepare_checkpoint(
    checkpoint: Path | None, shape: ShapeName, scratch: Path | None, log: Log
) -> Iterator[tuple[Path, Path]]:
    """A checkpoint and a folder for what is made on the way; without `scratch` that is gone afterwards."""
    with ExitStack() as stack:
        folder = scratch or Path(stack.enter_context(TemporaryDirectory(prefix="charonia-bench-")))
        if checkpoint is None:
            checkpoint = folder / shape
            log(f"random weights of {shape}'s shape")
            write_shape(checkpoint, shape=shape)
        yield checkpoint, folder


if __name__ == "__main__":
    app()
