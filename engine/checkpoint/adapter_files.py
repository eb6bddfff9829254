"""Reads a LoRA adapter (arXiv 2106.09685) as PEFT saves it: adapter_config.json, and adapter_model.safetensors.

What PEFT would compute differently from x A^T B^T is refused by name. Knows no layers. Imports no torch.
"""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from ...core.errors import InvalidArgument, NotFound, shorten
from ...core.regular_files import open_regular, read_regular
from ...tokenization.checkpoint_files import read_json, refuse_lfs_pointer
from ..config import LoraConfig

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"

ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
"""The supported dtypes of matrices, by safetensors' names -> bytes of a number."""

_MOST_CONFIG_BYTES, _MOST_HEADER_BYTES = 1 << 20, 1 << 24

_MOST_REAL = 1e30

_PREFIX = "base_model.model."
_MATRIX = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")

_READ = {"alpha_pattern", "bias", "init_lora_weights", "lora_alpha", "peft_type", "r", "rank_pattern", "use_rslora"}
_TRAINING = {"corda_config", "eva_config", "loftq_config", "lora_dropout", "lora_ga_config", "qalora_group_size"}
_CHOICE = {"exclude_modules", "layers_pattern", "layers_to_transform", "target_modules"}  # which the tensors show
_ORIGIN = {"auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"}
_ELSEWHERE = {"ensure_weight_tying", "megatron_config", "megatron_core", "runtime_config"}
_HARMLESS = _READ | _TRAINING | _CHOICE | _ORIGIN | _ELSEWHERE
"""Fields that are read here or change nothing that is computed. Any other field that is set is refused: PEFT's variants
of LoRA each have one."""

_CHANGE_THE_BASE = ("corda", "lora_ga", "loftq", "mica", "olora", "pissa")
"""Beginnings of `init_lora_weights` with which PEFT changes the model's own weights, for which the adapter then is."""

_LETTER = r"(?:[\w.-]|\\[.dw-]|\[\^?(?:[\w.-]|\\[.dw-])+\])"
_TIMES = r"(?:[*+?]|\{[1-9]\d?(?:,\d{0,2})?\})"
_PATTERN = re.compile(rf"\^?(?:{_LETTER}{_TIMES}?|\||\((?:\?:)?|\))*\$?")
"""Letters that repeat, each at least once where its number is given, and groups that don't."""
_WHOLE_NUMBER = re.compile(rf"\\d{_TIMES}(?=(?:\\\.|[a-zA-Z_])(?![*+?{{]))|\{{\d+\}}|\(\?:")
"""What can end in one way only, since a letter that is no digit must follow, and what is no repetition."""
_REPEATED = re.compile(r"[*+?{]")
_MOST_PATTERNS, _MOST_PATTERN_LETTERS, _MOST_MODULE_LETTERS = 1024, 256, 512
_MOST_REPEATS, _MOST_GROUPS = 2, 4
_MOST_CHOICES = (4096, 64, 8)
"""Ways through the groups of a pattern, by its repetitions. Each of these three multiplies the ways in which a module's
path may be tried."""


class StoredMatrix(NamedTuple):
    """A matrix in the file: its safetensors dtype, a key of ITEM_BYTES, its shape and bytes."""

    dtype: str
    rows: int
    columns: int
    content: memoryview


class AdaptedModule(NamedTuple):
    """One linear layer's addition to its outputs: `scale` x `a`^T `b`^T, a [rank, inputs], b [outputs, rank]."""

    a: StoredMatrix
    b: StoredMatrix
    scale: float

    @property
    def rank(self) -> int:
        return self.a.rows


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What adapter_config.json says of the computation. Patterns are regular expressions for the end of a module's
    path; the first that matches decides, as in PEFT."""

    rank: int
    alpha: float
    rank_stabilized: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    def rank_of(self, module: str) -> int:
        return next((rank for pattern, rank in self.rank_pattern.items() if _ends_as(module, pattern)), self.rank)

    def scale_of(self, module: str) -> float:
        """alpha / rank, or with rsLoRA (arXiv 2312.03732) alpha / sqrt(rank)."""
        alphas = self.alpha_pattern.items()
        alpha = next((alpha for pattern, alpha in alphas if _ends_as(module, pattern)), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter that was read."""

    directory: Path
    digest: str
    """SHA-256 of both files, hexadecimal."""
    modules: Mapping[str, AdaptedModule]
    """By the path of the linear layer in the base model."""

    @property
    def rank(self) -> int:
        """The largest rank of a module."""
        return max(module.rank for module in self.modules.values())

    @property
    def numbers(self) -> int:
        """How many numbers all matrices have."""
        matrices = (matrix for module in self.modules.values() for matrix in (module.a, module.b))
        return sum(matrix.rows * matrix.columns for matrix in matrices)


