"""Counts the memory that a checkpoint's weights will take, by the headers of its files. `ServedForms.bytes` is the same
after loading, by the rules of `layers.product_matrix.ProductMatrix`. Imports no torch."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError

from ...core.errors import CharoniaError
from ...tokenization.checkpoint_files import locate_checkpoint, read_json
from ...tokenization.gguf_file import GgufFile, read_gguf
from ..kernel_choice import computes_with_triton, keeps_codes
from .gguf_config import read_gguf_config
from .gguf_names import EMBEDDING_TABLES
from .hf_checkpoint import (
    find_weights,
    is_drafting_layer,
    open_safetensors,
    text_config,
    text_tensor_name,
    with_stored_dtype,
)
from .quantization_config import CompressedTensors, Mxfp4, ScaledFp8, StoredQuantization, read_quantization, stored_bits

_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number."""

_QUANTIZED_BYTES = {"int8": 1, "fp8": 1, "int4": 1}
"""Bytes of a matrix's number; int4 is calibrated in eight bits."""

_CODE_BYTES = {True: 0.625, False: 1.125}
"""Whether a code has at most four bits -> its bytes, in groups of 32."""

_FLOAT4_BYTES = 0.5625
"""The bytes of a float of four bits, in groups of 32, for the C kernels."""

_WORD_BITS = {"I32": 32, "U8": 8}
"""The bits of what numbers are packed into, by its dtype."""

_WEIGHT_NAMES = (".weight", ".bias", ".qweight", ".weight_packed", "_blocks", "_bias", ".sinks")
"""Ends of the names of tensors that hold numbers, as opposed to scales."""

_TEXT_PARTS = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")
_TABLE, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class WeightUse(NamedTuple):
    """The options that weights are loaded with."""

    dtype: str = "auto"
    """The dtype of floats; "auto": the checkpoint's."""
    quantization: str = "none"
    """What matrices become, if it is one of ours."""
    capability: int | None = None
    """A GPU's, see `keeps_codes`; None: the host."""


class _StoredTensor(NamedTuple):
    """A tensor by its header; `dtype` as safetensors names it."""

    name: str
    dtype: str
    shape: Sequence[int]

    @property
    def numbers(self) -> int:
        return prod(self.shape)


def count_weight_bytes(directory: Path, use: WeightUse) -> int:
    """The memory of all weights; 0 where they are missing or broken, which loading them will report."""
    try:
        if directory.exists() and (file := locate_checkpoint(str(directory))).is_file():
            return int(_gguf_bytes(read_gguf(file), use))
        files = [file for file in find_weights(directory).files if file.exists()]
        if not files:
            return 0
        outer = read_json(directory / "config.json")
        part = text_config(outer)
        config = with_stored_dtype(outer if part is None else part, directory)
        stored = read_quantization(config, str(directory))
        if files[0].suffix == ".bin":
            return int(_pickled_bytes(files, config, use))
        tensors = [*_headers(files)]
        if part is not None:
            own = (tensor._replace(name=text_tensor_name(tensor.name)) for tensor in tensors)
            tensors = [tensor for tensor in own if tensor.name.startswith(_TEXT_PARTS)]
        tensors = [tensor for tensor in tensors if not is_drafting_layer(tensor.name, config)]
        return int(_plain_bytes(tensors, config, use) if stored is None else _quantised_bytes(tensors, stored, use))
    except (CharoniaError, OSError, SafetensorError):
        return 0


def _headers(files: Sequence[Path]) -> Iterator[_StoredTensor]:
    for file in files:
        with open_safetensors(file, "np") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                tensor = opened.get_slice(name)
                yield _StoredTensor(name, str(tensor.get_dtype()), tensor.get_shape())


def _float_dtype(config: Mapping[str, Any], use: WeightUse) -> str:
    """The dtype of floats that were not quantised, as `config_fields.py` chooses it."""
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    return name if use.dtype == "auto" else use.dtype


