"""Prefix identity: a SHA-256 chain over (parent, packed tokens, extras). Knows no blocks, only their size."""

from array import array
from collections.abc import Iterable
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

HashExtras = tuple[str, ...]
"""What sets equal tokens apart: adapter, tenant, salt. They enter at the root and so mark the whole chain."""


def root_hash(extras: HashExtras) -> bytes:
    """The parent of a sequence's first block; `repr` keeps ("a", "b") apart from ("ab",)."""
    return sha256(repr(extras).encode()).digest()


def chain_hashes(parent: bytes, tokens: NDArray[np.int32] | Iterable[int], block_size: int) -> list[bytes]:
    """Hashes of the full blocks of `tokens`, which begin right after the block hashed `parent`."""
    packed = tokens.astype(np.int32).tobytes() if isinstance(tokens, np.ndarray) else array("i", tokens).tobytes()
    width = 4 * block_size
    hashes = []
    for start in range(0, len(packed) - width + 1, width):
        parent = sha256(parent + packed[start : start + width]).digest()
        hashes.append(parent)
    return hashes
