"""What a checkpoint's config.json says of its model, as one frozen value. Knows nothing of tensors or files."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..core.errors import InvalidArgument

DTYPES = ("bfloat16", "float16", "float32")
ROPE_TYPES = ("default", "linear", "llama3")


class CheckpointError(InvalidArgument):
    """A checkpoint that cannot be served: the message says what, where, and what is supported."""


class Rope(NamedTuple):
    """Rotary position embedding; `factor` and what follows belong to the scaled kinds."""

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder's numbers. `dtype` is what the weights are stored in, one of DTYPES."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope
    max_position: int
    tied_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: str


def read_spec(config: Mapping[str, Any], where: str) -> ModelSpec:
    """The spec in a parsed config.json; `where` names the file in errors.

    Reads both the fields transformers 5 writes (`rope_parameters`, `dtype`) and the older ones (`rope_scaling`,
    `rope_theta`, `torch_dtype`).

    Raises:
        CheckpointError: a field is missing or has a value that is not supported.
    """
    fields = _Fields(config, where)
    fields.refuse_unsupported()
    heads, hidden = fields.number("num_attention_heads"), fields.number("hidden_size")
    return ModelSpec(
        architecture=fields.architecture(),
        vocab_size=fields.number("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.number("intermediate_size"),
        layers=fields.number("num_hidden_layers"),
        heads=heads,
        kv_heads=fields.number("num_key_value_heads", heads),
        head_dim=fields.number("head_dim", hidden // heads),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=fields.rope(),
        max_position=fields.number("max_position_embeddings", 2048),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        dtype=fields.dtype(),
    )


class _Fields(NamedTuple):
    """config.json's fields, checked while they are read."""

    config: Mapping[str, Any]
    where: str

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {message}")

    def number(self, name: str, default: int | None = None) -> int:
        value = self.config.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or value < 1:
            raise self.error(f"{name} must be a positive whole number, got {value!r}")
        return value

    def architecture(self) -> str:
        names = self.config.get("architectures")
        if not isinstance(names, list) or len(names) != 1:
            raise self.error(f"architectures must name one class, got {names!r}")
        return str(names[0])

    def dtype(self) -> str:
        name = str(self.config.get("dtype") or self.config.get("torch_dtype") or "float32").removeprefix("torch.")
        if name not in DTYPES:
            raise self.error(f"dtype {name} is not supported; supported: {', '.join(DTYPES)}")
        return name

    def rope(self) -> Rope:
        values = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        kind = values.get("rope_type") or values.get("type") or "default"
        if kind not in ROPE_TYPES:
            raise self.error(f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
        original = values.get("original_max_position_embeddings") or self.config.get("max_position_embeddings")
        return Rope(
            kind,
            float(values.get("rope_theta") or self.config.get("rope_theta") or 10000.0),
            float(values.get("factor") or 1.0),
            float(values.get("low_freq_factor") or 1.0),
            float(values.get("high_freq_factor") or 4.0),
            int(original or 8192),
        )

    def refuse_unsupported(self) -> None:
        quantization = self.config.get("quantization_config")
        if quantization:
            method = quantization.get("quant_method", "unknown method")
            raise self.error(f"quantised weights ({method}) are not supported; supported dtypes: {', '.join(DTYPES)}")
        if self.config.get("use_sliding_window"):
            raise self.error("use_sliding_window is not supported; only full attention is")
        activation = self.config.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise self.error(f"hidden_act {activation!r} is not supported; supported: silu")
