"""Messages between an engine core and its ranks, as msgpack arrays; step plans have a codec of their own."""

from typing import TypeAlias

import msgspec
import numpy as np

from ...core.logprobs import Logprobs, PromptLogprobs
from ...processes.log_forwarding import LogRecordMessage
from ...scheduler.plan import StepResult
from ..worker.executor import Capacity

PLAN_PREFIX = b"\0"
"""The first byte of a message that is a plan; no command begins with it."""


class JoinRanks(msgspec.Struct, array_like=True, tag="meet", frozen=True):
    """All ranks run: join the others at rank 0's store, which listens there."""

    host: str
    port: int


class AllocateCache(msgspec.Struct, array_like=True, tag="allocate", frozen=True):
    """Allocate a cache of so many blocks, in place of any former one."""

    blocks: int


class LeaveRanks(msgspec.Struct, array_like=True, tag="leave", frozen=True):
    """Free everything and exit."""


RankCommand: TypeAlias = JoinRanks | AllocateCache | LeaveRanks


class RankStarted(msgspec.Struct, array_like=True, tag="here", frozen=True):
    """The rank's process runs. Rank 0 tells where its store listens."""

    host: str = ""
    port: int = 0


class RankJoined(msgspec.Struct, array_like=True, tag="joined", frozen=True):
    """The rank is connected with all others."""


class WeightsProgress(msgspec.Struct, array_like=True, tag="progress", frozen=True):
    """The fraction of the rank's weights that is read."""

    fraction: float


class RankLoaded(msgspec.Struct, array_like=True, tag="loaded", frozen=True):
    """The rank's weights are loaded, and this is left for its part of the cache."""

    capacity: Capacity


class CacheAllocated(msgspec.Struct, array_like=True, tag="allocated", frozen=True):
    """The rank's part of the cache is allocated."""


class EncodedResult(msgspec.Struct, array_like=True, tag="result", frozen=True):
    """A `StepResult` whose columns are the bytes of int32."""

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
        written = (self.rows, self.offsets, self.counts, self.tokens)
        rows, offsets, counts, tokens = (np.frombuffer(column, np.int32) for column in written)
        return StepResult(self.step, rows, offsets, counts, tokens, self.logprobs, self.scores)


class RankFailed(msgspec.Struct, array_like=True, tag="broken", frozen=True):
    """The rank ends. `code`: an `ErrorCode`; `lost_peer`: it only lost another rank, whose own report tells more;
    `field`: the parameter that was wrong, if one was."""

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
