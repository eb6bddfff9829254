"""The blocks and states of an executor that computes nothing, on the device and in the host's memory, and their images:
which tokens they have."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ...kvcache.tiers.host_tier import landed_number
from ...scheduler.plan import IntArray

EMPTY = -1
_Numbers = NDArray[np.int64]


class FakeImage:
    """The memory of an image."""

    def __init__(self, content: bytes | bytearray) -> None:
        self._bytes = np.frombuffer(content, np.uint8)

    def numpy(self) -> NDArray[np.uint8]:
        return self._bytes

    read = numpy

    @property
    def numbers(self) -> _Numbers:
        return self._bytes.view(np.int64)


class FakeImages:
    """The images of places that have `size` numbers each, which are read and written by these functions."""

    layout = "fake"

    def __init__(self, size: int, read: Callable[[int], _Numbers], write: Callable[[int, _Numbers], None]) -> None:
        self.bytes = 8 * size
        self._read = read
        self._write = write
        self.landed: dict[int, FakeImage] = {}

    def take(self, place: int) -> FakeImage:
        return FakeImage(self._read(place).tobytes())

    def make(self) -> FakeImage:
        return FakeImage(bytearray(self.bytes))

    def put(self, image: FakeImage, place: int) -> None:
        self._write(place, image.numbers)


class FakeMemory:
    """Blocks of `block_size` tokens, and states that have seen `longest` tokens at most. `check_contents`: what is
    moved has been filled."""

    def __init__(self, block_size: int, longest: int, check_contents: bool) -> None:
        self._block_size = block_size
        self._longest = longest
        self._check_contents = check_contents
        self.block_images = FakeImages(block_size, self._filled_block, self._fill)
        self.state_images = FakeImages(longest + 1, self._state_numbers, self._set_state)
        self.allocate(0, 0, 0, 0)

    def allocate(self, blocks: int, host_blocks: int, snapshots: int, host_snapshots: int) -> None:
        self.slots = np.full(blocks * self._block_size, EMPTY, np.int64)
        self._host_slots = np.full((host_blocks, self._block_size), EMPTY, np.int64)
        self.snapshots: list[list[int]] = [[EMPTY]] * snapshots
        self._host_snapshots: list[list[int]] = [[EMPTY]] * host_snapshots

    def _block(self, block: int) -> _Numbers:
        return self.slots[block * self._block_size :][: self._block_size]

    def _filled_block(self, block: int) -> _Numbers:
        return self._filled(self._block(block), f"block {block}")

    def _filled(self, content: _Numbers, name: str) -> _Numbers:
        assert (content != EMPTY).all() or not self._check_contents, f"{name} is copied and has no content"
        return content

    def _fill(self, block: int, content: _Numbers) -> None:
        self._block(block)[:] = content

    def _state_numbers(self, snapshot: int) -> _Numbers:
        numbers = np.full(self._longest + 1, EMPTY, np.int64)
        state = self.snapshots[snapshot]
        numbers[: len(state) + 1] = [len(state), *state]
        return numbers

    def _set_state(self, snapshot: int, numbers: _Numbers) -> None:
        length, *tokens = numbers.tolist()
        self.snapshots[snapshot] = tokens[:length]

    def make_copies(self, blocks: IntArray, states: IntArray) -> None:
        """What leaves a block is not there any more."""
        for block, slot, back in blocks.tolist():
            if slot < 0:
                self.block_images.put(self.block_images.landed.pop(landed_number(slot)), block)
            elif back:
                self._fill(block, self._filled(self._host_slots[slot], f"slot {slot}"))
            else:
                self._host_slots[slot] = self._filled_block(block)
                self._block(block)[:] = EMPTY
        for snapshot, slot, back in states.tolist():
            if slot < 0:
                self.state_images.put(self.state_images.landed.pop(landed_number(slot)), snapshot)
                continue
            places = (self.snapshots, snapshot), (self._host_snapshots, slot)
            (sources, source), (targets, target) = reversed(places) if back else places
            assert sources[source] != [EMPTY], f"snapshot {snapshot} is moved and has no content"
            targets[target] = sources[source]
            if not back:
                self.snapshots[snapshot] = [EMPTY]
