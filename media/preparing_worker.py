"""The server's end of a process that prepares media."""

import mmap
import os
from collections.abc import Mapping

import msgspec

from ..core.errors import Internal, InvalidArgument, Unavailable
from ..core.media import KIND_NOUNS, MediaKind, PreparedMedium, plural_nouns
from ..core.media_models import MediaFacts
from ..processes.child_process import anonymous_file
from ..processes.host import LAST_NICENESS, NICENESS
from ..processes.limited_process import CallLimits, CallLost, LimitedProcess, TimeLimitExceeded
from .limits import MediaLimits
from .preparing_process import PreparedAnswer, copy_arrays, make_answer, pack_message

_PATIENCE = 10.0
"""Meanwhile preparing may last so many times as long as it computes."""
_KEPT = 16 << 20
"""Bytes of the shared memory that stay resident after an answer."""


class PreparingWorker:
    """A process that prepares media of some kinds, with the memory that it answers in. For one thread at a time.
    `is_first`: a model waits for it, and not only media that others prepare, too. Raises `Unavailable` if it cannot be
    started."""

    def __init__(
        self,
        checkpoint: str,
        limits: MediaLimits,
        kinds: tuple[MediaKind, ...] = ("image",),
        is_first: bool = True,
    ) -> None:
        self._limits = limits
        self._kinds = kinds
        self._nouns = plural_nouns(kinds)
        size = max(map(limits.max_output_for, kinds))
        descriptor = anonymous_file("charonia-media")
        try:
            os.ftruncate(descriptor, size)
            self._memory = mmap.mmap(descriptor, size)
            arguments = (checkpoint, limits, descriptor, kinds)
            # A decode step never waits for an image.
            niceness = LAST_NICENESS if "image" in kinds else NICENESS
            self._process = LimitedProcess(
                "charonia-media",
                make_answer,
                *arguments,
                inherited=(descriptor,),
                niceness=niceness,
                starts_in_haste=is_first,
            )
        except (OSError, CallLost) as error:
            raise Unavailable(f"a process that prepares {self._nouns} cannot be started: {error}") from error
        finally:
            os.close(descriptor)
        self.kill = self._process.kill
        """Ends the process, from any thread."""

    @property
    def alive(self) -> bool:
        return self._process.alive

    def facts(self) -> Mapping[MediaKind, MediaFacts]:
        """What its processors are. Raises `InvalidArgument` for a checkpoint that lacks one, `Unavailable` if the
        process does not start."""
        try:
            answer = self._ask(b"", self._kinds[0])
        except (CallLost, TimeLimitExceeded) as error:
            raise Unavailable(f"the process that prepares {self._nouns} did not start: {error}") from error
        if not answer.facts:
            raise Internal(f"the process that prepares {self._nouns} does not know its processor")
        return answer.facts

    def prepare(self, kind: MediaKind, data: bytes, digest: bytes, options: str = "") -> PreparedMedium:
        """The prepared medium of a file; `options` as of `MediaSource`. Raises `InvalidArgument` for one that is broken
        or costs too much: unless the worker is `alive` afterwards, it cost the process its life."""
        noun = KIND_NOUNS[kind]
        try:
            answer = self._ask(pack_message(self._kinds.index(kind), options, data), kind)
        except TimeLimitExceeded as error:
            raise InvalidArgument(f"preparing the {noun} takes {error}") from None
        except CallLost as error:
            allowed = self._limits.memory_for(kind) >> 20
            message = f"preparing the {noun} takes more than {allowed} MiB, or breaks a library"
            raise InvalidArgument(f"{message} ({error})") from None
        inputs = copy_arrays(answer.arrays, self._memory)
        if sum(array.nbytes for array in inputs.values()) > _KEPT and hasattr(mmap, "MADV_REMOVE"):
            self._memory.madvise(mmap.MADV_REMOVE)
        return PreparedMedium(kind, digest, answer.placeholder, inputs, answer.grid, answer.seconds)

    def _ask(self, message: bytes, kind: MediaKind) -> PreparedAnswer:
        limits = CallLimits(self._limits.seconds_for(kind), self._limits.memory_for(kind), _PATIENCE)
        sent = self._process.call(message, limits)
        answer = msgspec.msgpack.decode(sent, type=PreparedAnswer)
        if answer.error is not None:
            raise answer.error.error()
        return answer

    def close(self) -> None:
        if self._process.alive:
            self._process.close()
        self._memory.close()
