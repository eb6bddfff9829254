"""The latest prepared media by content, within a budget of bytes, and the names that clients gave them."""

from collections import OrderedDict

from ..core.media import MediaSource, PreparedMedium

_ENTRY_BYTES = 1024
_MAX_NAMES = 4096


class PreparedCache:
    """Keeps media of `limit` bytes together; the ones unused longest make room."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._media: OrderedDict[bytes, PreparedMedium] = OrderedDict()
        self._names: OrderedDict[tuple[bytes, str, str], bytes] = OrderedDict()
        self.bytes = 0

    def get(self, digest: bytes) -> PreparedMedium | None:
        medium = self._media.get(digest)
        if medium is not None:
            self._media.move_to_end(digest)
        return medium

    def put(self, medium: PreparedMedium) -> None:
        self._remove(medium.digest)
        if medium_bytes(medium) > self._limit:  # nothing need make room in vain
            return
        self._media[medium.digest] = medium
        self.bytes += medium_bytes(medium)
        while self.bytes > self._limit:
            self._remove(next(iter(self._media)))

    def name(self, salt: bytes, source: MediaSource, digest: bytes) -> None:
        """Let the clients of a salt call what was made of a content, with its options, by the source's uuid."""
        key = salt, source.options, source.uuid
        self._names[key] = digest
        self._names.move_to_end(key)
        if len(self._names) > _MAX_NAMES:
            self._names.popitem(last=False)

    def named(self, salt: bytes, source: MediaSource) -> PreparedMedium | None:
        digest = self._names.get((salt, source.options, source.uuid))
        return None if digest is None else self.get(digest)

    def clear(self) -> None:
        self._media.clear()
        self._names.clear()
        self.bytes = 0

    def check_integrity(self) -> None:
        assert self.bytes == sum(map(medium_bytes, self._media.values())) <= self._limit
        assert len(self._names) <= _MAX_NAMES

    def _remove(self, digest: bytes) -> None:
        medium = self._media.pop(digest, None)
        if medium is not None:
            self.bytes -= medium_bytes(medium)


def medium_bytes(medium: PreparedMedium) -> int:
    """Bytes that a prepared medium takes."""
    return _ENTRY_BYTES + len(medium.placeholder) + sum(array.nbytes for array in medium.inputs.values())
