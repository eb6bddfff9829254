"""One batch that runs: which of its requests are done, under way and still to come. Knows no models; methods that say
so block, and belong into a thread."""

import asyncio
from array import array
from collections import deque
from threading import Lock

from .input_lines import BatchLine, CheckedInput, asks_for_stream, find_lines, read_line
from .journal import Journal, LineOutcome, encode_outcome
from .records import BatchRecord, BatchStatus
from .store import FileStore

_FILL_LINES = 256
"""Requests that are told as not executed at a time."""

_RETRY_SECONDS = (0.1, 5.0)

_NOT_EXECUTED = {
    BatchStatus.CANCELLED: ("batch_cancelled", "The batch was cancelled before this request was executed."),
    BatchStatus.EXPIRED: (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
}


class RunningBatch:
    """A batch from its start, or the server's, to its end."""

    def __init__(self, record: BatchRecord, store: FileStore, most: int) -> None:
        self.record = record
        self.store = store
        self.most = most
        self.input = store.path(record.input_file_id)
        self.output = Journal(store.path(record.output_id))
        self.errors = Journal(store.path(record.error_id))
        self.done = bytearray()
        """A byte for each request, set once its line is in a journal."""
        self.running: set[asyncio.Task[None]] = set()
        """The tasks of the requests under way, at most `window` of them."""
        self.window = float(most)
        """It shrinks when a model refuses more, and grows with each answer."""
        self.losses: dict[int, int] = {}
        """How often an engine ended under a request, by the request's number."""
        self.stop = asyncio.Event()
        """Set to cancel the batch."""
        self.failure: Exception | None = None
        """Why the batch cannot go on."""
        self.charged = 0
        """Bytes that were counted for its files."""
        self.resume_at = 0.0
        self._offsets = array("Q")
        self._next = 0
        self._again: deque[int] = deque()
        self._delay = _RETRY_SECONDS[0]
        self._turn = Lock()

    # Which request is next

    def begin(self, checked: CheckedInput) -> None:
        """The requests of a file that was found to be right."""
        self._offsets = checked.offsets
        self.record.model = checked.model
        self.record.total = len(checked.offsets) - 1
        self.done = bytearray(self.record.total)

    def recover(self) -> None:
        """Find out what had been done when the server ended; blocks.

        Raises:
            OSError: the input file cannot be read.
            StorageFull: the disk refuses to cut off what is broken.
        """
        self.done = bytearray(self.record.total)
        for journal in (self.output, self.errors):  # first: they are kept whatever becomes of the input
            for index in journal.recover():
                if index < len(self.done):
                    self.done[index] = 1
        self.count_answers()
        self._offsets = find_lines(self.input)

    def count_answers(self) -> None:
        self.record.completed = self.output.count
        self.record.failed = self.errors.count

    def take_next(self) -> int | None:
        """The number of a request that is neither done nor under way; None if there is none."""
        if self._again:
            return self._again.popleft()
        self._next = self.done.find(0, self._next)
        if self._next < 0:
            self._next = len(self.done)
            return None
        self._next += 1
        return self._next - 1

    def put_back(self, index: int, now: float, wait: bool) -> None:
        """A request could not be answered now, and will be asked again; `wait`: nothing is asked for a while, which
        doubles each time. Otherwise fewer are asked at a time."""
        self._again.append(index)
        self.window = max(1.0, min(self.window, len(self.running) - 1.0))
        if now >= self.resume_at and (wait or len(self.running) <= 1):
            self.resume_at = now + self._delay
            self._delay = min(2 * self._delay, _RETRY_SECONDS[1])

    def note_answer(self) -> None:
        """The model answers: ask more at a time, and wait less when it does not."""
        self.window = min(self.most, self.window + 1 / self.window)
        self._delay = _RETRY_SECONDS[0]

    # Files

    def read(self, index: int) -> tuple[BatchLine, bool]:
        """A request, and whether it asks for a stream; blocks. Raises `OSError`."""
        line = read_line(self.input, self._offsets, index)
        return line, asks_for_stream(line)

    def write(self, index: int, line: bytes, succeeded: bool) -> None:
        """Keep how a request ended, unless that is told already; blocks, and takes turns with `fill`.

        Raises:
            StorageFull: the disk refuses it.
        """
        with self._turn:
            if not self.done[index]:
                (self.output if succeeded else self.errors).append(line)
                self.done[index] = 1

    def fill(self, status: BatchStatus) -> None:
        """Tell of all requests that were not executed that this is why; blocks.

        Raises:
            OSError, StorageFull: as `read` and `write`.
        """
        code, message = _NOT_EXECUTED[status]
        outcome = LineOutcome(code=code, message=message)
        with self._turn:
            left = [index for index, done in enumerate(self.done) if not done]
            for start in range(0, len(left), _FILL_LINES):
                part = left[start : start + _FILL_LINES]
                ids = [self.read(index)[0].custom_id for index in part]
                lines = [encode_outcome(self.record.id, *line, outcome) for line in zip(part, ids, strict=True)]
                self.errors.append(b"".join(lines), answers=0)
                for index in part:
                    self.done[index] = 1
