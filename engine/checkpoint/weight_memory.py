"""The memory that a checkpoint's weights will take, by the headers of its files, before anything is loaded. Imports no
torch; `layers.product_matrix.ProductMatrix` says of each product what is counted here. Measured, it is
`ServedForms.bytes`."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError

from ...core.errors import CharoniaError
from ...tokenization.checkpoint_files import locate_checkpoint, read_json
from ...tokenization.gguf_file import GgufFile, read_gguf
from ..kernel_choice import keeps_codes
from .gguf_config import read_gguf_config
from .hf_checkpoint import find_weights, open_safetensors, text_config, text_tensor_name, with_stored_dtype
from .quantization_config import CompressedTensors, ScaledFp8, StoredQuantization, read_quantization, stored_bits

_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number."""

_QUANTIZED_BYTES = {"int8": 1, "fp8": 1, "int4": 1}
"""Of a matrix's number; int4 is calibrated in eight bits."""

_CODE_BYTES = {True: 0.625, False: 1.125}
"""Bytes of a code in groups of 32 that has at most four bits, or more."""

_WEIGHT_NAMES = (".weight", ".bias", ".qweight", ".weight_packed")
"""Ends of the names of tensors that hold numbers, not what belongs to them."""

_TEXT_PARTS = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")
_TABLE, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class WeightUse(NamedTuple):
    """What weights are loaded for: floats of `dtype` ("auto": the checkpoint's), matrices quantised as `quantization`
    says, if it is one of ours, and a GPU of `capability` (see `keeps_codes`), or the host."""

    dtype: str = "auto"
    quantization: str = "none"
    capability: int | None = None


class _StoredTensor(NamedTuple):
    """A tensor by its header; `dtype` as safetensors names it."""

    name: str
    dtype: str
    shape: Sequence[int]

    @property
    def numbers(self) -> int:
        return prod(self.shape)


def count_weight_bytes(directory: Path, use: WeightUse) -> int:
    """What the weights take in all; 0 where they are not there, or broken: loading them will say so."""
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
            own = (each._replace(name=text_tensor_name(each.name)) for each in tensors)
            tensors = [each for each in own if each.name.startswith(_TEXT_PARTS)]
        return int(_plain_bytes(tensors, config, use) if stored is None else _quantised_bytes(tensors, stored, use))
    except (CharoniaError, OSError, SafetensorError):
        return 0


def _headers(files: Sequence[Path]) -> Iterator[_StoredTensor]:
    for file in files:
        with open_safetensors(file, "np") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                found = opened.get_slice(name)
                yield _StoredTensor(name, str(found.get_dtype()), found.get_shape())


def _float_dtype(config: Mapping[str, Any], use: WeightUse) -> str:
    """The dtype of floats that were not quantised, as `config_fields.py` chooses it."""
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    return name if use.dtype == "auto" else use.dtype


def _pickled_bytes(files: Sequence[Path], config: Mapping[str, Any], use: WeightUse) -> float:
    """Of files without headers, all of whose numbers are taken to be of the config's dtype."""
    size, stored = sum(file.stat().st_size for file in files), _float_dtype(config, WeightUse())
    width = _QUANTIZED_BYTES.get(use.quantization, _WIDTHS.get(_float_dtype(config, use), 2))
    return size * width / _WIDTHS.get(stored, 2)


def _plain_bytes(tensors: Sequence[_StoredTensor], config: Mapping[str, Any], use: WeightUse) -> float:
    """A GPU's table of embeddings is floats; the host maps it, and what is read of it is no more than a matrix."""
    floats = _WIDTHS.get(_float_dtype(config, use), 2)
    matrix = _QUANTIZED_BYTES.get(use.quantization, floats)
    total = 0.0
    for each in tensors:
        total += each.numbers * (matrix if len(each.shape) == 2 else floats)
        if each.name == _TABLE and use.capability is not None and matrix != floats:
            total += each.numbers * (floats if _is_tied(tensors) else floats - matrix)
    return total


def _is_tied(tensors: Sequence[_StoredTensor]) -> bool:
    return all(each.name != _HEAD for each in tensors)


def _quantised_bytes(tensors: Sequence[_StoredTensor], stored: StoredQuantization, use: WeightUse) -> float:
    """What stands beside a matrix in the file takes no memory of its own."""
    dtype = "bfloat16" if use.dtype == "auto" else use.dtype
    floats, total = _WIDTHS.get(dtype, 2), 0.0
    bits = stored_bits(stored)
    kept: dict[str, float] = {}
    if keeps_codes(dtype, False, use.capability):
        kept = {"I32": _CODE_BYTES[bits <= 4], "I8": _CODE_BYTES[False]}
    if use.quantization in _QUANTIZED_BYTES and use.quantization != "fp8":
        kept["F8_E4M3"] = _QUANTIZED_BYTES[use.quantization]
    elif keeps_codes(dtype, True, use.capability) and (group := _fp8_group(stored)) is not None:
        kept["F8_E4M3"] = 1 + 4 / group
    for each in tensors:
        if each.name.endswith(_WEIGHT_NAMES):
            numbers = each.numbers * (32 / bits if each.dtype == "I32" else 1)
            total += numbers * kept.get(each.dtype, floats)
    return total


def _fp8_group(stored: StoredQuantization) -> float | None:
    """The fewest inputs that share a scale in fp8; None: activations are not to be fp8, and products are of floats."""
    match stored:
        case ScaledFp8(block):
            blocks = [block]
        case CompressedTensors(forms):
            blocks = [form.block for form in forms if form.floats and form.activations]
        case _:
            blocks = []
    return min((float("inf") if block is None else block[1] for block in blocks), default=None)


def _gguf_bytes(file: GgufFile, use: WeightUse) -> float:
    """Numbers in blocks stay in about as many bits, those of five and six in eight, where kernels multiply with them;
    the table of embeddings becomes floats."""
    dtype = str(read_gguf_config(file)["dtype"]) if use.dtype == "auto" else use.dtype
    floats, integers, total = _WIDTHS.get(dtype, 2), keeps_codes(dtype, False, use.capability), 0.0
    for tensor in file.tensors.values():
        kept = tensor.type.kept_bytes if integers and tensor.type.values > 1 else floats
        table = tensor.name == "token_embd.weight"
        tied = table and "output.weight" not in file.tensors
        total += prod(tensor.shape) * (floats + kept * (tied and kept != floats) if table else kept)
    return total
