"""Messages between an engine core and its ranks, as msgpack arrays; a numpy array is its dtype, shape and bytes."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...core.adapter import Adapter
from ...core.eager_reason import EagerReason
from ...core.errors import SentError
from ...core.metrics import ImageTotals
from ...kvcache.exchange.directory_tier import DroppedImages
from ...kvcache.tiers.landed_images import ImagePlace
from ...processes.log_forwarding import LogRecordMessage
from ...scheduler.plan import IntArray, MaskArray, StepPlan, StepResult
from ..worker.executor import CacheCopies, CachePlaces, Capacity, ImageLayout
from ..worker.image_files import ImageDirectorySettings


class SampledBatch(NamedTuple):
    """Sampled tokens, for the stages that do not sample: `tokens[i]` at position `positions[i]` of `rows[i]`, all
    [S]."""

    rows: IntArray
    positions: IntArray
    tokens: IntArray

    @classmethod
    def from_results(cls, results: Sequence[StepResult]) -> "SampledBatch":
        """The tokens of steps in which no row occurs twice."""
        columns = (result[1:5] for result in results)
        rows, offsets, counts, tokens = (np.concatenate(column) for column in zip(*columns, strict=True))
        before = np.repeat(counts.cumsum(dtype=np.int32) - counts, counts)
        positions = np.repeat(offsets, counts) + np.arange(len(tokens), dtype=np.int32) - before
        return cls(np.repeat(rows, counts), positions, tokens)


class JoinRanks(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """All ranks run: join the others at rank 0's store, which listens there."""

    host: str
    port: int


class AllocateCache(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Allocate a cache of so many blocks and snapshots of states, in place of any former one, and of the host's memory
    for both."""

    blocks: int
    host_blocks: int = 0
    snapshots: int = 0
    host_snapshots: int = 0


class ComputeStep(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Compute `plan`. If it has masked rows, the next command is their `ProvideMasks`."""

    plan: StepPlan
    sampled: SampledBatch | None = None
    """Tokens of the steps before, which the plan may need."""
    clock: float = 0.0
    """The core's, in seconds: ranks capture graphs by it, all at the same step."""


class CaptureGraph(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Capture a CUDA graph that is missing, one of the usual ones or any; `GraphsCaptured` answers."""

    clock: float
    usual: bool


class OpenDirectory(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Move images from and to this directory from now on."""

    settings: ImageDirectorySettings


class FetchImages(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Let these images land, beside the steps; `ImagesMoved` answers, with the `number`."""

    number: int
    images: list[ImagePlace]


class StoreImages(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Write these images, as they are now; `ImagesMoved` answers, with the `number`."""

    number: int
    images: list[ImagePlace]


class DropImages(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Forget these landed images."""

    dropped: DroppedImages


ImageCommand: TypeAlias = OpenDirectory | FetchImages | StoreImages | DropImages


class LoadRankAdapter(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Read an adapter's directory, beside the steps; `RankAdapterLoaded` or `RankAdapterRefused` answers."""

    path: str


class UnloadRankAdapter(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Forget an adapter, which no later plan has."""

    digest: str


class ProvideMasks(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The masks of the plan before."""

    masks: MaskArray


class TakePlaces(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Report what these places of the cache have, with `PlacesTaken`."""

    places: CachePlaces


class PutPlaces(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Make the copies, and let these places of the cache have this content of the rank's."""

    places: CachePlaces
    content: memoryview
    copies: CacheCopies


class LeaveRanks(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Free everything and exit."""


RankCommand: TypeAlias = (
    JoinRanks
    | AllocateCache
    | ComputeStep
    | CaptureGraph
    | OpenDirectory
    | FetchImages
    | StoreImages
    | DropImages
    | LoadRankAdapter
    | UnloadRankAdapter
    | ProvideMasks
    | TakePlaces
    | PutPlaces
    | LeaveRanks
)


class RankStarted(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The rank's process runs. Rank 0 adds the address of its store."""

    host: str = ""
    port: int = 0


class RankJoined(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The rank is connected with all others."""


class WeightsProgress(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The fraction of the rank's weights that is read."""

    fraction: float


class RankLoaded(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The rank's weights are loaded; `capacity` is left for its part of the cache."""

    capacity: Capacity


class CacheAllocated(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The rank's part of the cache is allocated; `layout` is that of its places."""

    layout: ImageLayout = ImageLayout("", 0, 0)


class StepComputed(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The result of the oldest step that has none yet."""

    result: StepResult
    eager_steps: dict[EagerReason, int] = {}
    """See `Executor.eager_steps`: all so far."""
    failed_captures: int = 0


class GraphsCaptured(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The fraction of the rank's graphs that a `CaptureGraph` asked for and that are there; 1.0: none is left to
    capture now."""

    share: float


class RankAdapterLoaded(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The rank has its share of the adapter of the oldest unanswered load; its `name` is empty."""

    adapter: Adapter


class RankAdapterRefused(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The rank has not loaded that adapter."""

    error: SentError


AdapterReport: TypeAlias = RankAdapterLoaded | RankAdapterRefused


class ImagesMoved(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Which of the images of a `FetchImages` have landed, or of a `StoreImages` lie in the directory."""

    number: int
    succeeded: list[bool]


class ImagesCounted(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """What the rank has done with images so far."""

    totals: ImageTotals


ImageReport: TypeAlias = ImagesMoved | ImagesCounted


class PlacesTaken(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The content of the places of the oldest unanswered `TakePlaces`."""

    content: bytes


class RankFailed(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The rank ends. `lost_peer`: it has lost another rank, whose own report says more."""

    error: SentError
    lost_peer: bool = False


RankReport: TypeAlias = (
    RankStarted
    | RankJoined
    | WeightsProgress
    | RankLoaded
    | CacheAllocated
    | StepComputed
    | GraphsCaptured
    | RankAdapterLoaded
    | RankAdapterRefused
    | ImagesMoved
    | ImagesCounted
    | PlacesTaken
    | RankFailed
    | LogRecordMessage
)


def _encode_array(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    return array.dtype.str, array.shape, array.tobytes()


def _decode_array(_: type, encoded: tuple[str, list[int], bytes]) -> NDArray[Any]:
    dtype, shape, content = encoded
    return np.frombuffer(bytearray(content), dtype).reshape(shape)


encode_message = msgspec.msgpack.Encoder(enc_hook=_encode_array).encode
"""The bytes of a command or report."""
decode_command = msgspec.msgpack.Decoder[RankCommand](RankCommand, dec_hook=_decode_array).decode
decode_report = msgspec.msgpack.Decoder[RankReport](RankReport, dec_hook=_decode_array).decode