def read_adapter(path: str, limits: LoraConfig) -> AdapterFiles:
    """Read a directory into memory. `limits.max_bytes` bounds numbers of two bytes, and the file may have twice that.

    Raises:
        NotFound: the directory does not exist.
        InvalidArgument: the files are broken, no LoRA adapter's, or too large; the message names file and tensor.
    """
    directory = Path(path).expanduser()
    if not directory.is_dir():
        raise NotFound(f"there is no directory '{path}'", field="lora_path")
    try:
        return _read(directory, limits)
    except OSError as error:
        raise _refusal(f"{directory}: cannot be read: {error}") from error


def _read(directory: Path, limits: LoraConfig) -> AdapterFiles:
    config = read_adapter_config(directory, limits.max_rank)
    file = directory / WEIGHTS_FILE
    if not file.is_file():
        other = directory / "adapter_model.bin"
        why = f"; {other.name} is a pickle, which is not read: save it again as safetensors" if other.is_file() else ""
        raise _refusal(f"{directory}: there is no {WEIGHTS_FILE}{why}")
    refuse_lfs_pointer(file)
    content = _read_bounded(file, 2 * limits.max_bytes + _MOST_HEADER_BYTES, "that max_lora_bytes allows")
    digest = sha256(read_regular(directory / CONFIG_FILE, _MOST_CONFIG_BYTES))
    digest.update(content)
    modules = _modules(file, config, dict(_read_tensors(file, content)))
    return AdapterFiles(directory, digest.hexdigest(), modules)


def read_adapter_config(directory: Path, max_rank: int) -> AdapterConfig:
    """Read and check adapter_config.json. Raises as `read_adapter`."""
    file = directory / CONFIG_FILE
    if not file.is_file():
        raise _refusal(f"{directory}: there is no {CONFIG_FILE}")
    _read_bounded(file, _MOST_CONFIG_BYTES, "of any config")
    fields = read_json(file)
    if fields.get("peft_type") != "LORA":
        raise _refusal(f"{file}: peft_type is {fields.get('peft_type')!r}; only LORA is supported")
    if fields.get("use_dora"):
        raise _refusal(f"{file}: use_dora: DoRA is not supported")
    if fields.get("bias", "none") != "none":
        raise _refusal(f"{file}: bias is {fields['bias']!r}: trained biases are not supported")
    for name, value in fields.items():
        if value and name not in _HARMLESS:
            raise _refusal(f"{file}: {name} is set, which is not supported")
    init = str(fields.get("init_lora_weights", True)).lower()
    if init.startswith(_CHANGE_THE_BASE):
        how = "save it with path_initial_model_for_weight_conversion"
        raise _refusal(f"{file}: init_lora_weights {init!r} changes the base model's weights: {how}")
    ranks = _numbers(fields, "rank_pattern", file)
    for name, rank in {"r": fields.get("r"), **{f"rank_pattern {key!r}": rank for key, rank in ranks.items()}}.items():
        if type(rank) is not int or not 1 <= rank <= max_rank:
            raise _refusal(f"{file}: {name} must be a whole number from 1 to max_lora_rank {max_rank}, got {rank!r}")
    alpha = fields.get("lora_alpha")
    if not _is_number(alpha):
        raise _refusal(f"{file}: lora_alpha must be a number, got {shorten(repr(alpha))}")
    alphas = _numbers(fields, "alpha_pattern", file)
    stabilized = bool(fields.get("use_rslora"))
    return AdapterConfig(fields["r"], float(alpha), stabilized, {key: int(rank) for key, rank in ranks.items()}, alphas)


def _numbers(fields: Mapping[str, Any], name: str, file: Path) -> dict[str, float]:
    """A field with a number for each pattern. Patterns are matched against every module, so they must be fast."""
    numbers = fields.get(name) or {}
    if not isinstance(numbers, dict) or len(numbers) > _MOST_PATTERNS:
        raise _refusal(f"{file}: {name} must be an object of at most {_MOST_PATTERNS} numbers")
    for pattern, value in numbers.items():
        if not _is_number(value):
            raise _refusal(f"{file}: {name} {pattern!r} must be a number, got {shorten(repr(value))}")
        if not _is_fast(pattern):
            raise _refusal(f"{file}: {name} {pattern!r} is not a pattern that is supported: names, and parts of them")
        try:
            re.compile(pattern)
        except re.error as error:
            raise _refusal(f"{file}: {name} {pattern!r}: {error}") from error
    return numbers


def _is_fast(pattern: str) -> bool:
    if len(pattern) > _MOST_PATTERN_LETTERS or not _PATTERN.fullmatch(pattern):
        return False
    repeats = len(_REPEATED.findall(_WHOLE_NUMBER.sub("", pattern)))
    groups = pattern.split("(")[1:]
    if repeats > _MOST_REPEATS or len(groups) > _MOST_GROUPS:
        return False
    choices = math.prod(1 + group.count("|") for group in groups)  # with what follows a group, so at least its own
    return choices <= _MOST_CHOICES[repeats]


