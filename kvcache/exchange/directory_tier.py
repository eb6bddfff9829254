"""A directory as a tier of the cache: which images a prompt lacks and the directory has, which have to come for it, and
which are to be written.

Says what is to be moved; moves nothing itself. Lives in the step loop's thread. Knows no files.
"""

from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from ..block_hashes import group_key
from ..events.cache_events import split_key
from ..manager import KVCacheManager
from ..tiers.landed_images import ImagePlace, LandedImages

_REMEMBERED = 1 << 17
"""Keys of images that this server has written or found, and does not write again."""


class WantedPrefix(NamedTuple):
    """What a directory adds to what a sequence could begin with: `tokens` more than `before`, by these images."""

    images: Sequence[ImagePlace] = ()
    """Without numbers yet."""
    before: int = 0
    tokens: int = 0


class DroppedImages(NamedTuple):
    """The numbers of landed images that are not wanted."""

    blocks: list[int]
    states: list[int]


class DirectoryTier:
    """The images that `cache` and a directory exchange. From now on the cache notes what becomes findable."""

    def __init__(self, cache: KVCacheManager) -> None:
        self._cache = cache
        self._landed = LandedImages(0) if cache.tiers is None else cache.tiers.landed
        self._groups = cache.groups
        self._committed: list[ImagePlace] = []
        cache.committed = self._committed
        if cache.states is not None:
            cache.states.committed = self._committed
        self._there: OrderedDict[bytes, None] = OrderedDict()

    def state_key(self, block_hash: bytes) -> bytes:
        """The key of the image of the state after a block."""
        return group_key(block_hash, self._groups.total)

    def lookup_keys(self, hashes: Sequence[bytes]) -> Iterable[tuple[list[bytes], list[bytes]]]:
        """For the block of each hash the keys without which a prefix ends before it, and those that may be of use. For
        any thread."""
        groups = self._groups
        for block_hash in hashes:
            full = [group_key(block_hash, group) for group in range(groups.full)]
            others = [group_key(block_hash, group) for group in range(groups.full, groups.total)]
            if self._cache.states is not None:
                others.append(self.state_key(block_hash))
            yield full, others

    def lacking(self, hashes: Sequence[bytes], known: int) -> Sequence[bytes]:
        """The hashes of a prompt of `known` tokens to look up in the directory: of a prefix that a sequence could not
        begin with as it is."""
        shared = hashes[: (known - 1) // self._cache.block_size]
        first = self._cache.found(shared)
        return shared[max(first - self._cache.window, 0) :] if first < len(shared) else ()

    def wanted(self, hashes: Sequence[bytes], known: int, present: Container[bytes]) -> WantedPrefix:
        """The images that have to come for the longest prefix that the cache and the `present` keys of the directory
        allow, and that there is room for."""
        size = self._cache.block_size
        shared = hashes[: (known - 1) // size]
        first = self._cache.found(shared)
        end = self._cache.found(shared, present)
        while end > first:
            images = self._images(shared[:end])
            to_fetch = [image for image in images if not self._landing(image).is_expected(_landed_key(image))]
            excess = sum(not image.of_state for image in to_fetch) - self._landed.room
            states = self._cache.states
            if states is not None and any(image.of_state for image in to_fetch) and states.landed.room < 1:
                break
            if excess <= 0:
                return WantedPrefix(images, first * size, (end - first) * size)
            end = self._cache.found(shared[: end - -(-excess // self._groups.total)], present)
        return WantedPrefix(before=first * size)

    def _images(self, hashes: Sequence[bytes]) -> list[ImagePlace]:
        """Those that are not in the cache of all that a sequence needs to go on after these blocks, in order."""
        cache, groups = self._cache, self._groups
        seen = max(len(hashes) - cache.window, 0)
        images: list[ImagePlace] = []
        for number, block_hash in enumerate(hashes):
            own = range(groups.full if number < seen else groups.total)
            keys = (group_key(block_hash, group) for group in own)
            images += (ImagePlace(key, -1) for key in keys if not cache.is_findable(key))
        if cache.states is not None and not cache.states.is_kept(hashes[-1]):
            images.append(ImagePlace(self.state_key(hashes[-1]), -1, of_state=True))
        return images

    def _landing(self, image: ImagePlace) -> LandedImages:
        if not image.of_state:
            return self._landed
        assert self._cache.states is not None, "an image of a state, and there are none"
        return self._cache.states.landed

    def hold(self, images: Sequence[ImagePlace]) -> tuple[list[ImagePlace], list[ImagePlace]]:
        """Expect these images for one sequence: all of them with their numbers, and those that nobody fetches yet."""
        held: list[ImagePlace] = []
        missing: list[ImagePlace] = []
        for image in images:
            landing, key = self._landing(image), _landed_key(image)
            is_new = not landing.is_expected(key)
            if is_new:
                landing.expect(key)
            held.append(image._replace(number=landing.hold(key)))
            missing += held[-1:] if is_new else []
        return held, missing

    def settle(self, images: Sequence[ImagePlace], arrived: Sequence[bool]) -> None:
        """The outcome of fetching these images."""
        for image, has_landed in zip(images, arrived, strict=True):
            landing, key = self._landing(image), _landed_key(image)
            if has_landed:
                landing.arrive(key, image.number)
                self._remember(image.key)
            else:
                landing.fail(key, image.number)
                self._there.pop(image.key, None)

    def release(self, held: Iterable[ImagePlace]) -> None:
        """The sequence that held these images has begun, or never will."""
        for image in held:
            self._landing(image).release(_landed_key(image), image.number)

    def take_dropped(self) -> DroppedImages:
        states = self._cache.states
        return DroppedImages(self._landed.take_dropped(), [] if states is None else states.landed.take_dropped())

    def take_unwritten(self) -> list[ImagePlace]:
        """The blocks and snapshots that have become findable since the last call, and are not known to be in the
        directory: they hold what they are to be written with until the next plan is made."""
        unwritten = []
        states = self._cache.states
        for key, place, of_state in self._committed:
            if of_state and states is not None and (key not in states or states.place_of(key) != place):
                continue  # it made room for a state that came from elsewhere, and was written at once
            key = self.state_key(key) if of_state else key
            if key not in self._there:
                unwritten.append(ImagePlace(key, place, of_state))
            self._remember(key)
        self._committed.clear()
        return unwritten

    def forget(self, keys: Iterable[bytes]) -> None:
        """These images are not in the directory, or no longer: what becomes findable again is to be written."""
        for key in keys:
            self._there.pop(key, None)

    def forget_lacking(self, hashes: Sequence[bytes], present: Container[bytes]) -> None:
        """A lookup of these hashes found the `present` keys. Behind the first block that is missing it did not look:
        without that one the others are of no use, so they are to be written with it if they are not there."""
        for full, others in self.lookup_keys(hashes):
            self.forget(key for key in (*full, *others) if key not in present)

    def _remember(self, key: bytes) -> None:
        self._there[key] = None
        self._there.move_to_end(key)
        if len(self._there) > _REMEMBERED:
            self._there.popitem(last=False)

    def check_integrity(self, held: Iterable[ImagePlace]) -> None:
        """Recompute what has landed from the images that are `held`. Raises `AssertionError`."""
        held = list(held)
        blocks = [(_landed_key(image), image.number) for image in held if not image.of_state]
        states = [(_landed_key(image), image.number) for image in held if image.of_state]
        self._landed.check_integrity(blocks)
        if self._cache.states is not None:
            self._cache.states.landed.check_integrity(states)


def _landed_key(image: ImagePlace) -> bytes:
    return split_key(image.key)[0] if image.of_state else image.key
