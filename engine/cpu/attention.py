"""Attention over paged keys and values in C (`attention.h` says how they lie): what it takes, as C has it.

The reference is `attention/reference.py`. Nothing is checked here: the backend knows its shapes.
"""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..step_batch import StepBatch
from . import library

TILE_TOKENS, MAX_QUERY_FLOATS, MAX_HEAD_DIM = 16, 16384, 512
"""As in attention.h."""

INT8_CODE = 2
"""The number by which C knows a cache in int8; library.DTYPES has the others."""


class AttentionParams(ctypes.Structure):
    """`struct manner`: how layers of one kind attend."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "head_dim", "block_size", "window")),
        *((name, ctypes.c_int64) for name in ("kind", "stored")),
        *((name, ctypes.c_float) for name in ("scale", "cap")),
    ]

    @property
    def tile_bytes(self) -> int:
        """Bytes of the keys and values of TILE tokens and one head."""
        scales = 2 * TILE_TOKENS * 4 if self.stored == INT8_CODE else 0
        return 2 * TILE_TOKENS * int(self.head_dim) * (4, 2, 1)[self.stored] + scales


class StepStruct(ctypes.Structure):
    """`struct step`."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "width")),
        *((name, ctypes.c_void_p) for name in ("lines", "starts", "counts", "firsts", "tables")),
    ]


class _PlanStruct(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("writes", "works", "folds", "scratch", "cost")),
        *((name, ctypes.c_void_p) for name in ("to_write", "to_work", "to_fold")),
    ]


class _CallStruct(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("queries", "keys", "values")),
        *((name, ctypes.c_int64) for name in ("query_stride", "key_stride", "value_stride")),
        *((name, ctypes.c_void_p) for name in ("turns", "sinks", "cache", "out")),
        ("turned", ctypes.c_int64),
    ]


_PIECE_BYTES = 32
"""sizeof(struct piece)"""


def fill_step_struct(batch: StepBatch, step: StepStruct) -> None:
    """Let `step` tell C of the batch, whose own numbers it reads; but not where each row's tokens begin."""
    tables = batch.block_ids
    step.rows, step.width, step.tables = len(batch.rows), tables.stride(0), tables.data_ptr()
    step.lines, step.starts, step.counts = (each.ctypes.data for each in (batch.rows, batch.starts, batch.counts))


class StepRows:
    """The rows of one step."""

    def __init__(self, batch: StepBatch) -> None:
        self._batch, self._step = batch, StepStruct()
        fill_step_struct(batch, self._step)
        self._step.firsts = batch.first_places.ctypes.data
        self.address, self.tokens = ctypes.addressof(self._step), batch.size


class LayerCaches:
    """How layers attend, and where. `manners`: the different ones; `text_model_builder`: which of them each layer has;
    `caches`: the address of each layer's."""

    def __init__(self, manners: Sequence[AttentionParams], kind_of: Sequence[int], caches: Sequence[int]) -> None:
        self.params, self.params_of_layer, self.caches = manners, kind_of, caches
        columns = ([ctypes.addressof(manner) for manner in manners], kind_of, caches)
        self._columns = [np.array(column, np.int64) for column in columns]
        self.c_fields = [len(manners), *(column.ctypes.data for column in self._columns)]
        """How many manners; where theirs, the kinds and the caches' addresses stand, as long as this lives."""


class PlannedAttention:
    """A step divided into pieces for layers of one manner."""

    def __init__(self, manner: AttentionParams, step: StepRows, dtype: torch.dtype) -> None:
        self._manner, self.step = manner, step
        self._plan, self._call = _PlanStruct(), _CallStruct()
        self._plan_pieces(64 + step.tokens * manner.kv_heads)
        self._scratch = torch.empty(self._plan.scratch)
        self._out = torch.empty((step.tokens, manner.heads * manner.head_dim), dtype=dtype)
        self._call.out = self._out.data_ptr()
        self._heads = manner.heads * manner.head_dim * dtype.itemsize
        self._kv_heads = manner.kv_heads * manner.head_dim * dtype.itemsize
        parts = (ctypes.addressof(each) for each in (self._plan, self._call))
        self._addresses = (ctypes.addressof(manner), step.address, *parts, self._scratch.data_ptr())
        self._attend = library.bind_function("charonia_attention")

    def attend_packed(self, cache: int, packed: Tensor, turns: Tensor) -> Tensor:
        """Turn queries and keys of `packed` [N, heads + 2 kv_heads, head_dim], write keys and values into the layer's
        cache at address `cache`, and attend: [N, heads * head_dim], overwritten by the next call.

        `turns` are cosines and sines of every position, float32 [positions, 2, n / 2]: the first n numbers of each head
        are turned. Both are contiguous."""
        call, at = self._call, packed.data_ptr()
        call.queries, call.keys, call.values = at, at + self._heads, at + self._heads + self._kv_heads
        call.query_stride = call.key_stride = call.value_stride = packed.stride(0)
        call.turns, call.turned, call.sinks, call.cache = turns.data_ptr(), 2 * turns.shape[-1], None, cache
        self._attend(*self._addresses)
        return self._out

    def attend_separate(self, cache: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """The same for q [N, heads, head_dim], k and v [N, kv_heads, head_dim] that were turned, with the heads of a
        token side by side in memory; `sinks` float32 [heads] or none. The result is the caller's."""
        call = self._call
        call.queries, call.keys, call.values = q.data_ptr(), k.data_ptr(), v.data_ptr()
        call.query_stride, call.key_stride, call.value_stride = q.stride(0), k.stride(0), v.stride(0)
        call.turns, call.sinks, call.cache = None, None if sinks is None else sinks.data_ptr(), cache
        self._attend(*self._addresses)
        return self._out.clone()

    def _plan_pieces(self, room: int) -> None:
        self._pieces = np.empty((3, room * _PIECE_BYTES), np.uint8)
        at, size = self._pieces.ctypes.data, room * _PIECE_BYTES
        self._plan.to_write, self._plan.to_work, self._plan.to_fold = at, at + size, at + 2 * size
        plan = library.bind_function("charonia_attention_plan")
        taken = plan(ctypes.addressof(self._manner), self.step.address, ctypes.addressof(self._plan), room)
        if taken > room:
            self._plan_pieces(taken)
