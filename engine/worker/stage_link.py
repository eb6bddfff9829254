"""How a pipeline stage's recorded steps meet the stages before and after it, which no CUDA graph can have."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..checkpoint.build_context import PipelineLink
from ..gpu.graphs import Launches, Recorder


class StageLink:
    """A `PipelineLink` for steps of both kinds. A launched one exchanges hidden states while it computes. A recorded
    one takes them out of a buffer that is filled before each replay, and leaves what is to be sent to its caller."""

    def __init__(self, link: PipelineLink) -> None:
        self._link = link
        self._is_recording = False
        self._sent: Tensor | None = None
        self._buffer: Tensor | None = None
        """[most places, hidden]; None: it has not received while a step was recorded."""
        self.places = 0
        """Places of the step that is replayed next."""
        self.most_places = 0
        """Places of the largest step that is recorded."""

    def receive(self, into: Tensor) -> None:
        if not self._is_recording:
            self._link.receive(into)
            return
        if self._buffer is None:
            size = self.most_places, into.shape[1]
            self._buffer = torch.zeros(size, dtype=into.dtype, device=into.device)
        into.copy_(self._buffer[: len(into)])

    def send(self, x: Tensor) -> None:
        if self._is_recording:
            self._sent = x
        else:
            self._link.send(x)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A step that is computed meanwhile is a recorded one."""
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False

    def take_sent(self) -> Tensor | None:
        """The states [N, hidden] that the last recorded step is to send; None: its stage is the last one."""
        sent, self._sent = self._sent, None
        return sent

    def recorder(self, record: Recorder) -> Recorder:
        """One whose replays begin when the states of their `places` have come."""

        def recorded(launches: Launches) -> Launches:
            replay = record(launches)

            def replay_behind() -> None:
                if self._buffer is not None:
                    self._link.receive(self._buffer[: self.places])
                replay()

            return replay_behind

        return recorded
