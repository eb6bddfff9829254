"""One step's tokens and how its next tokens are chosen: the types that kernels, attention, models and worker share."""

from collections.abc import Sequence
from copy import copy
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias, get_type_hints

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ..core.resolved_sampling import ResolvedSampling
from ..scheduler.plan import IntArray, LongArray

SAMPLING_COLUMNS: dict[str, type] = {
    name: {float: np.float32, int: np.int64}[kind]
    for name, kind in get_type_hints(ResolvedSampling).items()
    if kind in (float, int)
}
"""The numbers of `ResolvedSampling` that a sampler reads, in their order: its fields that are a plain float or int."""

SAMPLING_DTYPE = np.dtype([*SAMPLING_COLUMNS.items(), ("position", np.int64)], align=True)
"""One row's `ResolvedSampling`, the seed as a signed number, and the position of the token to be chosen. C reads the
same as `struct choice` of sample.h, which is compared when the library is opened. Aligned, because torch takes no
column whose stride is not a multiple of its elements."""

SamplingArray: TypeAlias = NDArray[np.void]
"""How S rows choose their next token: an array [S] of SAMPLING_DTYPE, on the host."""


def as_signed64(value: int) -> int:
    """`value` mod 2**64 as the int64 with the same bits: a seed in a SamplingArray."""
    return ((value + 2**63) % 2**64) - 2**63


class SampledTokens(NamedTuple):
    """Tokens that a decoder chooses by itself, from the logits as they are."""

    tokens: IntArray
    """int32 [S], which the decoder writes."""
    sampling: SamplingArray | None = None
    """[S] how each is chosen; None: the likeliest ones."""
    selected: LongArray | None = None
    """[S] which of the places with logits each is chosen at, ascending; None: all of them."""
    mask_of: LongArray | None = None
    """[S] which of the masks, which come while the step is computed, says what each may be, -1 for none; logits with a
    mask are changed. None: no token has one."""


class DeviceBatch(NamedTuple):
    """A step as kernels read it: int32 [R] on the device, the block table of `StepBatch`, and on the host the number of
    places N. A padded row has count 0, and places that belong to no row follow all others: both must touch nothing."""

    rows: Tensor
    starts: Tensor
    counts: Tensor
    first_places: Tensor
    block_ids: Tensor
    size: int
    shifts: Tensor | None = None
    """The shifts of `StepPositions`; None: it has none."""
    ends: Tensor | None = None
    """In the same way."""
    prompts: bool = False
    """Whether rows of a recorded step may be parts of prompts, and have more places than the host's bounds say."""


class EmbeddedPlaces(NamedTuple):
    """The packed `places` int64 [M] of a step, ascending, whose input is not their token's embedding but one of `rows`
    [M, hidden]. `stacked` [layers, M, hidden]: what the first layers add at the places to what they give."""

    places: Tensor
    rows: Tensor
    stacked: Tensor | None = None

    def fill(self, x: Tensor) -> Tensor:
        """x [N, hidden] with the rows in their places, changed where it is."""
        return x.index_copy_(0, self.places, self.rows.to(x.dtype))

    def add_stacked(self, x: Tensor, layer: int) -> None:
        """Add to x [N, hidden], where it is, what `layer` adds."""
        if self.stacked is not None and layer < len(self.stacked):
            x.index_add_(0, self.places, self.stacked[layer].to(x.dtype))

    def to(self, dtype: torch.dtype) -> "EmbeddedPlaces":
        if self.rows.dtype == dtype:
            return self
        stacked = None if self.stacked is None else self.stacked.to(dtype)
        return self._replace(rows=self.rows.to(dtype), stacked=stacked)


class StepPositions(NamedTuple):
    """Where rotation and attention see a step's tokens, if some of its rows have images before or in it."""

    shifts: IntArray
    """int32 [R] what is added to the positions of a row's tokens where they are rotated."""
    grid: LongArray | None = None
    """int64 [3, N] positions by time, height and width, in place of these; None: no place of the step is of a grid."""
    ends: IntArray | None = None
    """int32 [N] the position of the first token behind each that it does not see, in layers whose attention has
    `both_ways`; None: none sees one behind itself."""


