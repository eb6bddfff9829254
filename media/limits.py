"""What a medium of a request may cost."""

from collections.abc import Sequence

import msgspec

from ..core.errors import InvalidArgument
from ..core.media import MediaKind, MediaSource
from ..core.media_models import MediaConfig

_LARGEST_SIDE = 65_535
_SOUND_SHARE = 600.0
"""Seconds of sound for which preparing may take as long as for an image; a slow core needs a tenth of that."""

_SOUND_BYTES = 66_000
"""Bytes of what is made of a second of sound: 100 frames of 128 bins, where a fifth of each window is padding."""
_SOUND_COPIES = 4
"""How often as much as that is in memory at a time: as samples, before and after they are put together, as features."""


class MediaLimits(msgspec.Struct, frozen=True):
    """The limits of the media of one model's requests: an operator's, and those that hold everywhere."""

    config: MediaConfig = MediaConfig()
    max_aspect: float = 200.0
    """The longer side of an image by the shorter one."""
    max_waiting: int = 128
    """Media that are fetched or wait to be prepared; more are refused."""
    seconds: float = 20.0
    """Seconds of a processor that preparing a medium may take; a sound so much more for each ten minutes that it may
    have."""
    fetch_seconds: float = 20.0
    """How long a file may take to fetch, redirects included."""
    memory: int = 2 << 30
    """Bytes that preparing may take beside those of the process; more for very long sounds, as of `max_output`."""
    max_output: int = 512 << 20
    """Bytes of a prepared medium."""

    def seconds_for(self, kind: MediaKind) -> float:
        """How long one of the kind may take."""
        return self.seconds * (1 + self.config.max_seconds / _SOUND_SHARE) if kind == "audio" else self.seconds

    def memory_for(self, kind: MediaKind) -> int:
        """Bytes that preparing one of the kind may take."""
        return max(self.memory, self._sound_bytes(kind) * _SOUND_COPIES)

    def max_output_for(self, kind: MediaKind) -> int:
        """Bytes of a prepared one of the kind."""
        return max(self.max_output, self._sound_bytes(kind))

    def _sound_bytes(self, kind: MediaKind) -> int:
        return int(self.config.max_seconds * _SOUND_BYTES) if kind == "audio" else 0

    def check_count(self, media: Sequence[MediaSource]) -> None:
        """Raises `InvalidArgument` for more media of a kind than a prompt may have."""
        counts: dict[MediaKind, int] = {}
        for source in media:
            counts[source.kind] = counts.get(source.kind, 0) + 1
            most = self.config.per_prompt.get(source.kind, 0)
            if counts[source.kind] > most:
                message = f"{source.field}: a prompt may have at most {most} of the kind {source.kind}"
                raise InvalidArgument(f"{message} (--limit-mm-per-prompt)", field=source.field)

    def check_image_size(self, width: int, height: int) -> None:
        """Raises `InvalidArgument` for an image of too many pixels, or too long and narrow."""
        if width < 1 or height < 1:
            raise InvalidArgument(f"the image has no pixels: {width} x {height}")
        if width * height > self.config.max_pixels or max(width, height) > _LARGEST_SIDE:
            message = f"the image has {width} x {height} pixels, and may have {self.config.max_pixels:,}"
            raise InvalidArgument(f"{message} (--media-max-pixels)")
        if max(width, height) > self.max_aspect * min(width, height):
            message = f"the image is {width} x {height}: one side may be at most {self.max_aspect:g} times the other"
            raise InvalidArgument(message)
