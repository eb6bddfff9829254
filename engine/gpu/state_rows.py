"""A step's rows and the slots of their states (`step_states.py`) as kernels read them. Without Triton."""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from ..step_batch import DeviceBatch, StepBatch, upload_columns
from ..step_states import StepStates
from .row_tiles import lay_recorded_tiles, lay_tiles

FEW_TOKENS = 8
"""Tokens of rows that are a tile each."""
TILE_TOKENS = 32
"""Tokens of a tile where some row has more."""


class StateMoves(NamedTuple):
    """A step's `StepStates`, int32 on the device."""

    sources: Tensor
    """[R]"""
    save_begins: Tensor
    """[R] where a row's saves begin."""
    save_ends: Tensor
    """[R] where they end."""
    save_counts: Tensor
    """[V or more] tokens of the row before a save."""
    save_slots: Tensor
    """[V or more]"""


class StateRows(NamedTuple):
    """A step's rows, the moves of their states, and tiles of their tokens. Rows of count 0 have none, and touch
    nothing."""

    batch: DeviceBatch
    moves: StateMoves
    most: int
    """The most tokens that a row may have, if they are one tile."""
    tiles: Tensor | None
    """int32 [T, row and offset] of TILE_TOKENS tokens, row -1 for nobody; None: a row's tokens are one tile."""

    @property
    def tile_tokens(self) -> int:
        return TILE_TOKENS if self.tiles is not None else 1 << (self.most - 1).bit_length()

    @property
    def num_tiles(self) -> int:
        return len(self.batch.counts if self.tiles is None else self.tiles)


def place_states(batch: StepBatch, states: StepStates, moves: StateMoves | None = None) -> StateRows:
    """The rows of a step on its device; `moves`: those in buffers of a recorded step."""
    device = batch.token_ids.device
    if moves is None:
        moves = StateMoves(*upload_columns([*states.pack(max(len(batch.rows), len(states.saves)))], device))
    there, most, tiles = batch.on_device, int(batch.counts.max()), None
    if there.prompts:
        tiles = lay_recorded_tiles(there.counts, TILE_TOKENS, there.size, there.size)
    elif most > FEW_TOKENS:
        tiles = lay_tiles(np.arange(len(batch.rows)), batch.counts, TILE_TOKENS, device)
    return StateRows(there, moves, most, tiles)
