"""What the core and its ranks say to each other, plans apart: msgpack arrays."""

from typing import TypeAlias

import msgspec
import numpy as np

from ...core.logprobs import Logprobs, PromptLogprobs
from ...processes.log_forwarding import LogRecordMessage
from ...scheduler.plan import IntArray, StepResult
from ..worker.executor import Capacity

PLAN_PREFIX = b"\0"
"""What begins a message that is a plan; no command begins so."""


class JoinRanks(msgspec.Struct, array_like=True, tag="meet", frozen=True):
    """All ranks are there: come together at the store that rank 0 keeps."""

    host: str
    port: int


class AllocateCache(msgspec.Struct, array_like=True, tag="allocate", frozen=True):
    """Make a cache of so many blocks and begin anew."""

    blocks: int


class LeaveRanks(msgspec.Struct, array_like=True, tag="leave", frozen=True):
    """Let go of everything and exit."""


RankCommand: TypeAlias = JoinRanks | AllocateCache | LeaveRanks


class RankStarted(msgspec.Struct, array_like=True, tag="here", frozen=True):
    """The rank runs. Rank 0 says where its store listens."""

    host: str = ""
    port: int = 0


class RankJoined(msgspec.Struct, array_like=True, tag="joined", frozen=True):
    """It has met the others."""


class WeightsProgress(msgspec.Struct, array_like=True, tag="progress", frozen=True):
    """So much of its weights is read."""

    fraction: float


class RankLoaded(msgspec.Struct, array_like=True, tag="loaded", frozen=True):
    """See `executor.base.Capacity`."""

    vocab_size: int
    max_model_len: int
    block_bytes: int
    free_bytes: int
    machine: str = ""

    @classmethod
    def from_capacity(cls, capacity: Capacity) -> "RankLoaded":
        return cls(*capacity)

    def to_capacity(self) -> Capacity:
        return Capacity(*msgspec.structs.astuple(self))


class CacheAllocated(msgspec.Struct, array_like=True, tag="allocated", frozen=True):
    """Its cache is there."""


class EncodedResult(msgspec.Struct, array_like=True, tag="result", frozen=True):
    """A step's result, integers as int32 bytes."""

    step: int
    rows: bytes
    offsets: bytes
    counts: bytes
    tokens: bytes
    logprobs: list[Logprobs | None] = []
    scores: list[tuple[int, PromptLogprobs]] = []

    @classmethod
    def from_result(cls, result: StepResult) -> "EncodedResult":
        step, *columns, logprobs, scores = result
        rows, offsets, counts, tokens = (column.tobytes() for column in columns)
        return cls(step, rows, offsets, counts, tokens, list(logprobs), list(scores))

    def to_result(self) -> StepResult:
        rows, offsets, counts = map(_column, (self.rows, self.offsets, self.counts))
        return StepResult(self.step, rows, offsets, counts, _column(self.tokens), self.logprobs, self.scores)


def _column(written: bytes) -> IntArray:
    return np.frombuffer(written, np.int32)


class RankFailed(msgspec.Struct, array_like=True, tag="broken", frozen=True):
    """Last words. `code`: see `core.errors.Code`. `bereft`: it only lost another rank, which knows better why. `field`:
    the parameter that was wrong, if one was."""

    message: str
    code: str
    lost_peer: bool = False
    field: str = ""


RankReport: TypeAlias = (
    RankStarted
    | RankJoined
    | WeightsProgress
    | RankLoaded
    | CacheAllocated
    | EncodedResult
    | RankFailed
    | LogRecordMessage
)
