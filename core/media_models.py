"""The contracts of what stands between the media of a request and a language model: one prepares, one encodes."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from .media import MediaSource, PreparedMedium
from .metrics import Reading
from .request_context import RequestContext


class EncodedMedium(NamedTuple):
    """What an encoder makes of a medium: the inputs of a language model at the places that stand for it."""

    length: int
    """How many places there are."""
    rows: bytes
    """[length, hidden] in `dtype`, one row after the other."""
    dtype: str
    """torch's name of it."""
    deepstack: bytes = b""
    """[layers, length, hidden] in `dtype`: what is added to the states after each of the first layers."""


class MediaPreparer(Protocol):
    """Decodes, scales and cuts media as the processor of one checkpoint does it."""

    async def prepare(self, medium: MediaSource, context: RequestContext) -> PreparedMedium:
        """Raises a `CharoniaError` with the medium's `field`. Cancelling it leaves nothing running."""


class MediaEncoder(Protocol):
    """The tower of one language model, which loads, serves and unloads with it."""

    async def load(self) -> None:
        """Return when it can encode. Raises as `core.model.Model.load`."""

    async def unload(self) -> None:
        """Free everything. May be called again."""

    async def encode(self, medium: PreparedMedium, context: RequestContext, salt: str = "") -> EncodedMedium:
        """What is made of a medium is kept, for the same tenant and `salt`. Cancelling ends the computation unless
        another request waits for it, too. Raises a `CharoniaError`."""

    def readings(self) -> Iterator[Reading]:
        """Its series, for a scrape."""
