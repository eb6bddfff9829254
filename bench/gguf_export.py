"""Writes a checkpoint of Llama's or Qwen2's shape as GGUF, which llama.cpp reads.

    python -P gguf_export.py CHECKPOINT PRECISION FILE

Its interpreter has numpy and gguf, and needs no charonia. Writes no tokenizer: prompts are token ids. Specifications:
GGUF's (ggml, docs/gguf.md) and safetensors' formats.
"""

import json
import math
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

MATRICES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32", "int8": "Q8_0", "int4": "Q4_0"}
"""How matrices are stored; vectors stay fp32. Q8_0 and Q4_0: 8 or 4 bits with a scale for every 32 values of a row."""
_HEADS = ("token_embd.weight", "output.weight")
"""What is Q8_0 beside Q4_0, for our int4 keeps the head in 8 bits too."""
_STORED = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}
"""What safetensors calls a type, and what numpy reads it as."""
_MODELS = ("llama", "qwen2")


class UnsupportedCheckpoint(Exception):
    """The checkpoint is none that we can write; the message says why."""


class Llama3Rope(NamedTuple):
    """Llama 3.1's stretched rotary embedding, by the names of config.json."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def divisors(self, theta: float, head_dim: int) -> Array:
        """The divisors of the `head_dim` / 2 frequencies, fp32: 1 for the fast ones, `factor` for the slow ones, and
        smoothly between."""
        frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        kept = np.clip((turns - self.low_freq_factor) / span, 0.0, 1.0)
        return (1 / (kept + (1 - kept) / self.factor)).astype(np.float32)


@dataclass(frozen=True)
class GgufModelShape:
    """The metadata of a model for llama.cpp."""

    model: str
    """The architecture's name there, and in config.json."""
    layers: int
    hidden: int
    """Values of a hidden state."""
    intermediate: int
    """Values between the matrices of an MLP."""
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    """The most tokens of a sequence."""
    epsilon: float
    """Of the norms."""
    theta: float
    """The base of the rotary embedding."""
    stretched: Llama3Rope | None
    """How that is stretched, if it is."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "GgufModelShape":
        """Out of a config.json.

        Raises:
            UnsupportedCheckpoint: a model, or a feature of one, that is not converted; or a field is missing.
        """
        _refuse(config)
        try:
            return cls._read(config)
        except KeyError as missing:
            raise UnsupportedCheckpoint(f"config.json has no {missing}") from missing

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> "GgufModelShape":
        rope = {**config, **(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
        heads = config["num_attention_heads"]
        return cls(
            model=config["model_type"],
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab=config["vocab_size"],
            context=config["max_position_embeddings"],
            epsilon=config.get("rms_norm_eps", 1e-6),
            theta=rope.get("rope_theta", 10000.0),
            stretched=_stretched(config["model_type"], rope),
        )


class ExportedTensor(NamedTuple):
    """A weight by its name in the checkpoint; bf16's bits are 16-bit integers."""

    name: str
    stored: str
    values: Array

    def floats(self) -> Array:
        """In fp32."""
        if self.stored == "BF16":
            return (self.values.astype(np.uint32) << 16).view(np.float32)
        return self.values.astype(np.float32)


def tensors(checkpoint: Path) -> Iterator[ExportedTensor]:
    """Every weight of all files, mapped and not read yet.

    Raises:
        Refused: there is none, or one of a type that we do not read.
    """
    files = sorted(checkpoint.glob("*.safetensors"))
    if not files:
        raise UnsupportedCheckpoint(f"{checkpoint}: no safetensors")
    for file in files:
        with file.open("rb") as opened:
            (size,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(size))
        data = np.memmap(file, np.uint8, "r", offset=8 + size)
        header.pop("__metadata__", None)
        for name, entry in header.items():
            yield _tensor(name, entry, data)


