"""The bytes of several places of a rank's cache at once, blocks or snapshots, as they go to another server's rank and
come from there. One place's are its image, see `attention/place_images.py`."""

from collections.abc import Callable

from ..attention.host_cache import HostCache
from ..attention.place_images import PlaceImages
from .executor import CacheCopies, CachePlaces, ImageLayout
from .loaded_rank import LoadedRank
from .model_runner import ModelRunner

_NUMBER = 1 << 62
"""Under which an image lands that is restored at once: nobody else's."""


def image_layout(rank: LoadedRank) -> ImageLayout:
    """What the images of this rank are."""
    runner = rank.runner
    sizes = [0 if images is None else images.bytes for images in map(_images, (runner.host_blocks, runner.host_states))]
    return ImageLayout(rank.image_layout, *sizes)


def take_places(runner: ModelRunner, places: CachePlaces) -> Callable[[], bytes]:
    """For the thread that computes: copies what the places have, and any thread may call what is returned for it."""
    copies = [images.take(place) for images, place in _of(runner, places)]
    return lambda: b"".join(copy.read().data for copy in copies)


def put_places(runner: ModelRunner, places: CachePlaces, content: memoryview | bytes, copies: CacheCopies) -> None:
    """For the thread that computes: the places, which no step has, get this content behind the copies; its memory may
    change then."""
    runner.make_copies(copies.blocks, copies.states)
    left = memoryview(content)
    for images, place in _of(runner, places):
        image = images.make()
        image.numpy().data[:] = left[: images.bytes]
        left = left[images.bytes :]
        images.land(_NUMBER, image)
        images.restore(_NUMBER, place)


def _images(cache: HostCache | None) -> PlaceImages | None:
    return None if cache is None else cache.images


def _of(runner: ModelRunner, places: CachePlaces) -> list[tuple[PlaceImages, int]]:
    blocks, states = _images(runner.host_blocks), _images(runner.host_states)
    pairs = [] if blocks is None else [(blocks, block) for block in places.blocks]
    return pairs if states is None else [*pairs, *((states, state) for state in places.states)]
