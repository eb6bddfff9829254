"""Images: the bytes that a rank has in one place of its cache, a block or a state's snapshot, over all its layers.

A file or a peer gets them, and gives them back to ranks of equal model, layout and share. An image that has come is
landed, under a number, until a plan copies it: see `TierCopy`.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..step_batch import HostCopy

_ALIGNED = 16
"""Each tensor's part of an image begins at a multiple of so many bytes."""


class _Part(NamedTuple):
    """A tensor's part of an image."""

    start: int
    bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def of(self, image: Tensor) -> Tensor:
        return image[self.start : self.start + self.bytes].view(self.dtype).view(self.shape)


class PlaceImages:
    """The images of places of `device_tensors`, which all have the same ones by their first index. `take` and `put` are
    for the thread that computes, all else for any."""

    def __init__(self, device_tensors: Sequence[Tensor]) -> None:
        self._device_tensors = device_tensors
        self._device = device_tensors[0].device
        on_gpu = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._parts: list[_Part] = []
        self.bytes = 0
        """The size of every image."""
        for tensor in device_tensors:
            shape = tuple(tensor.shape[1:])
            size = math.prod(shape) * tensor.dtype.itemsize
            self._parts.append(_Part(self.bytes, size, tensor.dtype, shape))
            self.bytes += -(-size // _ALIGNED) * _ALIGNED
        self.landed: dict[int, Tensor] = {}
        """Images that have come from elsewhere, until a plan copies them to places or they are dropped."""

    @property
    def layout(self) -> str:
        """What the bytes of an image are, in order: equal layouts can be told by it from others."""
        return " ".join(f"{part.dtype}{list(part.shape)}" for part in self._parts).replace("torch.", "")

    def take(self, place: int) -> HostCopy:
        """The image of a place, uint8 [bytes], as it is behind all steps that have begun; later ones may overwrite it
        at once. Any thread may read it."""
        image = torch.zeros(self.bytes, dtype=torch.uint8, device=self._device)
        for part, tensor in zip(self._parts, self._device_tensors, strict=True):
            part.of(image).copy_(tensor[place])
        if self._stream is None:
            return HostCopy(image)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            on_host = HostCopy(image)
        image.record_stream(self._stream)
        return on_host

    def make(self) -> Tensor:
        """Host memory for an image that comes from elsewhere, uint8 [bytes]."""
        return torch.empty(self.bytes, dtype=torch.uint8, pin_memory=self._stream is not None)

    def put(self, image: Tensor, place: int) -> None:
        """Copy an image that `make` made, and that has been filled, to a place, behind what is queued on the device."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            with torch.cuda.stream(self._stream):
                image = image.to(self._device, non_blocking=True)
            current.wait_stream(self._stream)
            image.record_stream(current)
        for part, tensor in zip(self._parts, self._device_tensors, strict=True):
            tensor[place].copy_(part.of(image))