class StepBatch:
    """R rows of `counts` tokens each from position `starts` on, N in all, row after row. What is not given is derived
    when a kernel or layer reads it: on a GPU from `on_device`."""

    def __init__(
        self,
        rows: ArrayLike,
        starts: ArrayLike,
        counts: ArrayLike,
        token_ids: Tensor,
        block_ids: Tensor,
        block_size: int,
        on_device: DeviceBatch | None = None,
        groups: int = 1,
    ) -> None:
        """`rows`, `starts` and `counts`, [R], are host numbers; `rows` are lines of `token_ids` int32 [lines,
        max_tokens], and of `block_ids` int64 [lines, groups * max_blocks], group by group. `on_device`: buffers of a
        recorded step; kernels then choose their grids by `starts` and `counts` of decoding rows, as upper bounds."""
        self.rows, self.starts, self.counts = (np.ascontiguousarray(x, np.int32) for x in (rows, starts, counts))
        self.token_ids = token_ids
        self.block_ids = block_ids
        self.block_size = block_size
        self._groups = groups
        self._by_group: dict[int, StepBatch] = {}
        self.embedded: EmbeddedPlaces | None = None
        """The places that are no tokens, if there are any."""
        self.moved: StepPositions | None = None
        """Positions that are not those of tokens, if some are."""
        self._given = on_device
        self._on_host = on_device is None and token_ids.device.type == "cpu"

    @classmethod
    def from_tokens(
        cls, tokens: Tensor, starts: Sequence[int], counts: Sequence[int], blocks: Tensor, block_size: int
    ) -> "StepBatch":
        """A batch of the rows of `blocks` [R, max_blocks] and no others, for `tokens` [N]; tokens before them are 0."""
        longest = max(start + count for start, count in zip(starts, counts, strict=True))
        known = torch.zeros(len(starts), longest, dtype=torch.int32, device=tokens.device)
        batch = cls(np.arange(len(starts)), starts, counts, known, blocks, block_size)
        known[batch.owners, batch.positions] = tokens.to(torch.int32)
        return batch

    @cached_property
    def size(self) -> int:
        """The number of tokens, N; of a step that is recorded, of places."""
        return int(self.counts.sum()) if self._given is None else self._given.size

    @cached_property
    def first_places(self) -> NDArray[np.int64]:
        """[R] the packed place of each row's first token."""
        return np.cumsum(self.counts, dtype=np.int64) - self.counts

    @cached_property
    def on_device(self) -> DeviceBatch:
        """The numbers of its rows on the tables' device, by one copy that nothing waits for."""
        if self._given is not None:
            return self._given
        columns = self.rows, self.starts, self.counts, self.first_places
        moved, device = self.moved, self.token_ids.device
        shifts = () if moved is None else (moved.shifts,)
        rows, starts, counts, first_places, *others = upload_columns((*columns, *shifts), device)
        ends = None if moved is None or moved.ends is None else to_device(moved.ends, device)
        known = rows, starts, counts, first_places, self.block_ids, self.size
        return DeviceBatch(*known, others[0] if others else None, ends)

    @property
    def longest(self) -> int:
        """Tokens of the longest row after the step; of a step that is recorded, of any row that it will have."""
        return int((self.starts + self.counts).max())

    @property
    def c_fields(self) -> tuple[int, ...]:
        """The fields of `struct step` (attention.h): valid as long as this batch lives."""
        ends = None if self.moved is None else self.moved.ends
        columns = self.rows, self.starts, self.counts, self._angle_lines, ends, self.first_places
        addresses = (0 if column is None else column.ctypes.data for column in columns)
        widths = self.block_ids.stride(0), self._group_width
        return len(self.rows), *widths, *addresses, self.block_ids.data_ptr()

    @cached_property
    def _angle_lines(self) -> IntArray:
        """[R] the line of each row's first token in a table of rotations: of all positions, or, where places are of a
        grid, of the step's tokens."""
        if self.moved is None:
            return self.starts
        lines = self.starts + self.moved.shifts if self.moved.grid is None else self.first_places
        return np.ascontiguousarray(lines, np.int32)

    @property
    def _group_width(self) -> int:
        return self.block_ids.shape[1] // self._groups

    def of_group(self, group: int) -> "StepBatch":
        """The same step for layers of one group, whose blocks alone it has."""
        if self._groups == 1:
            return self
        if group not in self._by_group:
            block_ids = self.block_ids[:, group * self._group_width : (group + 1) * self._group_width]
            own = copy(self)
            own.block_ids, own._groups = block_ids, 1
            own._by_group = {}
            own.__dict__.pop("tables", None)
            own.__dict__["on_device"] = self.on_device._replace(block_ids=block_ids)
            self._by_group[group] = own
        return self._by_group[group]

    @cached_property
    def tables(self) -> Tensor:
        """Block ids [R, B], no more than the longest row needs."""
        most = -(-int((self.starts + self.counts).max()) // self.block_size)
        return gather_entries(self.block_ids[:, :most], self.rows)

    @cached_property
    def tokens(self) -> Tensor:
        """Ids int32 [N]."""
        if self._on_host:
            return gather_entries(self.token_ids, self.rows[self._owners], self._positions)
        return self.token_ids[self.on_device.rows[self.owners], self.positions]

    @cached_property
    def positions(self) -> Tensor:
        """[N] of each token in its sequence; 0 at a place that belongs to no row."""
        if self._on_host:
            return torch.from_numpy(self._positions)
        device = self.on_device
        positions = self._places + (device.starts - device.first_places)[self.owners]
        return torch.where(self._places < (device.first_places + device.counts)[-1], positions, 0)

    @cached_property
    def rotary_positions(self) -> Tensor:
        """[N] by which each token is rotated, or [3, N] by time, height and width, where places are of a grid."""
        moved = self.moved
        if moved is not None and moved.grid is not None:
            return to_device(moved.grid, self.token_ids.device)
        if self._on_host:
            return self.positions if moved is None else self.positions + torch.from_numpy(moved.shifts)[self.owners]
        shifts = self.on_device.shifts
        return self.positions if shifts is None else (self.positions + shifts[self.owners]).clamp_(min=0)

    @cached_property
    def owners(self) -> Tensor:
        """[N] each token's index among the rows; any at a place that belongs to no row."""
        if self._on_host:
            return torch.from_numpy(self._owners)
        ends = (self.on_device.first_places + self.on_device.counts).long()
        return torch.searchsorted(ends, self._places, right=True).clamp_(max=len(ends) - 1)

    def slots(self) -> Tensor:
        """[N] the cache slot of each token's keys and values: block id * block size + offset."""
        block = torch.div(self.positions, self.block_size, rounding_mode="floor")
        if self._on_host:
            blocks = self.tables[self.owners, block]
        else:
            blocks = self.block_ids[self.on_device.rows[self.owners], block]
        return blocks * self.block_size + self.positions % self.block_size

    @cached_property
    def _owners(self) -> NDArray[np.int64]:
        return np.repeat(np.arange(len(self.rows)), self.counts)

    @cached_property
    def _positions(self) -> NDArray[np.int64]:
        return np.arange(len(self._owners)) + np.repeat(self.starts - self.first_places, self.counts)

    @cached_property
    def _places(self) -> Tensor:
        return torch.arange(self.size, device=self.token_ids.device)


def gather_entries(table: Tensor, *at: NDArray[np.signedinteger[Any]]) -> Tensor:
    """table[at]; on the CPU by numpy, which begins sooner than torch."""
    if table.device.type == "cpu":
        return torch.from_numpy(table.numpy()[at])
    return table[tuple(to_device(column, table.device) for column in at)]


def to_device(column: NDArray[Any], device: torch.device) -> Tensor:
    """The column on the device; the host waits for no copy. The pinned memory that a copy reads is torch's, which gives
    it to nobody else before the copy is done."""
    tensor = torch.from_numpy(np.ascontiguousarray(column))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


_ALIGNED = 4
"""int32 numbers in the 16 bytes by which Triton distinguishes pointers: others would compile a kernel again."""


def upload_columns(columns: Sequence[NDArray[np.signedinteger[Any]]], device: torch.device) -> tuple[Tensor, ...]:
    """The columns, each [R], as int32 on the device: one copy for all, as `to_device` copies."""
    length = len(columns[0])
    packed = np.zeros((len(columns), -(-length // _ALIGNED) * _ALIGNED), np.int32)
    packed[:, :length] = columns
    return to_device(packed, device)[:, :length].unbind()


class HostCopy:
    """A copy of a device's tensor on its way to the host. It is begun behind the work that computes the tensor, and
    waited for when it is read; work that is queued later is not."""

    def __init__(self, tensor: Tensor) -> None:
        self._done: torch.cuda.Event | None = None
        if tensor.device.type == "cpu":
            self._host = tensor
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record()

    def read(self) -> NDArray[Any]:
        if self._done is not None:
            self._done.synchronize()
        return self._host.numpy()


def end_ranges(lasts: LongArray | IntArray, lengths: LongArray | IntArray) -> LongArray:
    """The numbers up to and with each of `lasts`, `lengths` of them, one range after the other."""
    ranges: LongArray = np.repeat(lasts + 1 - np.cumsum(lengths), lengths) + np.arange(int(lengths.sum()))
    return ranges
