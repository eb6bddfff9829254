"""The server's end of a process that prepares media."""

import mmap
import os
import time

import msgspec

from ..core.errors import Internal, InvalidArgument, Unavailable
from ..core.media import KIND_NOUNS, MediaKind, PreparedMedium
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
    """A process that prepares media of a kind, with the memory that it answers in. For one thread at a time. Raises
    `Unavailable` if it cannot be started."""

    def __init__(self, checkpoint: str, limits: MediaLimits, kind: MediaKind = "image") -> None:
        self._limits = limits
        self._kind = kind
        self._noun = KIND_NOUNS[kind]
        descriptor = anonymous_file("charonia-media")
        try:
            os.ftruncate(descriptor, limits.max_output_for(kind))
            self._memory = mmap.mmap(descriptor, limits.max_output_for(kind))
            arguments = (checkpoint, limits, descriptor, kind)
            self._process = LimitedProcess(
                "charonia-media", make_answer, *arguments, inherited=(descriptor,), niceness=_NICENESS
            )
        except (OSError, CallLost) as error:
            raise Unavailable(f"a process that prepares {self._noun}s cannot be started: {error}") from error
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
                    raise Unavailable(f"the process that prepares {self._noun}s did not start in time")
            answer = self._ask(b"")
        except (CallLost, TimeLimitExceeded) as error:
            raise Unavailable(f"the process that prepares {self._noun}s did not start: {error}") from error
        if answer.facts is None:
            raise Internal(f"the process that prepares {self._noun}s does not know its processor")
        return answer.facts

    def prepare(self, data: bytes, digest: bytes) -> PreparedMedium:
        """The prepared medium of a file. Raises `InvalidArgument` for one that is broken or costs too much: unless the
        worker is `alive` afterwards, it cost the process its life."""
        try:
            answer = self._ask(data)
        except TimeLimitExceeded as error:
            raise InvalidArgument(f"preparing the {self._noun} takes {error}") from None
        except CallLost as error:
            allowed = self._limits.memory_for(self._kind) >> 20
            message = f"preparing the {self._noun} takes more than {allowed} MiB, or breaks a library"
            raise InvalidArgument(f"{message} ({error})") from None
        inputs = copy_arrays(answer.arrays, self._memory)
        if sum(array.nbytes for array in inputs.values()) > _KEPT and hasattr(mmap, "MADV_REMOVE"):
            self._memory.madvise(mmap.MADV_REMOVE)
        return PreparedMedium(self._kind, digest, answer.placeholder, inputs, answer.grid)

    def _ask(self, message: bytes) -> PreparedAnswer:
        limits = CallLimits(self._limits.seconds_for(self._kind), self._limits.memory_for(self._kind))
        sent = self._process.call(message, limits)
        answer = msgspec.msgpack.decode(sent, type=PreparedAnswer)
        if answer.error is not None:
            raise answer.error.error()
        return answer

    def close(self) -> None:
        if self._process.alive:
            self._process.close()
        self._memory.close()
