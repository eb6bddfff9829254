"""Opens a checkpoint's files of weights: safetensors, or what torch pickled, by its loader that runs no code."""

import re
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError
from torch import Tensor

from ...tokenization.checkpoint_files import refuse_lfs_pointer
from .hf_checkpoint import open_safetensors
from .model_spec import CheckpointError


def describe(tensor: Any) -> tuple[torch.dtype | str, tuple[int, ...]]:
    if isinstance(tensor, Tensor):
        return tensor.dtype, tuple(tensor.shape)
    return tensor.get_dtype(), tuple(tensor.get_shape())


def open_weight_file(path: Path) -> Any:
    """The tensors of a file by their names: `safe_open`'s result, or a dict."""
    try:
        refuse_lfs_pointer(path)
        return _load_torch_file(path) if path.suffix == ".bin" else open_safetensors(path, "pt")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: the file is missing") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: truncated or not a safetensors file: {error}") from error


def _load_torch_file(path: Path) -> dict[str, Tensor]:
    """The tensors of a file of `torch.save`, by torch's safe loader, which runs no code; old files are not mapped."""
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    except (UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        code = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"{code[1]} is in it" if code else str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"{path}: truncated, or no weights that torch loads safely: {reason}") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise CheckpointError(f"{path}: it must hold tensors by their names, and nothing else")
    return tensors
