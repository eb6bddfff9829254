"""Responses in the order of their requests, whichever instance was faster: `preserve_ordering`."""

from collections import deque

from ...core.request import InferResponse
from .inference_job import ResponseSink


class ResponseOrderer:
    """Requests that have not ended, in the order in which they came."""

    def __init__(self) -> None:
        self._places: deque[OrderedSink] = deque()

    def __len__(self) -> int:
        return len(self._places)

    def add_request(self, sink: ResponseSink) -> "OrderedSink":
        """A sink that holds back what comes until all requests before it have ended."""
        place = OrderedSink(self, sink)
        self._places.append(place)
        self.release_finished()
        return place

    def release_finished(self) -> None:
        while self._places and self._places[0].release_held():
            self._places.popleft()


class OrderedSink:
    """One request's place in the line."""

    def __init__(self, line: ResponseOrderer, sink: ResponseSink) -> None:
        self._line = line
        self._sink = sink
        self._held: list[InferResponse] = []
        self._leads = self.ended = False
        self._error: Exception | None = None

    def put(self, response: InferResponse) -> None:
        if self._leads:
            self._sink.put(response)
        else:
            self._held.append(response)

    def end(self, error: Exception | None = None) -> None:
        if not self.ended:
            self.ended, self._error = True, error
            self._line.release_finished()

    def release_held(self) -> bool:
        """Everybody before it has ended: let go what was held back. True: it has ended itself."""
        if not self._leads:
            self._leads = True
            for response in self._held:
                self._sink.put(response)
            self._held.clear()
        if self.ended:
            self._sink.end(self._error)
        return self.ended
