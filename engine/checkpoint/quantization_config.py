"""Reads `quantization_config` of a config.json: how the weights beside it are stored. Knows nothing of tensors.

The tensors themselves say which matrices are quantised, and their shapes mostly how. What shapes leave open is read
here, and what cannot be served is refused by name.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from .model_spec import CheckpointError


class CompressedWeights(NamedTuple):
    """One form of matrices in compressed-tensors."""

    bits: int
    floats: bool
    """Floats of eight bits, not integers."""
    symmetric: bool
    group_size: int
    """Inputs of an output that share a scale; 0: those of a `block`, or of a whole output or matrix."""
    block: tuple[int, int] | None
    """Outputs and inputs that share a scale."""
    activations: bool
    """Whether activations become what weights of eight bits are."""


class CompressedTensors(NamedTuple):
    """The forms in a checkpoint of compressed-tensors (github.com/vllm-project/compressed-tensors)."""

    forms: tuple[CompressedWeights, ...]
    notes: tuple[str, ...] = ()

    @property
    def integers(self) -> str | None:
        bits = sorted({form.bits for form in self.forms if not form.floats})
        return f"integers of {' and '.join(map(str, bits))} bits (compressed-tensors)" if bits else None


class Gptq(NamedTuple):
    """GPTQ (arXiv 2210.17323)."""

    bits: int
    group_size: int
    """0: all inputs."""
    less: int
    """Subtracted from stored zero points."""
    varied: bool
    """Whether some matrices have other bits or groups."""
    notes: tuple[str, ...] = ()

    @property
    def integers(self) -> str | None:
        return f"integers of {self.bits} bits (gptq)"


class Awq(NamedTuple):
    """AWQ (arXiv 2306.00978) as AutoAWQ's `gemm` lays it out: four bits."""

    group_size: int
    notes: tuple[str, ...] = ()

    @property
    def integers(self) -> str | None:
        return "integers of 4 bits (awq)"


class ScaledFp8(NamedTuple):
    """Floats of eight bits with a scale for each `block` [outputs, inputs]; None: for each matrix or output."""

    block: tuple[int, int] | None
    notes: tuple[str, ...] = ()

    @property
    def integers(self) -> str | None:
        return None


class Mxfp4(NamedTuple):
    """Experts in floats of four bits (e2m1), of which 32 share a scale, a power of two (OCP Microscaling Formats)."""

    notes: tuple[str, ...] = ()

    @property
    def integers(self) -> str | None:
        return None


StoredQuantization: TypeAlias = CompressedTensors | Gptq | Awq | ScaledFp8 | Mxfp4

STORED_AS: Mapping[str, str] = {
    "awq": "awq",
    "awq_marlin": "awq",
    "compressed-tensors": "compressed-tensors",
    "fp8": "fp8",
    "gguf": "gguf",
    "gptq": "gptq",
    "gptq_marlin": "gptq",
    "mxfp4": "mxfp4",
}
"""vLLM's names of stored forms, in `--quantization` -> `quant_method` of a config, or gguf."""

GPTQ_BITS = (2, 3, 4, 8)
_KV_CACHE = "its scales for the KV cache are left out: --kv-cache-dtype says how that is kept"
_STATIC = "its scales for activations are left out: each token has its own"


class _Quantization(NamedTuple):
    """The fields of a quantization_config, or of a part of it, checked while they are read."""

    values: Mapping[str, Any]
    where: str

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: quantization_config: {message}")

    def part(self, name: str) -> "_Quantization | None":
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.error(f"{name} must be an object, got {value!r}")
        return None if value is None else _Quantization(value, self.where)

    def number(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name, default)
        if type(value) is not int:
            raise self.error(f"{name} must be a whole number, got {value!r}")
        return value

    def group_size(self) -> int:
        """0 where all inputs share a scale, which is -1 or null in files."""
        size = self.number("group_size", -1) if self.values.get("group_size") is not None else -1
        if size != -1 and not 1 <= size <= 1 << 20:
            raise self.error(f"group_size must be -1 or positive, got {size}")
        return max(size, 0)

    def one_of(self, name: str, allowed: tuple[Any, ...], default: Any) -> Any:
        value = self.values.get(name, default)
        if value not in allowed or type(value) is bool:
            raise self.error(f"{name} {value!r} is not supported; supported: {', '.join(map(str, allowed))}")
        return value

    def block(self, name: str) -> tuple[int, int] | None:
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
            raise self.error(f"{name} must be two positive numbers, got {value!r}")
        return value[0], value[1]

    def refuse(self, *names: str) -> None:
        for name in names:
            if self.values.get(name):
                raise self.error(f"{name} is not supported")


