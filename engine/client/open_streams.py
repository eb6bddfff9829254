"""The streams of a model's running requests by the ids that clients gave them, by which they may end them."""

from collections.abc import Iterator
from contextlib import contextmanager

from ...core.errors import Cancelled
from .token_stream import TokenStream


class OpenStreams:
    """Those that this process reads."""

    def __init__(self) -> None:
        self._by_id: dict[str, set[TokenStream]] = {}

    @contextmanager
    def cancellable(self, request_id: str, stream: TokenStream) -> Iterator[None]:
        """The block in which a stream is read; one without an id cannot be ended by it."""
        if not request_id:
            yield
            return
        streams = self._by_id.setdefault(request_id, set())
        streams.add(stream)
        try:
            yield
        finally:
            streams.discard(stream)
            if not streams:
                self._by_id.pop(request_id, None)

    def cancel(self, request_id: str) -> None:
        """End all streams of this id; their readers get `Cancelled`."""
        for stream in self._by_id.get(request_id, ()):
            if not stream.ended:
                stream.interrupt(Cancelled("Request cancelled by client"))
