"""Tiles of a step's rows: which row each is of, and where in it the tile begins. Without Triton."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..step_batch import to_device


def lay_tiles(
    rows: NDArray[np.signedinteger], lengths: NDArray[np.signedinteger], size: int, device: torch.device
) -> Tensor:
    """Tiles of `size`, int32 [T, row and first], of these rows, whose lengths the host has."""
    numbers = -(-lengths // size)
    firsts = (np.arange(numbers.sum()) - np.repeat(np.cumsum(numbers) - numbers, numbers)) * size
    return to_device(np.stack((np.repeat(rows, numbers), firsts), 1).astype(np.int32), device)


def lay_recorded_tiles(lengths: Tensor, size: int, total: int, most_rows: int) -> Tensor:
    """The same of `lengths` [R], 0 for rows without any, which the device alone has: as many as `most_rows` rows of
    `total` together may have, those for nobody with row -1."""
    numbers = torch.div(lengths + (size - 1), size, rounding_mode="floor")
    ends = numbers.cumsum(0)
    tile = torch.arange(total // size + min(len(lengths), most_rows), device=lengths.device)
    row = torch.searchsorted(ends, tile, right=True)
    own = row.clamp(max=len(lengths) - 1)
    firsts = (tile - (ends - numbers)[own]) * size
    return torch.stack((torch.where(row < len(lengths), row, -1), firsts), 1).to(torch.int32)