def read_quantization(config: Mapping[str, Any], where: str) -> StoredQuantization | None:
    """How the weights beside a parsed config.json are stored; None: as plain floats. `where` is its path, for errors.
    Raises `CheckpointError` for a form that is not served, or a wrong field."""
    stored = _stored(config)
    if not stored:
        return None
    fields = _Quantization(stored, where)
    if not isinstance(stored, dict):
        raise fields.error(f"it must be an object, got {stored!r}")
    method = str(stored.get("quant_method", "unknown method"))
    if method not in _READERS:
        supported = f"supported: {', '.join(_READERS)}"
        raise CheckpointError(f"{where}: quantised weights ({method}) are not supported; {supported}")
    return _READERS[method](fields)


def stored_bits(stored: StoredQuantization) -> int:
    """The fewest bits of a number that is packed into words."""
    match stored:
        case CompressedTensors(forms):
            return min((form.bits for form in forms if not form.floats), default=8)
        case Gptq(bits):
            return bits
        case Awq() | Mxfp4():
            return 4
        case ScaledFp8():
            return 8


def stored_method(config: Mapping[str, Any]) -> str:
    """The `quant_method` of a parsed config.json; empty: its weights are plain floats."""
    stored = _stored(config)
    return str(stored.get("quant_method", "unknown method")) if isinstance(stored, dict) and stored else ""


def _stored(config: Mapping[str, Any]) -> Any:
    return config.get("quantization_config") or config.get("compression_config")


def _gptq(fields: _Quantization) -> Gptq:
    layout = fields.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    bits = fields.one_of("bits", GPTQ_BITS, None)
    dynamic = fields.part("dynamic")
    return Gptq(bits, fields.group_size(), 1 if layout == "gptq" else 0, dynamic is not None and bool(dynamic.values))


def _awq(fields: _Quantization) -> Awq:
    fields.one_of("version", ("gemm", "GEMM"), "gemm")
    fields.one_of("backend", ("autoawq",), "autoawq")
    fields.one_of("bits", (4,), fields.values.get("w_bit"))
    return Awq(fields.group_size())


def _fp8(fields: _Quantization) -> ScaledFp8:
    scheme = fields.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
    fields.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    return ScaledFp8(fields.block("weight_block_size"), (_STATIC,) if scheme == "static" else ())


def _mxfp4(fields: _Quantization) -> Mxfp4:
    return Mxfp4()


_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")


def _compressed_tensors(fields: _Quantization) -> CompressedTensors:
    fields.one_of("format", _FORMATS, None)
    fields.one_of("quantization_status", ("compressed",), "compressed")
    fields.refuse("transform_config", "moe_sparsity_config")
    if (sparsity := fields.part("sparsity_config")) is not None:
        sparsity.one_of("format", ("dense",), "dense")
    if (groups := fields.part("config_groups")) is None:
        raise fields.error("config_groups is missing")
    parts = [part for name in groups.values if (part := groups.part(name)) is not None]
    read = [_compressed_group(part) for part in parts]
    notes = [_KV_CACHE] if fields.values.get("kv_cache_scheme") else []
    notes += [_STATIC] if any(static for _, static in read) else []
    return CompressedTensors(tuple(form for form, _ in read), tuple(notes))


def _compressed_group(group: _Quantization) -> tuple[CompressedWeights, bool]:
    """The form of a group's matrices, and whether activations have scales in the file."""
    group.refuse("output_activations")
    group.one_of("format", (None, *_FORMATS), None)
    if (weights := group.part("weights")) is None:
        raise group.error("a group of config_groups has no weights")
    floats = weights.one_of("type", ("int", "float"), "int") == "float"
    bits = weights.one_of("num_bits", (8,) if floats else (2, 3, 4, 5, 6, 7, 8), None)
    strategy = weights.one_of("strategy", ("tensor", "channel", "group", "block"), _usual_strategy(weights))
    inputs = group.part("input_activations")
    size = weights.group_size() if strategy == "group" else 0
    if strategy == "group" and not size:
        raise weights.error("strategy group needs a group_size")
    block = weights.block("block_structure") if strategy == "block" else None
    if (block is None) is (strategy == "block") or (block is not None and not floats):
        raise weights.error("strategy block needs a block_structure, and floats")
    static = False
    if inputs is not None:
        inputs.one_of("num_bits", (4, 8), None)
        static = inputs.values.get("dynamic") is not True
    symmetric = bool(weights.values.get("symmetric", True))
    activations = {} if inputs is None else inputs.values
    alike = activations.get("num_bits") == bits == 8 and (activations.get("type", "int") == "float") is floats
    return CompressedWeights(bits, floats, symmetric, size, block, alike), static


def _usual_strategy(weights: _Quantization) -> str:
    return "group" if weights.values.get("group_size") else "tensor"


_READERS: Mapping[str, Callable[[_Quantization], StoredQuantization]] = {
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
}
