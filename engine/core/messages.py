"""The messages between the server's process and an engine core: msgpack arrays over ZeroMQ.

The core sends at most one message per step, never one per token.
"""

from typing import Any, TypeAlias

import msgspec
import numpy as np

from ...core.adapter import Adapter
from ...core.errors import SentError
from ...core.kv_transfer import TransferAddress
from ...core.metrics import EngineTotals
from ...core.request import GuidedDecoding
from ...processes.log_forwarding import LogRecordMessage
from ...scheduler.plan import IntArray, StepUpdates
from ...scheduler.sequence import SequenceSpec
from ..transfer.prefix_client import RemotePrefix


class AddRequest(msgspec.Struct, array_like=True, tag="add", frozen=True, eq=False):
    """A new sequence that fits the model's length, with its constraints."""

    spec: SequenceSpec
    constraint: GuidedDecoding | None = None
    timeout: float = 0.0
    """Seconds left to it; 0 is no limit."""
    thinking: int | None = None
    """The new tokens after which `thinking_end` is forced, unless it came before; None for no limit."""
    thinking_end: list[int] = []
    handle: str = ""
    """By which another server will ask for the prompt's cache; "" if none will."""
    remote: RemotePrefix | None = None
    """Where the prompt's cache is to be fetched."""

    @property
    def limits_thinking(self) -> bool:
        return self.thinking is not None and bool(self.thinking_end)

    @property
    def is_constrained(self) -> bool:
        """Whether the core follows its tokens, and may force some."""
        return self.spec.max_tokens > 0 and (self.constraint is not None or self.limits_thinking)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt as it was sent: where an encoder reads them, the decoder's own are others."""
        encoded = self.spec.encoded
        return len(self.spec.prompt) if encoded is None or not encoded.tokens else encoded.tokens


class AbortRequests(msgspec.Struct, array_like=True, tag="abort", frozen=True):
    """End these sequences; unknown keys are ignored."""

    keys: list[int]


class ReleaseScope(msgspec.Struct, array_like=True, tag="release_scope", frozen=True):
    """What was retained for this scope of a tenant's is not wanted any more; unknown ones are ignored."""

    tenant: str
    scope: str


class LoadAdapter(msgspec.Struct, array_like=True, tag="load_adapter", frozen=True):
    """Read the adapter in a directory beside the steps; `AdapterLoaded` or `AdapterRefused` answers with `number`."""

    number: int
    path: str


class UnloadAdapter(msgspec.Struct, array_like=True, tag="unload_adapter", frozen=True):
    """Take no more requests with this adapter, and forget it when its last sequence ends."""

    digest: str


class PatientWorkWaits(msgspec.Struct, array_like=True, tag="patient_work", frozen=True):
    """Whether processes that only compute between steps have something to do."""

    waits: bool


class Shutdown(msgspec.Struct, array_like=True, tag="shutdown", frozen=True):
    """Stop the loop and exit."""


ToCore: TypeAlias = (
    AddRequest | AbortRequests | ReleaseScope | LoadAdapter | UnloadAdapter | PatientWorkWaits | Shutdown
)


def encode_tokens(tokens: Any) -> bytes:
    """The `enc_hook` of encoders for messages with arrays of token ids."""
    if isinstance(tokens, np.ndarray):
        return tokens.astype(np.int32, copy=False).tobytes()
    raise NotImplementedError(f"cannot send a {type(tokens).__name__}")


def decode_tokens(_: type, content: bytes) -> IntArray:
    """The `dec_hook` of decoders for messages with arrays of token ids, which cannot be written to."""
    return np.frombuffer(content, np.int32)


class CoreLoading(msgspec.Struct, array_like=True, tag="loading", frozen=True):
    """Progress of a start-up phase: `fraction` of it is done after `seconds`."""

    phase: str
    fraction: float
    seconds: float
    detail: str = ""


class CoreReady(msgspec.Struct, array_like=True, tag="ready", frozen=True):
    """The warm-up generated a token: the core serves requests."""

    vocab_size: int
    max_model_len: int
    block_size: int
    blocks: int
    cache_bytes: int = 0
    """The host's memory that a full cache takes."""
    groups: int = 1
    """Groups of layers, each of which has blocks of its own for the same tokens."""
    retained_blocks: int = 0
    """The most blocks that sessions may retain."""
    splits: bool = True
    """Whether twice as many ranks of a tensor could share the model."""
    source_tokens: int = 0
    """The most tokens of a prompt that an encoder reads, while a decoder writes what follows; 0: there is none."""
    source_vocab_size: int = 0
    """The vocabulary of that encoder, which may be another one than the decoder's."""
    transfer: TransferAddress | None = None
    """Where other servers fetch what it computes for them; None: nowhere."""


class EngineLoad(msgspec.Struct, array_like=True, frozen=True):
    """The engine's state after a turn of its loop."""

    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    step_seconds: float = 0.0
    """Recent step time (moving average); 0 before the first step."""
    state_snapshots: int = 0
    """Snapshots of recurrent states that can be found."""
    host_snapshots: int = 0
    """Snapshots in the host's memory; some are on the device too."""
    retained_scopes: int = 0
    """Scopes of sessions that there are."""
    retained_blocks: int = 0
    """Blocks that are kept for them, and that no sequence holds."""
    held_blocks: int = 0
    """Blocks that are held for other servers."""
    awaiting_prefix: dict[str, int] = {}
    """Sequences that wait for what their prompts begin with, by the name of the `PrefixOrigin`."""


class StepStats(msgspec.Struct, array_like=True, frozen=True):
    """The step that a turn of the loop waited for; all zero if there was none."""

    seconds: float = 0.0
    """Seconds of the whole turn."""
    tokens: int = 0
    sequences: int = 0


NO_STEP = StepStats()


class RequestUpdates(msgspec.Struct, array_like=True, tag="updates", frozen=True):
    """The outcome of a turn of the loop. Without updates it is the heartbeat."""

    step: int
    updates: StepUpdates
    load: EngineLoad
    stats: StepStats = NO_STEP
    totals: EngineTotals = msgspec.field(default_factory=EngineTotals)


class RequestRejected(msgspec.Struct, array_like=True, tag="refused", frozen=True):
    """A request that can never be satisfied, or whose grammar turned out to cost too much."""

    key: int
    error: SentError


class AdapterLoaded(msgspec.Struct, array_like=True, tag="adapter_loaded", frozen=True):
    """Every rank computes with the adapter. Its `name` is empty, and `bytes` are those of all ranks."""

    number: int
    adapter: Adapter


class AdapterRefused(msgspec.Struct, array_like=True, tag="adapter_refused", frozen=True):
    """The adapter was not loaded."""

    number: int
    error: SentError


class CoreFailed(msgspec.Struct, array_like=True, tag="failed", frozen=True):
    """The core could not start, or its loop broke; it exits after this."""

    error: SentError


AdapterReply: TypeAlias = AdapterLoaded | AdapterRefused
FromCore: TypeAlias = (
    CoreLoading | CoreReady | RequestUpdates | RequestRejected | AdapterReply | CoreFailed | LogRecordMessage
)
