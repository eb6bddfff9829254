"""Cache blocks in the host's memory, and their way from a device and back. On a GPU no step waits for the bus."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...scheduler.plan import IntArray

PIECE_BYTES = 1 << 30
"""Of host memory that is pinned at a time: torch makes a power of two of each, so that 20 GB would take 32."""


class _HostBlocks:
    """`slots` for blocks that are `like` those of a device's tensor."""

    def __init__(self, slots: int, like: Tensor, pinned: bool) -> None:
        self._piece_slots = max(PIECE_BYTES // max(like[0].nbytes, 1), 1)
        counts = [min(self._piece_slots, slots - first) for first in range(0, slots, self._piece_slots)]
        self.pieces = [torch.empty((n, *like.shape[1:]), dtype=like.dtype, pin_memory=pinned) for n in counts]

    def __getitem__(self, slot: int) -> Tensor:
        return self.pieces[slot // self._piece_slots][slot % self._piece_slots]


class HostCache:
    """`slots` of host memory for blocks of `device_blocks`, tensors that each have all blocks by their first index."""

    def __init__(self, device_blocks: Sequence[Tensor], slots: int) -> None:
        self._device_blocks = device_blocks
        device = device_blocks[0].device
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._host_blocks = [_HostBlocks(slots, blocks, on_gpu) for blocks in device_blocks]

    def copy_blocks(self, block_copies: IntArray) -> None:
        """Make the `block_copies` [V, 3] of a plan, behind what is queued on the device, or, on a CPU, at once."""
        for block, slot, back in block_copies.tolist():
            for device_blocks, host_blocks in zip(self._device_blocks, self._host_blocks, strict=True):
                if back:
                    self._bring_back(host_blocks[slot], device_blocks[block])
                else:
                    self._take_away(device_blocks[block], host_blocks[slot])

    def _take_away(self, block: Tensor, slot: Tensor) -> None:
        """Copy a block to the host: first on the device, in the order of the steps, and then by a stream of its own."""
        if self._stream is None:
            slot.copy_(block)
            return
        staged = block.clone(memory_format=torch.contiguous_format)
        self._stream.wait_stream(torch.cuda.current_stream(block.device))
        with torch.cuda.stream(self._stream):
            slot.copy_(staged, non_blocking=True)
        staged.record_stream(self._stream)

    def _bring_back(self, slot: Tensor, block: Tensor) -> None:
        """Copy a block to the device: it is on its way while the step before is computed."""
        if self._stream is None:
            block.copy_(slot)
            return
        current = torch.cuda.current_stream(block.device)
        with torch.cuda.stream(self._stream):
            staged = slot.to(block.device, non_blocking=True)
        current.wait_stream(self._stream)
        staged.record_stream(current)
        block.copy_(staged)