def _is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a number that fits into float32."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MOST_REAL


def _ends_as(module: str, pattern: str) -> bool:
    return re.match(rf"(.*\.)?({pattern})$", module) is not None


def _read_bounded(file: Path, most: int, limit: str) -> memoryview:
    """The file's bytes, which are read and not mapped, so that later writes change nothing that was checked. The memory
    is not zeroed, for which a step that needs Python's lock would wait."""
    with open_regular(file) as opened:
        size = os.fstat(opened.fileno()).st_size
        if size > most:
            raise _refusal(f"{file}: {size} bytes, more than the {most} {limit}")
        content = np.empty(size, np.uint8).data
        if opened.readinto(content) != size:
            raise _refusal(f"{file}: truncated while it was read")
    return content


def _read_tensors(file: Path, content: memoryview) -> Iterator[tuple[str, StoredMatrix]]:
    """The file's tensors by name. The format is https://github.com/huggingface/safetensors."""
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(_MOST_HEADER_BYTES, len(content) - 8):
        raise _refusal(f"{file}: truncated, or not a safetensors file")
    try:
        header = json.loads(bytes(content[8 : 8 + length]))
    except (ValueError, RecursionError) as error:
        raise _refusal(f"{file}: its header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise _refusal(f"{file}: its header is no JSON object")
    data = content[8 + length :]
    for name, entry in header.items():
        if name != "__metadata__":
            yield name, _stored_matrix(f"{file}: tensor {name}", entry, data)


def _stored_matrix(where: str, entry: Any, data: memoryview) -> StoredMatrix:
    match entry:
        case {"dtype": str(dtype), "shape": [int(rows), int(columns)], "data_offsets": [int(begin), int(end)]}:
            if dtype not in ITEM_BYTES:
                raise _refusal(f"{where} has dtype {dtype}, which is not supported ({', '.join(ITEM_BYTES)} are)")
            if rows < 1 or columns < 1 or not 0 <= begin <= end <= len(data):
                raise _refusal(f"{where} lies outside of the file, or is empty: is the file truncated?")
            if end - begin != rows * columns * ITEM_BYTES[dtype]:
                raise _refusal(f"{where} has {end - begin} bytes, not those of [{rows}, {columns}] in {dtype}")
            return StoredMatrix(dtype, rows, columns, data[begin:end])
        case {"shape": list(shape)}:
            raise _refusal(f"{where} has shape {shape}; only matrices are supported")
    raise _refusal(f"{where} is not described as safetensors does")


def _modules(file: Path, config: AdapterConfig, tensors: Mapping[str, StoredMatrix]) -> dict[str, AdaptedModule]:
    sides: dict[str, dict[str, StoredMatrix]] = {}
    for name, matrix in tensors.items():
        match = _MATRIX.fullmatch(name.removeprefix(_PREFIX)) if name.startswith(_PREFIX) else None
        if match is None:
            raise _refusal(f"{file}: tensor {name} is {_kind(name)}, which is not supported")
        if len(match["module"]) > _MOST_MODULE_LETTERS:
            raise _refusal(f"{file}: a module's path has more than {_MOST_MODULE_LETTERS} letters")
        sides.setdefault(match["module"], {})[match["side"]] = matrix
    if not sides:
        raise _refusal(f"{file}: there is no lora_A and lora_B in it")
    return {module: _pair(file, config, module, pair) for module, pair in sides.items()}


def _pair(file: Path, config: AdapterConfig, module: str, sides: Mapping[str, StoredMatrix]) -> AdaptedModule:
    if len(sides) < 2:
        raise _refusal(f"{file}: {_PREFIX}{module} has lora_{next(iter(sides))} alone: lora_A and lora_B are a pair")
    a, b = sides["A"], sides["B"]
    rank = config.rank_of(module)
    if a.rows != rank or b.columns != rank:
        shapes = f"[{a.rows}, {a.columns}] and [{b.rows}, {b.columns}]"
        raise _refusal(f"{file}: {_PREFIX}{module}: lora_A and lora_B have shapes {shapes}, and the rank is {rank}")
    return AdaptedModule(a, b, config.scale_of(module))


def _kind(name: str) -> str:
    """What a tensor other than lora_A and lora_B of a linear layer is, for people."""
    if "lora_magnitude_vector" in name:
        return "DoRA's"
    if "lora_embedding_" in name:
        return "an embedding's"
    return "a module that was saved whole (modules_to_save), or none that PEFT's LoRA has"


def _refusal(message: str) -> InvalidArgument:
    return InvalidArgument(message, field="lora_path")