def permute_rope_rows(values: Array, heads: int) -> Array:
    """Rows of a query or key projection in the order that llama.cpp rotates Llama's in: neighbours form a pair, where
    the checkpoint has a head's first half and its second."""
    return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def export(checkpoint: Path, precision: str, file: Path) -> None:
    """Write the file.

    Raises:
        Refused: see `GgufModelShape` and `tensors`; or a weight that llama.cpp has no name or no place for.
    """
    gguf: Any = import_module("gguf")
    shape = GgufModelShape.of(json.loads((checkpoint / "config.json").read_bytes()))
    writer = gguf.GGUFWriter(file, shape.model)
    _describe(writer, shape)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[shape.model.upper()], shape.layers)
    for tensor in tensors(checkpoint):
        name = names.get_name(tensor.name, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise UnsupportedCheckpoint(f"{tensor.name}: llama.cpp's {shape.model} has no such weight")
        values = _arranged(tensor, shape)
        kept = "int8" if precision == "int4" and name in _HEADS else precision
        kind = gguf.GGMLQuantizationType[MATRICES[kept] if values.ndim > 1 else "F32"]
        writer.add_tensor(name, _encoded(gguf, tensor.name, values, kind), raw_dtype=kind)
    if shape.stretched:
        writer.add_tensor("rope_freqs.weight", shape.stretched.divisors(shape.theta, shape.head_dim))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _refuse(config: Mapping[str, Any]) -> None:
    model = config.get("model_type")
    if model not in _MODELS:
        raise UnsupportedCheckpoint(f"model_type {model!r} is not converted to GGUF: {' and '.join(_MODELS)} are")
    if config.get("use_sliding_window"):
        raise UnsupportedCheckpoint("use_sliding_window is not converted to GGUF")
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedCheckpoint(f"hidden_act {config['hidden_act']!r} is not converted to GGUF: silu is")


def _stretched(model: str, rope: Mapping[str, Any]) -> Llama3Rope | None:
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return None
    if (model, kind) != ("llama", "llama3"):
        raise UnsupportedCheckpoint(
            f"rope_type {kind!r} of {model} is not converted to GGUF: default is, and llama's llama3"
        )
    return Llama3Rope(*(rope[field] for field in Llama3Rope._fields))


def _tensor(name: str, entry: Mapping[str, Any], data: Array) -> ExportedTensor:
    stored, (begin, end) = entry["dtype"], entry["data_offsets"]
    if stored not in _STORED:
        raise UnsupportedCheckpoint(f"{name}: {stored} is not converted to GGUF: {', '.join(_STORED)} are")
    return ExportedTensor(name, stored, data[begin:end].view(_STORED[stored]).reshape(entry["shape"]))


def _arranged(tensor: ExportedTensor, shape: GgufModelShape) -> Array:
    values, heads = tensor.floats(), {"q_proj": shape.heads, "k_proj": shape.kv_heads}
    projection = tensor.name.split(".")[-2]
    return permute_rope_rows(values, heads[projection]) if shape.model == "llama" and projection in heads else values


def _encoded(gguf: Any, name: str, values: Array, kind: Any) -> Array:
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    if values.shape[-1] % block:
        raise UnsupportedCheckpoint(
            f"{name}: rows of {values.shape[-1]} values are not whole blocks of {block}, as {kind.name} has"
        )
    encoded: Array = gguf.quants.quantize(values, kind)
    return encoded


def _describe(writer: Any, shape: GgufModelShape) -> None:
    writer.add_vocab_size(shape.vocab)
    writer.add_tokenizer_model("none")
    writer.add_context_length(shape.context)
    writer.add_block_count(shape.layers)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.theta)
    writer.add_layer_norm_rms_eps(shape.epsilon)


def main() -> None:
    """Write the file, or say in one line why not."""
    checkpoint, precision, file = sys.argv[1:]
    try:
        export(Path(checkpoint), precision, Path(file))
    except UnsupportedCheckpoint as error:
        sys.exit(f"{checkpoint}: {error}")


if __name__ == "__main__":
    main()
