"""What makes room on a device, cache blocks and snapshots of states, in the host's memory, and its way there and back.
On a GPU no step waits for the bus."""

from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor

from ...kvcache.tiers.host_tier import landed_number
from ...scheduler.plan import IntArray
from .place_images import PlaceImages

PIECE_BYTES = 1 << 30
"""The most host memory that is pinned at a time, a power of two."""


class _HostTensor:
    """`slots` for what is `like` the places of a device's tensor, in pieces that just fit in a power of two of bytes:
    torch pins as much for each, so that a single one of 20 GB would take 32."""

    def __init__(self, slots: int, like: Tensor, pinned: bool) -> None:
        size = max(like[0].nbytes, 1)
        self.pieces: list[Tensor] = []
        self._firsts: list[int] = []
        """The first slot of each piece."""
        first = 0
        while first < slots:
            room = 1 << min((slots - first) * size, PIECE_BYTES).bit_length() - 1
            count = max(room // size, 1)
            self.pieces.append(torch.empty((count, *like.shape[1:]), dtype=like.dtype, pin_memory=pinned))
            self._firsts.append(first)
            first += count

    def __getitem__(self, slot: int) -> Tensor:
        piece = bisect_right(self._firsts, slot) - 1
        return self.pieces[piece][slot - self._firsts[piece]]


class HostCache:
    """`slots` of host memory for places of `device_tensors`, which all have the same ones by their first index: blocks,
    or snapshots. What comes from elsewhere comes as one of the `images`."""

    def __init__(self, device_tensors: Sequence[Tensor], slots: int) -> None:
        self._device_tensors = device_tensors
        device = device_tensors[0].device
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._host_tensors = [_HostTensor(slots, tensor, on_gpu) for tensor in device_tensors]
        self.images = PlaceImages(device_tensors)

    def make_copies(self, copies: IntArray) -> None:
        """Make the `copies` [V, 3] of a plan, behind what is queued on the device, or, on a CPU, at once."""
        for place, slot, back in copies.tolist():
            if slot < 0:
                self.images.put(self.images.landed.pop(landed_number(slot)), place)
                continue
            for device_tensor, host_tensor in zip(self._device_tensors, self._host_tensors, strict=True):
                if back:
                    self._bring_back(host_tensor[slot], device_tensor[place])
                else:
                    self._take_away(device_tensor[place], host_tensor[slot])

    def _take_away(self, place: Tensor, slot: Tensor) -> None:
        """Copy a place to the host: first on the device, in the order of the steps, and then by a stream of its own."""
        if self._stream is None:
            slot.copy_(place)
            return
        staged = place.clone(memory_format=torch.contiguous_format)
        self._stream.wait_stream(torch.cuda.current_stream(place.device))
        with torch.cuda.stream(self._stream):
            slot.copy_(staged, non_blocking=True)
        staged.record_stream(self._stream)

    def _bring_back(self, slot: Tensor, place: Tensor) -> None:
        """Copy a slot to the device: it is on its way while the step before is computed."""
        if self._stream is None:
            place.copy_(slot)
            return
        current = torch.cuda.current_stream(place.device)
        with torch.cuda.stream(self._stream):
            staged = slot.to(place.device, non_blocking=True)
        current.wait_stream(self._stream)
        staged.record_stream(current)
        place.copy_(staged)
