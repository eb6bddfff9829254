"""A checkpoint told from others by what it holds, wherever its files lie and whenever they were copied."""

import os
from hashlib import sha256
from pathlib import Path

from .hf_checkpoint import open_checkpoint

_STRIDE, _SAMPLE = 1 << 20, 4096
"""Of each stride of bytes, so many are looked at: every larger tensor has a part in it."""
_SUFFIXES = {".safetensors", ".bin", ".gguf"}


def checkpoint_fingerprint(model: str) -> bytes:
    """The SHA-256 of the configuration and of samples of the weights; `model` is a directory, a file or a hub id.
    Raises as `open_checkpoint`, and `OSError`."""
    directory = open_checkpoint(model).directory
    files = [directory] if directory.is_file() else sorted(directory.iterdir())
    content = sha256()
    for file in files:
        if file.suffix in _SUFFIXES:
            _add_samples(content, file)
        elif file.name == "config.json":
            content.update(file.read_bytes())
    return content.digest()


def _add_samples(content: "sha256", file: Path) -> None:  # type: ignore[valid-type]
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        content.update(f"{file.name} {size}\n".encode())  # type: ignore[attr-defined]
        for start in range(0, size, _STRIDE):
            content.update(os.pread(descriptor, _SAMPLE, start))  # type: ignore[attr-defined]
    finally:
        os.close(descriptor)
