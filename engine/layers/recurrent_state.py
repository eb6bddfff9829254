"""The states that layers keep in place of a cache of tokens, a convolution's last inputs and matrices: where they lie,
and how a step's rows find theirs.

A row's state lies in the slot of its number; a snapshot, a copy of all layers' states after an exact number of tokens,
in a slot behind those.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...scheduler.plan import NO_STATE_RESTORES, NO_STATE_SAVES, IntArray, NewSequence
from ..checkpoint.recurrence import LayerState
from ..cpu.recurrent import LayerStates, StepSlots
from ..gpu.state_rows import StateMoves, StateRows, place_states
from ..step_batch import StepBatch, to_device
from ..step_states import StepStates


class LayerSlots(NamedTuple):
    """The states of one layer, a slot each, as `cpu/recurrent.py` has them. What is in a slot means nothing before its
    row has begun."""

    windows: Tensor
    """[slots, window, channels] in the model's dtype: the convolution's last inputs, the oldest first."""
    matrices: Tensor
    """[slots, heads, rows, columns] in float32; of a layer without matrices all sizes but the first are 0."""


class StateSlots:
    """A rank's states of all rows and snapshots."""

    def __init__(
        self, states: Sequence[LayerState | None], rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`states`: of this rank's layers in order; None: the layer keeps none."""
        self._states = [state for state in states if state is not None]
        self._rows = rows
        self._dtype = dtype
        self._device = device
        self.layers: list[LayerSlots] = []
        """The slots of the layers that keep a state."""
        self._addresses = LayerStates([], [])

    @property
    def slot_bytes(self) -> int:
        """Bytes of one sequence, over all layers."""
        return sum(state.bytes(self._dtype.itemsize) for state in self._states)

    @property
    def snapshots(self) -> list[Tensor]:
        """All tensors of the layers' snapshots, without the rows' states: [snapshots, ...]."""
        return [tensor[self._rows :] for layer in self.layers for tensor in layer if tensor[0].numel()]

    def allocate(self, snapshots: int) -> None:
        """Make slots for the rows and so many snapshots; earlier ones are dropped."""
        self.free()  # first, or else both would have to fit
        slots = self._rows + snapshots
        self.layers = [self._allocate_layer(slots, state) for state in self._states]
        self._addresses = LayerStates(*([getattr(layer, name) for layer in self.layers] for name in LayerSlots._fields))

    def free(self) -> None:
        """Drop all slots."""
        self.layers = []
        self._addresses = LayerStates([], [])

    def _allocate_layer(self, slots: int, state: LayerState) -> LayerSlots:
        windows = torch.zeros((slots, state.window, state.channels), dtype=self._dtype, device=self._device)
        matrices = torch.zeros((slots, state.heads, state.rows, state.columns), device=self._device)
        return LayerSlots(windows, matrices)

    def recorded_step(self, batch: StepBatch, moves: StateMoves) -> "StepSlotStates":
        """The states of a step that is recorded, for kernels of a GPU, which find them by `moves`."""
        states = StepSlotStates(self.layers, batch, StepStates(()), self._addresses)
        states.on_device = place_states(batch, states.states, moves)
        return states

    def begin_step(
        self,
        batch: StepBatch,
        new: Iterable[NewSequence] = (),
        saves: IntArray = NO_STATE_SAVES,
        restores: IntArray = NO_STATE_RESTORES,
    ) -> "StepSlotStates":
        """The states of a step's rows. Those that begin at position 0 begin as nothing, those of `new` sequences as
        their snapshots are. `saves` and `restores`: as of `StepPlan.state_saves` and `.state_restores`.

        Raises:
            ValueError: tokens of a new sequence are computed, but no snapshot says what state they left, or no token of
                it is in this step.
        """
        sources = np.where(batch.starts == 0, -1, batch.rows)
        resumed = [sequence for sequence in new if sequence.computed]
        if not resumed and not len(saves) and not len(restores):
            return StepSlotStates(self.layers, batch, StepStates(sources), self._addresses)
        index_of = {row: index for index, row in enumerate(batch.rows.tolist())}
        for sequence in resumed:
            if sequence.state < 0 or sequence.row not in index_of:
                raise ValueError(f"row {sequence.row} begins after tokens whose state is not kept")
            sources[index_of[sequence.row]] = self._rows + sequence.state
        for row, snapshot in restores.tolist():
            sources[index_of[row]] = self._rows + snapshot
        indices = np.array([index_of[row] for row in saves[:, 0].tolist()], np.int64)
        kept = np.stack((indices, saves[:, 1] - batch.starts[indices], saves[:, 2] + self._rows), 1)
        return StepSlotStates(self.layers, batch, StepStates(sources, kept), self._addresses)


class ConvolutionPlaces(NamedTuple):
    """Where a step's tokens and windows lie when each row's window stands before its tokens, int64 on the device."""

    tokens: Tensor
    """[N] of each token."""
    before: Tensor
    """[R, window] of the inputs that were kept."""
    after: Tensor
    """[R, window] of those that are to be kept."""
    saved: Tensor
    """[V, window] of those in snapshots."""


class StepSlotStates:
    """The states of one step's rows in their slots; layers share what is the same for all of them. C reads `kernel`,
    Triton's kernels `on_device`, torch all else."""

    def __init__(
        self, layers: Sequence[LayerSlots], batch: StepBatch, states: StepStates, addresses: LayerStates
    ) -> None:
        self.layers = layers
        self._batch = batch
        self.states = states
        self._addresses = addresses
        self._device = batch.token_ids.device
        self._places: dict[int, ConvolutionPlaces] = {}

    @cached_property
    def kernel(self) -> StepSlots:
        return StepSlots(self._batch, self.states, self._addresses)

    @cached_property
    def on_device(self) -> StateRows:
        return place_states(self._batch, self.states)

    def places(self, window: int) -> ConvolutionPlaces:
        """The places for a convolution that keeps `window` inputs."""
        if window not in self._places:
            counts = self._batch.counts
            rows = np.arange(len(counts))
            begins = self._batch.first_places + window * rows
            kept = np.arange(window)
            tokens = np.arange(int(counts.sum())) + window * np.repeat(rows + 1, counts)
            index, offset, _ = self.states.saves.T
            columns = tokens, *(first[:, None] + kept for first in (begins, begins + counts, begins[index] + offset))
            self._places[window] = ConvolutionPlaces(*(self._to(column) for column in columns))
        return self._places[window]

    def read(self, slots: Tensor) -> Tensor:
        """The states [R, ...] that rows begin with, of a layer's [slots, ...]."""
        state = slots[self._sources]
        if (self.states.sources < 0).any():
            state[self._fresh] = 0
        return state

    def write(self, slots: Tensor, state: Tensor, saved: Tensor | None = None) -> None:
        """Keep the states [R, ...] of rows, and of snapshots [V, ...] those `saved`."""
        slots[self._rows] = state
        if saved is not None and len(saved):
            slots[self._saved] = saved

    def saves_of(self, index: int) -> dict[int, list[int]]:
        """Where the state of the row with that index in the step goes on the way: slots by tokens of this step."""
        slots: dict[int, list[int]] = {}
        for row, offset, slot in self.states.saves.tolist():
            if row == index:
                slots.setdefault(offset, []).append(slot)
        return slots

    def scan(self, matrices: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Go through the rows token by token, all rows side by side: yields the places int64 [n] of their next tokens,
        and their matrices, which the caller changes in place before it goes on. Slots and snapshots are written."""
        counts = self._batch.counts
        order = np.argsort(-counts, kind="stable")  # the longest first: those with more tokens stand together
        rank = np.argsort(order)
        saves: dict[int, list[tuple[int, int]]] = {}
        for index, offset, slot in self.states.saves.tolist():
            saves.setdefault(offset, []).append((int(rank[index]), slot))
        state = self.read(matrices)[self._to(order)]
        first_places = self._batch.first_places[order]
        for offset in range(int(counts.max())):
            active = int((counts > offset).sum())
            yield self._to(first_places[:active] + offset), state[:active]
            for index, slot in saves.get(offset + 1, ()):
                matrices[slot] = state[index]
        self.write(matrices, state[self._to(rank)])

    @cached_property
    def _rows(self) -> Tensor:
        return self._to(self._batch.rows)

    @cached_property
    def _sources(self) -> Tensor:
        return self._to(self.states.sources.clip(0))

    @cached_property
    def _fresh(self) -> Tensor:
        return self._to(np.flatnonzero(self.states.sources < 0))

    @cached_property
    def _saved(self) -> Tensor:
        return self._to(self.states.saves[:, 2])

    def _to(self, column: NDArray[np.signedinteger]) -> Tensor:
        return to_device(column.astype(np.int64), self._device)