def _pickled_bytes(files: Sequence[Path], config: Mapping[str, Any], use: WeightUse) -> float:
    """The memory of weights in files without headers, all of whose numbers count as the config's dtype."""
    size = sum(file.stat().st_size for file in files)
    stored = _float_dtype(config, WeightUse())
    width = _QUANTIZED_BYTES.get(use.quantization, _WIDTHS.get(_float_dtype(config, use), 2))
    return size * width / _WIDTHS.get(stored, 2)


def _plain_bytes(tensors: Sequence[_StoredTensor], config: Mapping[str, Any], use: WeightUse) -> float:
    """The memory of weights that are stored as floats. A GPU's table of embeddings stays floats; the host maps it, and
    reads no more of it than a matrix."""
    floats = _WIDTHS.get(_float_dtype(config, use), 2)
    matrix = _QUANTIZED_BYTES.get(use.quantization, floats)
    total = 0.0
    for tensor in tensors:
        total += tensor.numbers * (matrix if len(tensor.shape) in (2, 3) else floats)
        if tensor.name == _TABLE and use.capability is not None and matrix != floats:
            total += tensor.numbers * (floats if _is_tied(tensors) else floats - matrix)
    return total


def _is_tied(tensors: Sequence[_StoredTensor]) -> bool:
    return all(tensor.name != _HEAD for tensor in tensors)


def _quantised_bytes(tensors: Sequence[_StoredTensor], stored: StoredQuantization, use: WeightUse) -> float:
    """The memory of quantised weights; tensors beside a matrix count as part of it."""
    dtype = "bfloat16" if use.dtype == "auto" else use.dtype
    floats, total = _WIDTHS.get(dtype, 2), 0.0
    bits = stored_bits(stored)
    kept: dict[str, float] = {}
    if keeps_codes(dtype, False, use.capability):
        kept = {"I32": _CODE_BYTES[bits <= 4], "I8": _CODE_BYTES[False], "U8": _CODE_BYTES[False]}
        if use.capability is None and isinstance(stored, Mxfp4) and not computes_with_triton(False):
            kept["U8"] = _FLOAT4_BYTES
    if use.quantization in _QUANTIZED_BYTES:
        kept["U8"] = _QUANTIZED_BYTES[use.quantization]
    if use.quantization in _QUANTIZED_BYTES and use.quantization != "fp8":
        kept["F8_E4M3"] = _QUANTIZED_BYTES[use.quantization]
    elif keeps_codes(dtype, True, use.capability) and (group := _fp8_group(stored)) is not None:
        kept["F8_E4M3"] = 1 + 4 / group
    for tensor in tensors:
        if tensor.name.endswith(_WEIGHT_NAMES):
            numbers = tensor.numbers * (_WORD_BITS.get(tensor.dtype, bits) / bits)
            total += numbers * kept.get(tensor.dtype, floats)
    return total


def _fp8_group(stored: StoredQuantization) -> float | None:
    """The fewest inputs that share a scale in fp8; None: activations do not become fp8, and products are of floats."""
    match stored:
        case ScaledFp8(block):
            blocks = [block]
        case CompressedTensors(forms):
            blocks = [form.block for form in forms if form.floats and form.activations]
        case _:
            blocks = []
    return min((float("inf") if block is None else block[1] for block in blocks), default=None)


def _gguf_bytes(file: GgufFile, use: WeightUse) -> float:
    """The memory of weights in GGUF. Where kernels multiply with blocks these stay, five and six bits as eight, and on
    the host tables of embeddings stay in the file; elsewhere those become floats."""
    dtype = str(read_gguf_config(file)["dtype"]) if use.dtype == "auto" else use.dtype
    floats = _WIDTHS.get(dtype, 2)
    integers = keeps_codes(dtype, False, use.capability)
    total = 0.0
    for tensor in file.tensors.values():
        kept = tensor.type.kept_bytes if integers and tensor.type.values > 1 else floats
        if tensor.name in EMBEDDING_TABLES:
            tied = tensor.name == EMBEDDING_TABLES[0] and "output.weight" not in file.tensors
            coded = integers and use.capability is None and tensor.type.values > 1
            own = tensor.bytes / prod(tensor.shape) if coded else floats
            kept = own + kept * (tied and kept != floats)
        total += prod(tensor.shape) * kept
    return total
