"""The server's end of a process that prepares images."""

import mmap
import os
import time

import msgspec

from ..core.errors import Internal, InvalidArgument, Unavailable
from ..core.media import PreparedMedium
from ..core.media_models import MediaFacts
from ..processes.child_process import anonymous_file
from ..processes.limited_process import CallLimits, CallLost, LimitedProcess, TimeLimitExceeded
from .limits import MediaLimits
from .preparing_process import PreparedAnswer, copy_arrays, make_answer

_START_SECONDS = 120.0
_NICENESS = 5
"""A quarter of a core beside an engine that takes all of them: requests wait for it."""
_KEPT = 16 << 20
"""Bytes of the shared memory that stay resident after an answer."""


class PreparingWorker:
    """A process that prepares images, with the memory that it answers in. For one thread at a time. Raises
    `Unavailable` if it cannot be started."""

    def __init__(self, checkpoint: str, limits: MediaLimits) -> None:
        self._limits = limits
        descriptor = anonymous_file("charonia-media")
        try:
            os.ftruncate(descriptor, limits.max_output)
            self._memory = mmap.mmap(descriptor, limits.max_output)
            arguments = (checkpoint, limits, descriptor)
            self._process = LimitedProcess(
                "charonia-media", make_answer, *arguments, inherited=(descriptor,), niceness=_NICENESS
            )
        except (OSError, CallLost) as error:
            raise Unavailable(f"a process that prepares images cannot be started: {error}") from error
        finally:
            os.close(descriptor)
        self.kill = self._process.kill
        """Ends the process, from any thread."""

    @property
    def alive(self) -> bool:
        return self._process.alive

    def facts(self) -> MediaFacts:
        """What its processor is. Raises `InvalidArgument` for a checkpoint without one, `Unavailable` if the process
        does not start."""
        deadline = time.monotonic() + _START_SECONDS
        try:
            while not self._process.wait_until_ready(1.0):
                if time.monotonic() > deadline:
                    raise Unavailable("the process that prepares images did not start in time")
            answer = self._ask(b"")
        except (CallLost, TimeLimitExceeded) as error:
            raise Unavailable(f"the process that prepares images did not start: {error}") from error
        if answer.facts is None:
            raise Internal("the process that prepares images does not know its processor")
        return answer.facts

    def prepare(self, data: bytes, digest: bytes) -> PreparedMedium:
        """The prepared image of a file. Raises `InvalidArgument` for one that is broken or costs too much: unless the
        worker is `alive` afterwards, it cost the process its life."""
        try:
            answer = self._ask(data)
        except TimeLimitExceeded as error:
            raise InvalidArgument(f"preparing the image takes {error}") from None
        except CallLost as error:
            message = f"preparing the image takes more than {self._limits.memory >> 20} MiB, or breaks a library"
            raise InvalidArgument(f"{message} ({error})") from None
        inputs = copy_arrays(answer.arrays, self._memory)
        if sum(array.nbytes for array in inputs.values()) > _KEPT and hasattr(mmap, "MADV_REMOVE"):
            self._memory.madvise(mmap.MADV_REMOVE)
        return PreparedMedium("image", digest, answer.placeholder, inputs, answer.grid)

    def _ask(self, message: bytes) -> PreparedAnswer:
        sent = self._process.call(message, CallLimits(self._limits.seconds, self._limits.memory))
        answer = msgspec.msgpack.decode(sent, type=PreparedAnswer)
        if answer.error is not None:
            raise answer.error.error()
        return answer

    def close(self) -> None:
        if self._process.alive:
            self._process.close()
        self._memory.close()
