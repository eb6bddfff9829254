"""What a rank has in several places of its cache at once, as bytes that go to another server's rank and come from
there: the images of these places, one behind the other. Imports no torch."""

from collections.abc import Callable
from typing import NamedTuple

from .executor import CachePlaces, ImageLayout
from .image_files import Images


class RankPlaces(NamedTuple):
    """The places of a rank; None where it has none of the kind: then they have no bytes."""

    blocks: Images | None
    states: Images | None

    @property
    def layout(self) -> ImageLayout:
        """What their bytes are."""
        layouts = ("" if images is None else images.layout for images in self)
        return ImageLayout("; ".join(layouts), *(0 if images is None else images.bytes for images in self))

    def take(self, places: CachePlaces) -> Callable[[], bytes]:
        """For the thread that computes: copies what these have, and any thread may call what is returned for it."""
        taken = [images.take(place) for images, place in self._images_of(places)]
        return lambda: b"".join(image.read().data for image in taken)

    def put(self, places: CachePlaces, content: memoryview) -> None:
        """For the thread that computes: these, which no step has, get this content, whose memory may change then."""
        for images, place in self._images_of(places):
            image = images.make()
            image.numpy().data[:] = content[: images.bytes]
            content = content[images.bytes :]
            images.put(image, place)

    def _images_of(self, places: CachePlaces) -> list[tuple[Images, int]]:
        kinds = zip(self, places, strict=True)
        return [(images, place) for images, of_kind in kinds if images is not None for place in of_kind]
