"""Chooses the reader of a checkpoint's weights, and reads safetensors with quantised matrices."""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from ..cpu.matmul import GroupedRows
from .code_forms import StoredForm
from .compressed_matrices import (
    FP8,
    AwqMatrix,
    BitStreamMatrix,
    Fp8Block,
    Fp8Matrix,
    GptqMatrix,
    Int8Matrix,
    Mxfp4Matrix,
)
from .gguf_weights import GgufWeights
from .hf_checkpoint import Checkpoint, own_tensor_name, text_tensor_name
from .matrix_parts import MatrixParts, MatrixReader
from .quantization_config import Awq, CompressedTensors, Gptq, Mxfp4, ScaledFp8, StoredQuantization, read_quantization
from .weights import CheckpointWeights, TensorSlice, WeightSource

_SCALES_OF_OTHERS = (".input_scale", ".input_zero_point", ".output_scale", ".k_scale", ".v_scale", ".q_scale")
"""Names of scales for activations and the KV cache, which are quantised in our own way, if at all."""


_PACKED = ("qweight", "weight_packed", "blocks")
"""What a matrix's numbers are called in place of "weight"."""


class QuantizedWeights:
    """A `WeightSource` over `weights`, which are `stored` quantised according to config.json."""

    def __init__(self, weights: CheckpointWeights, stored: StoredQuantization) -> None:
        self._weights, self._stored = weights, stored
        self.files, self.bytes = weights.files, weights.bytes
        self._matrices: dict[str, MatrixReader | None] = {}

    def __contains__(self, name: str) -> bool:
        module = name.removesuffix(".weight")
        return name in self._weights or any(f"{module}.{part}" in self._weights for part in _PACKED)

    @property
    def unread(self) -> list[str]:
        return [name for name in self._weights.unread if not name.endswith(_SCALES_OF_OTHERS)]

    @property
    def quantization(self) -> str | None:
        return self._stored.integers

    def form(self, piece: TensorSlice) -> StoredForm:
        matrix = self._matrix(piece)
        return self._weights.form(piece) if matrix is None else matrix.form

    def read(self, piece: TensorSlice) -> Tensor:
        matrix = self._matrix(piece)
        return self._weights.read(piece) if matrix is None else matrix.floats(piece.rows)[:, piece.columns]

    def codes(self, piece: TensorSlice) -> GroupedRows:
        matrix = self._matrix(piece)
        return self._weights.codes(piece) if matrix is None else matrix.codes(piece.rows)

    def blocks(self, piece: TensorSlice) -> tuple[str, Tensor] | None:
        return None

    def _matrix(self, piece: TensorSlice) -> MatrixReader | None:
        if piece.name not in self._matrices:
            self._matrices[piece.name] = find_matrix(self._weights, piece.name, piece.shape, self._stored)
        return self._matrices[piece.name]


def find_matrix(
    weights: CheckpointWeights, name: str, shape: tuple[int, ...], stored: StoredQuantization
) -> MatrixReader | None:
    """The quantised matrix `name`; None: it is stored as plain floats, or is missing. Raises `CheckpointError` for
    tensors that are not of the format."""
    if len(shape) != 2 or not name.endswith(".weight"):
        return None
    parts = MatrixParts(weights, name, *shape)
    if isinstance(stored, Gptq | Awq):
        if not parts.has("qweight"):
            return None
        return GptqMatrix(parts, stored) if isinstance(stored, Gptq) else AwqMatrix(parts, stored)
    if isinstance(stored, CompressedTensors) and parts.has("weight_packed"):
        return BitStreamMatrix(parts, stored)
    if isinstance(stored, Mxfp4):
        return Mxfp4Matrix(parts) if parts.has("blocks") else None
    if not parts.has("weight"):
        return None
    dtype = parts.dtype("weight")
    if dtype in (*FP8, *FP8.values()):
        if isinstance(stored, ScaledFp8):
            return Fp8Matrix(parts, [Fp8Block(stored.block, True)])
        return Fp8Matrix(parts, [Fp8Block(form.block, form.activations) for form in stored.forms if form.floats])
    if dtype in ("I8", torch.int8) and isinstance(stored, CompressedTensors):
        return Int8Matrix(parts, stored)
    return None


log = logging.getLogger(__name__)


def open_weights(checkpoint: Checkpoint, own_name: Callable[[str], str] | None = None) -> WeightSource:
    """The weights of `checkpoint`, by the names that our architectures give them, or by `own_name` of those in its
    files, if they are no GGUF.

    Raises:
        CheckpointError: no weights, a missing or truncated file, or one that is quantised in a way that is not served.
    """
    if checkpoint.gguf is not None:
        return GgufWeights(checkpoint.gguf, checkpoint.spec.head_dim, checkpoint.spec.recurrence)
    own_name = own_name or (text_tensor_name if checkpoint.language_part else own_tensor_name)
    weights = CheckpointWeights(checkpoint.directory, own_name)
    stored = read_quantization(checkpoint.config, checkpoint.where)
    if stored is None:
        return weights
    for note in stored.notes:
        log.info("%s: %s", checkpoint.directory, note)
    return QuantizedWeights(weights, stored)
