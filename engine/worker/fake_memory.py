"""The blocks and states of an executor that computes nothing, on the device and in the host's memory, and their images:
which tokens they have."""

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from ...kvcache.host_tier import landed_number
from .executor import CacheCopies, CachePlaces

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
    """The images of places that have `size` numbers each, which `numbers_of` returns."""

    def __init__(self, size: int, numbers_of: Callable[[int], _Numbers]) -> None:
        self.bytes = 8 * size
        self._numbers_of = numbers_of
        self._landed: dict[int, FakeImage] = {}

    def take(self, place: int) -> FakeImage:
        return FakeImage(self._numbers_of(place).tobytes())

    def make(self) -> FakeImage:
        return FakeImage(bytearray(self.bytes))

    def land(self, number: int, image: FakeImage) -> None:
        self._landed[number] = image

    def drop(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._landed.pop(number, None)

    @property
    def landed(self) -> int:
        """Images that have landed and are still kept."""
        return len(self._landed)

    def restore(self, number: int) -> _Numbers:
        """The numbers of a landed image, which is gone then."""
        return self._landed.pop(number).numbers


class FakeMemory:
    """Blocks of `block_size` tokens, and states that have seen `longest` tokens at most. `check_contents`: what is
    moved has been filled."""

    def __init__(self, block_size: int, longest: int, check_contents: bool) -> None:
        self._block_size = block_size
        self._longest = longest
        self._check_contents = check_contents
        self.block_images = FakeImages(block_size, self._block)
        self.state_images = FakeImages(longest + 1, self._state_numbers)
        self.allocate(0, 0, 0, 0)

    def allocate(self, blocks: int, host_blocks: int, snapshots: int, host_snapshots: int) -> None:
        self.slots = np.full(blocks * self._block_size, EMPTY, np.int64)
        self._host_slots = np.full((host_blocks, self._block_size), EMPTY, np.int64)
        self.snapshots: list[list[int]] = [[EMPTY]] * snapshots
        self._host_snapshots: list[list[int]] = [[EMPTY]] * host_snapshots

    def _block(self, block: int) -> _Numbers:
        return self.slots[block * self._block_size :][: self._block_size]

    def _state_numbers(self, snapshot: int) -> _Numbers:
        numbers = np.full(self._longest + 1, EMPTY, np.int64)
        state = self.snapshots[snapshot]
        numbers[: len(state) + 1] = [len(state), *state]
        return numbers

    def take(self, places: CachePlaces) -> list[bytes]:
        """What these places have, of the one rank that there is."""
        blocks = [self._block(block) for block in places.blocks]
        assert all((block != EMPTY).all() for block in blocks) or not self._check_contents, "a block without content"
        return [b"".join(part.tobytes() for part in (*blocks, *map(self._state_numbers, places.states)))]

    def put(self, places: CachePlaces, content: bytes, copies: CacheCopies) -> None:
        self.move_blocks(copies.blocks.tolist())
        self.move_states(copies.states.tolist())
        numbers = np.frombuffer(content, np.int64)
        for block in places.blocks:
            self._block(block)[:], numbers = numbers[: self._block_size], numbers[self._block_size :]
        for state in places.states:
            length, *tokens = numbers[: self._longest + 1].tolist()
            self.snapshots[state], numbers = tokens[:length], numbers[self._longest + 1 :]

    def move_blocks(self, copies: list[list[int]]) -> None:
        """What leaves a block is not there any more."""
        for block, slot, back in copies:
            content = self._block(block)
            if slot < 0:
                content[:] = self.block_images.restore(landed_number(slot))
                continue
            source, target = (self._host_slots[slot], content) if back else (content, self._host_slots[slot])
            assert (source != EMPTY).all() or not self._check_contents, f"block {block} is moved and has no content"
            target[:] = source
            if not back:
                content[:] = EMPTY

    def move_states(self, copies: list[list[int]]) -> None:
        for snapshot, slot, back in copies:
            if slot < 0:
                length, *tokens = self.state_images.restore(landed_number(slot)).tolist()
                self.snapshots[snapshot] = tokens[:length]
                continue
            places = (self.snapshots, snapshot), (self._host_snapshots, slot)
            (sources, source), (targets, target) = reversed(places) if back else places
            assert sources[source] != [EMPTY], f"snapshot {snapshot} is moved and has no content"
            targets[target] = sources[source]
            if not back:
                self.snapshots[snapshot] = [EMPTY]
