"""The identity of blocks: a chain of hashes over all tokens of a sequence up to a block's end."""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

HASH_BYTES = 32
"""The size of a hash, a SHA-256."""

HashExtras = tuple[str, ...]
"""Adapter, tenant, salt, and the digest of what a decoder attends to beside its tokens, which set equal tokens apart:
they enter at the root and so mark the whole chain."""


def chain_hashes(
    tokens: NDArray[np.int32] | Iterable[int], block_size: int, extras: HashExtras, parent: bytes | None
) -> list[bytes]:
    """SHA-256 hashes of the full blocks of `tokens`, which follow the block hashed `parent` or begin the sequence:
    each over its parent's hash and its own tokens."""
    parent = parent or sha256(repr(extras).encode()).digest()  # repr keeps ("a", "b") apart from ("ab",)
    packed = tokens.astype(np.int32).tobytes() if isinstance(tokens, np.ndarray) else array("i", tokens).tobytes()
    width = 4 * block_size
    hashes: list[bytes] = []
    for start in range(0, len(packed) - width + 1, width):
        parent = sha256(parent + packed[start : start + width]).digest()
        hashes.append(parent)
    return hashes


def shared_blocks(hashes: Sequence[bytes], others: Sequence[bytes]) -> int:
    """After how many blocks these chains of hashes part: a hash stands for all tokens before it, too."""
    shorter = min(len(hashes), len(others))
    return bisect_left(range(shorter), True, key=lambda block: hashes[block] != others[block])


def group_keys(hashes: Sequence[bytes], group: int) -> Sequence[bytes]:
    """The identities of the blocks that a group of layers has for the spans of these hashes."""
    return [group_key(block_hash, group) for block_hash in hashes] if group else hashes


def group_key(block_hash: bytes, group: int) -> bytes:
    """The key of one group's block. Group 0 has the hash itself."""
    return block_hash + bytes((group,)) if group else block_hash
