"""A checkpoint told from others by what it holds, wherever its files lie and whenever they were copied."""

import os
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from .hf_checkpoint import open_checkpoint

_STRIDE, _SAMPLE = 1 << 20, 4096
"""Of each stride of bytes, so many are looked at: every larger tensor has a part in it."""
_SUFFIXES = {".safetensors", ".bin", ".gguf"}


def content_fingerprint(model: str) -> bytes:
    """The SHA-256 of the configuration and of samples of the weights; `model` is a directory, a file or a hub id.
    Raises as `open_checkpoint`, and `OSError`."""
    checkpoint = open_checkpoint(model)
    files = sorted(checkpoint.directory.iterdir()) if checkpoint.gguf is None else checkpoint.gguf.files
    content = sha256()
    for file in files:
        if file.suffix in _SUFFIXES:
            for sample in _samples(file):
                content.update(sample)
        elif file.name == "config.json":
            content.update(file.read_bytes())
    return content.digest()


def _samples(file: Path) -> Iterator[bytes]:
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        yield f"{file.name} {size}\n".encode()
        for start in range(0, size, _STRIDE):
            yield os.pread(descriptor, _SAMPLE, start)
    finally:
        os.close(descriptor)
