"""Attention over paged keys and values in C (`attention.h` says how they lie), with the structures that C reads.

The reference is `ReferenceAttention`. Shapes are not checked: the attention backend knows them.
"""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..step_batch import StepBatch
from . import library
from .library import struct_fields

TILE_TOKENS, MAX_QUERY_FLOATS, MAX_HEAD_DIM = 16, 16384, 576
"""Limits of the kernels, as in attention.h."""

INT8_CODE = 2
"""C's number for a cache in int8; `library.DTYPE_CODES` has the others."""

_PIECE_BYTES = 32
"""The size of `struct piece`."""


class AttentionParams(ctypes.Structure):
    """`struct attention_params`: how layers of one kind attend."""

    _fields_ = struct_fields(
        "l heads kv_heads head_dim block_size window kind stored latent spans block_bytes distances", "f scale cap"
    )

    @property
    def tile_bytes(self) -> int:
        """Bytes of the keys and values of TILE_TOKENS tokens and one head, or of their latents."""
        scales = 2 * TILE_TOKENS * 4 if self.stored == INT8_CODE else 0
        numbers = int(self.head_dim) * (1 if self.latent else 2)
        return TILE_TOKENS * numbers * (4, 2, 1)[self.stored] + scales

    @property
    def value_size(self) -> int:
        """Numbers of what each query head gets."""
        return int(self.latent or self.head_dim)


class StepStruct(ctypes.Structure):
    """`struct step`: the rows of one step and their blocks, `StepBatch.c_fields`."""

    _fields_ = struct_fields("l rows width group_width", "p lines starts counts angles ends firsts tables")


class _PlanStruct(ctypes.Structure):
    _fields_ = struct_fields("l writes works folds scratch cost", "p to_write to_work to_fold")


class _CallStruct(ctypes.Structure):
    _fields_ = struct_fields(
        "p queries keys values",
        "l query_stride key_stride value_stride",
        "p cos_sin sinks cache out",
        "l rotary_dim group",
    )


class LayerCaches:
    """The cache of each layer with its parameters, as C reads them: `params` are the different ones, `params_of_layer`
    the index among them by layer, `caches` the address by layer, `groups` that of each layer, by which its blocks are
    found."""

    def __init__(
        self,
        params: Sequence[AttentionParams],
        params_of_layer: Sequence[int],
        caches: Sequence[int],
        groups: Sequence[int],
    ) -> None:
        self.params = params
        self.params_of_layer = params_of_layer
        self.caches = caches
        self.groups = groups
        columns = ([ctypes.addressof(struct) for struct in params], params_of_layer, caches, groups)
        self._columns = [np.array(column, np.int64) for column in columns]
        self.c_fields = [len(params), *(column.ctypes.data for column in self._columns)]
        """The number of `params`, and the addresses of the four arrays, valid as long as this object lives."""


class PlannedAttention:
    """One step's attention for layers with equal `params`, divided into pieces of work once for all of them."""

    def __init__(self, params: AttentionParams, batch: StepBatch, dtype: torch.dtype) -> None:
        self._params = params
        self._batch = batch
        self._step = StepStruct(*batch.c_fields)
        self._plan, self._call = _PlanStruct(), _CallStruct()
        self._plan_pieces(64 + batch.size * params.kv_heads)
        self._scratch = torch.empty(self._plan.scratch)
        self._out = torch.empty((batch.size, params.heads * params.value_size), dtype=dtype)
        self._call.out = self._out.data_ptr()
        self._query_bytes = params.heads * params.head_dim * dtype.itemsize
        self._key_bytes = params.kv_heads * params.head_dim * dtype.itemsize
        structs = (ctypes.addressof(struct) for struct in (params, self._step, self._plan, self._call))
        self._addresses = (*structs, self._scratch.data_ptr())
        self._attend = library.bind_function("charonia_attention")

    def attend_packed(
        self, cache: int, group: int, packed: Tensor, cos_sin: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Rotates queries and keys of `packed` [N, heads + 2 kv_heads, head_dim], writes keys and values into the
        blocks of `group` in the layer's cache at address `cache`, and attends; of queries alone, [N, heads, head_dim],
        writes nothing. Returns [N, heads * head_dim], until the next call. `cos_sin`: float32 [positions, 2, n / 2],
        contiguous, for heads' first n numbers."""
        call, at = self._call, packed.data_ptr()
        call.queries = at
        call.keys = at + self._query_bytes
        call.values = at + self._query_bytes + self._key_bytes
        if packed.shape[1] == self._params.heads:
            call.keys = call.values = None
        call.query_stride = call.key_stride = call.value_stride = packed.stride(0)
        call.cos_sin, call.rotary_dim = cos_sin.data_ptr(), 2 * cos_sin.shape[-1]
        call.sinks = None if sinks is None else sinks.data_ptr()
        call.cache, call.group = cache, group
        self._attend(*self._addresses)
        return self._out

    def attend_separate(
        self, cache: int, group: int, q: Tensor, stored: Sequence[Tensor], sinks: Tensor | None
    ) -> Tensor:
        """The same for rotated q [N, heads, head_dim] and what is to be stored, if anything: keys and values, each
        [N, kv_heads, head_dim], the heads of a token contiguous, or keys [N, 1, head_dim] that have the values in
        them. `sinks` float32 [heads] or none. The result, [N, heads * value_size], is the caller's."""
        call = self._call
        call.queries, call.query_stride = q.data_ptr(), q.stride(0)
        call.keys = call.values = None
        call.sinks = None if sinks is None else sinks.data_ptr()
        self._take(cache, group, stored)
        self._attend(*self._addresses)
        return self._out.clone()

    def store(self, cache: int, group: int, stored: Sequence[Tensor]) -> None:
        """Stores keys and values of that kind, and attends to nothing, from now on."""
        self._plan.works = self._plan.folds = 0
        self._take(cache, group, stored)
        self._attend(*self._addresses)

    def _take(self, cache: int, group: int, stored: Sequence[Tensor]) -> None:
        call = self._call
        if stored:
            call.keys, call.key_stride = stored[0].data_ptr(), stored[0].stride(0)
            call.values, call.value_stride = stored[-1].data_ptr(), stored[-1].stride(0)
        call.cos_sin = None
        call.cache, call.group = cache, group

    def _plan_pieces(self, capacity: int) -> None:
        """Plan with arrays of `capacity` pieces, or of as many as C asks for."""
        self._pieces = np.empty((3, capacity * _PIECE_BYTES), np.uint8)
        at, size = self._pieces.ctypes.data, capacity * _PIECE_BYTES
        self._plan.to_write = at
        self._plan.to_work = at + size
        self._plan.to_fold = at + 2 * size
        structs = (ctypes.addressof(struct) for struct in (self._params, self._step, self._plan))
        needed = library.bind_function("charonia_attention_plan")(*structs, capacity)
        if needed > capacity:
            self._plan_pieces(needed)
