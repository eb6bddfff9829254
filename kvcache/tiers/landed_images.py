"""Images of blocks, or of states, that come from elsewhere for sequences that wait for them: which are on their way,
and which have landed beside the cache, until a plan copies them to a place of it.

Knows no files, no sockets and no tensors.
"""

from collections.abc import Iterable
from typing import NamedTuple

_NUMBERS = 1 << 30
"""How many images come before a number is used again."""


class ImagePlace(NamedTuple):
    """The image of `key`: in a place of the device from where it is to be stored, or by the number under which it is to
    land. `of_state`: of a snapshot of a state, and not of a block."""

    key: bytes
    number: int
    of_state: bool = False


class _Expected:
    """An image that `holders` sequences wait for, or could begin with."""

    __slots__ = ("has_landed", "holders", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.has_landed = False
        self.holders = 0


class LandedImages:
    """At most `size` images, on their way or landed. Those that nobody holds any more are dropped, however useful: what
    they have lies where they came from."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._expected: dict[bytes, _Expected] = {}
        self._unwanted = set[int]()  # on their way, and nobody holds them
        self._dropped: list[int] = []
        self._next = 0

    def __contains__(self, key: bytes) -> bool:
        """Whether the image of this key has landed."""
        expected = self._expected.get(key)
        return expected is not None and expected.has_landed

    def __bool__(self) -> bool:
        return bool(self._expected)

    @property
    def room(self) -> int:
        """Images that may be expected beside those that are."""
        return self.size - len(self._expected) - len(self._unwanted)

    def is_expected(self, key: bytes) -> bool:
        return key in self._expected

    def expect(self, key: bytes) -> int:
        """The number under which the image of this key is to land. There must be room, and it is not expected yet."""
        assert self.room > 0, "no room for an image"
        assert key not in self._expected, "an image is expected already"
        number = self._next
        self._next = (number + 1) % _NUMBERS
        self._expected[key] = _Expected(number)
        return number

    def hold(self, key: bytes) -> int:
        """Let an image that is expected stay for one sequence more, until `release`; its number."""
        expected = self._expected[key]
        expected.holders += 1
        return expected.number

    def release(self, key: bytes, number: int) -> None:
        """Give up a hold. It means nothing if the image of this number has been restored, or did not come."""
        expected = self._expected.get(key)
        if expected is None or expected.number != number:
            return
        expected.holders -= 1
        if not expected.holders:
            del self._expected[key]
            if expected.has_landed:
                self._dropped.append(number)
            else:
                self._unwanted.add(number)

    def arrive(self, key: bytes, number: int) -> None:
        """The image has landed everywhere: it can be found, if it is still wanted."""
        if number in self._unwanted:
            self._unwanted.remove(number)
            self._dropped.append(number)
        else:
            self._expected[key].has_landed = True

    def fail(self, key: bytes, number: int) -> None:
        """The image will not land everywhere."""
        self._dropped.append(number)
        if number in self._unwanted:
            self._unwanted.remove(number)
        else:
            del self._expected[key]

    def restore(self, key: bytes) -> int:
        """The number of a landed image, which a plan copies to a place: it is gone from here."""
        expected = self._expected.pop(key)
        assert expected.has_landed, "an image is restored that has not landed"
        return expected.number

    def take_dropped(self) -> list[int]:
        """The numbers of images that no plan will restore, since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def check_integrity(self, holds: Iterable[tuple[bytes, int]]) -> None:
        """Recompute the holders from all (key, number) that were held and not released. Raises `AssertionError`."""
        holders = dict.fromkeys(self._expected, 0)
        for key, number in holds:
            if key in self._expected and self._expected[key].number == number:
                holders[key] += 1
        assert holders == {key: expected.holders for key, expected in self._expected.items()}, "a hold leaked"
        assert all(holders.values()), "an image that nobody holds"
        numbers = [expected.number for expected in self._expected.values()]
        assert len({*numbers, *self._unwanted, *self._dropped}) == len(numbers) + len(self._unwanted) + len(
            self._dropped
        ), "a number is used twice"
        assert self.room >= 0
