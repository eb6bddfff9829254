"""Attention over paged keys and values in C (`attention.h` says how they lie): what it takes, as C has it.

The reference is `attention/reference.py`. Nothing is checked here: the backend knows its shapes.
"""

import ctypes
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import library

TILE, MOST_QUERIES, MOST_HEAD = 16, 16384, 512
"""As in attention.h."""

INT8 = 2
"""The number by which C knows a cache in int8; library.DTYPES has the others."""


class Manner(ctypes.Structure):
    """`struct manner`: how layers of one kind attend."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "head_dim", "block_size", "window")),
        *((name, ctypes.c_int64) for name in ("kind", "stored")),
        *((name, ctypes.c_float) for name in ("scale", "cap")),
    ]

    @property
    def tile_bytes(self) -> int:
        """Bytes of the keys and values of TILE tokens and one head."""
        scales = 2 * TILE * 4 if self.stored == INT8 else 0
        return 2 * TILE * self.head_dim * (4, 2, 1)[self.stored] + scales


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "width")),
        *((name, ctypes.c_void_p) for name in ("starts", "counts", "firsts", "tables")),
    ]


class _Plan(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("writes", "works", "folds", "scratch", "cost")),
        *((name, ctypes.c_void_p) for name in ("to_write", "to_work", "to_fold")),
    ]


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("queries", "keys", "values")),
        *((name, ctypes.c_int64) for name in ("query_stride", "key_stride", "value_stride")),
        *((name, ctypes.c_void_p) for name in ("turns", "cache", "out")),
    ]


_PIECE_BYTES = 32
"""sizeof(struct piece)"""


class Step:
    """The rows of one step, host numbers all: `starts` and `counts` [R], `tables` [R, width] int64, contiguous."""

    def __init__(self, starts: NDArray[np.int64], counts: NDArray[np.int64], tables: Tensor) -> None:
        self._kept = starts, counts, np.cumsum(counts) - counts, tables
        addresses = [array.ctypes.data for array in self._kept[:3]]
        self._step = _Step(len(starts), tables.shape[1], *addresses, tables.data_ptr())
        self.address = ctypes.addressof(self._step)
        self.tokens = int(counts.sum())


class Inputs(NamedTuple):
    """q [N, heads, head_dim], k, v [N, kv_heads, head_dim] with heads side by side in memory; `turns` as
    elementwise.turn has them, or none."""

    q: Tensor
    k: Tensor
    v: Tensor
    turns: Tensor | None


class Planned:
    """A step divided into pieces for layers of one manner."""

    def __init__(self, manner: Manner, step: Step) -> None:
        self._manner, self._step = manner, step
        self._plan = _Plan()
        self._make(64 + step.tokens * manner.kv_heads)
        self._scratch = torch.empty(self._plan.scratch)
        self._call = _Call()
        self._addresses = (ctypes.addressof(manner), step.address, ctypes.addressof(self._plan))
        self._behind = (ctypes.addressof(self._call), self._scratch.data_ptr())
        self._attend = library.bind("charonia_attention")

    def __call__(self, cache: int, inputs: Inputs) -> Tensor:
        """Write keys and values into the layer's cache at address `cache`, and attend; [N, heads * head_dim]."""
        q, k, v, turns = inputs
        out = torch.empty((q.shape[0], q.shape[1] * q.shape[2]), dtype=q.dtype)
        call = self._call
        call.queries, call.keys, call.values = q.data_ptr(), k.data_ptr(), v.data_ptr()
        call.query_stride, call.key_stride, call.value_stride = q.stride(0), k.stride(0), v.stride(0)
        call.turns = None if turns is None else turns.data_ptr()
        call.cache, call.out = cache, out.data_ptr()
        self._attend(*self._addresses, *self._behind)
        return out

    def _make(self, room: int) -> None:
        self._pieces = np.empty((3, room * _PIECE_BYTES), np.uint8)
        at, size = self._pieces.ctypes.data, room * _PIECE_BYTES
        self._plan.to_write, self._plan.to_work, self._plan.to_fold = at, at + size, at + 2 * size
        plan = library.bind("charonia_attention_plan")
        taken = plan(ctypes.addressof(self._manner), self._step.address, ctypes.addressof(self._plan), room)
        if taken > room:
            self._make(taken)
