"""The messages between a frontend and the hub: msgpack arrays, many in a frame (`link.py`).

A call that the hub answers has a `key`, and so has each request that it knows, which its frontend chose. Times are of
the monotonic clock, which all processes of a machine share.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import asdict

from ..core.errors import (
    AlreadyExists,
    Cancelled,
    CharoniaError,
    Conflict,
    ContextLengthExceeded,
    DiskFull,
    Internal,
    InvalidArgument,
    NotFound,
    NotReady,
    QueueFull,
    RequestTimeout,
    ServerExiting,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from ..core.logprobs import Logprobs, PromptLogprobs
from ..core.request import FinishReason, GenerateChunk, GenerateRequest, ParameterValue
from ..core.request_context import RequestContext, RequestEnd, SequenceRecord
from ..core.sampling import SamplingParams
from ..engine.core.messages import AddRequest, decode_tokens
from ..processes.client_shared_memory import CudaMemoryRegion, SharedMemoryRegion
from ..telemetry.logging_setup import LogSettings
from ..telemetry.loop_lag import LoopState
from .tensors import SentTensor

_ERRORS: dict[str, type[CharoniaError]] = {
    each.__name__: each
    for each in (
        AlreadyExists,
        Cancelled,
        CharoniaError,
        Conflict,
        ContextLengthExceeded,
        DiskFull,
        Internal,
        InvalidArgument,
        NotFound,
        NotReady,
        RequestTimeout,
        ServerExiting,
        Unauthenticated,
        Unavailable,
        Unsupported,
    )
}


class SentError(msgspec.Struct, array_like=True, frozen=True):
    """An error for a client. `kind`: the name of its class, or of the first of its bases that is one of `core.errors`;
    `limit`: of a `QueueFull`."""

    kind: str
    message: str
    field: str | None = None
    retry_after: float = 0.0
    limit: str = ""

    @classmethod
    def of(cls, error: CharoniaError) -> "SentError":
        message = error.message.encode(errors="backslashreplace").decode()  # it may quote lone surrogates
        if isinstance(error, QueueFull):
            return cls("QueueFull", message, error.field, error.retry_after, error.limit)
        kind = next(each.__name__ for each in type(error).__mro__ if each.__name__ in _ERRORS)
        return cls(kind, message, error.field, error.retry_after)

    def error(self) -> CharoniaError:
        if self.kind == "QueueFull":
            limit: Any = self.limit
            return QueueFull(self.message, retry_after=self.retry_after, limit=limit)
        error = _ERRORS[self.kind](self.message)
        error.field, error.retry_after = self.field, self.retry_after
        return error


class RequestOrigin(msgspec.Struct, array_like=True, frozen=True):
    """What a frontend knows of a request that counts in the hub: fields of `RequestContext`. `headers` where a route
    may go by them, or spans are sent."""

    endpoint: str
    tenant: str
    tenant_weight: float
    arrived_at: float
    id: str = ""
    client_id: str = ""
    headers: list[tuple[bytes, bytes]] = []
    client: str = ""

    @classmethod
    def of(cls, context: RequestContext, with_headers: bool) -> "RequestOrigin":
        return cls(
            context.endpoint,
            context.tenant,
            context.tenant_weight,
            context.arrived_at,
            context.id,
            context.client_id,
            [(_bytes(name), _bytes(value)) for name, value in context.headers] if with_headers else [],
            context.client,
        )

    def note_in(self, context: RequestContext, logged: bool) -> None:
        """Make a context that was just opened that of this request. `logged`: by the frontend."""
        context.tenant, context.tenant_weight, context.arrived_at = self.tenant, self.tenant_weight, self.arrived_at
        context.id, context.client_id, context.client = self.id, self.client_id, self.client
        context.logged = logged


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


# From a frontend


class ModelCall(msgspec.Struct, array_like=True, tag="infer", frozen=True):
    """A call of a model of tensors, for the request `request`. Where the hub has no model for that yet, by an earlier
    call or an `AcquireCall`, it looks `model` and `version` up. `origin`: an encoded `RequestOrigin`, which models that
    answer in the event loop do without. `checked`: the number of the loaded model whose config the request fits, 0 if
    the hub is to say what does not fit."""

    key: int
    request: int
    origin: msgspec.Raw
    model: str
    version: str
    request_id: str
    inputs: list[SentTensor]
    outputs: tuple[str, ...] | None
    parameters: dict[str, ParameterValue]
    checked: int = 0


class TextCall(msgspec.Struct, array_like=True, tag="text", frozen=True):
    """A generation for the request `request`, whose model the hub has acquired and is to answer for as a whole."""

    key: int
    request: int
    asked: GenerateRequest


class AcquireCall(msgspec.Struct, array_like=True, tag="acquire", frozen=True):
    """Find the model of the request `key`, and keep it until the request ends; `AcquiredModel` or `CallFailed` answers.
    `prompts`, `choices`: the request's counts of them, as far as they are known. `body`: see `RequestContext`, where
    routes may go by it."""

    key: int
    origin: RequestOrigin
    model: str
    version: str
    prompts: int = 1
    choices: int = 1
    body: Mapping[str, Any] | None = None


class TensorsRead(msgspec.Struct, array_like=True, tag="tensors", frozen=True):
    """Blocks of the other end's arena that are needed no more. Goes both ways."""

    offsets: list[int]


class ResponsesRead(msgspec.Struct, array_like=True, tag="read", frozen=True):
    """So many responses of a stream were read: as many more may come."""

    key: int
    count: int


class CancelCall(msgspec.Struct, array_like=True, tag="cancel", frozen=True):
    """Nothing more is wanted of an `ModelCall`, or of another call that waits for its answer."""

    key: int


class SentSequence(msgspec.Struct, array_like=True, eq=False):
    """A `core.request_context.SequenceRecord` of another process."""

    choice: int = 0
    sampling: SamplingParams = SamplingParams()
    opened: float = 0.0
    submitted: float | None = None
    begun: float | None = None
    first: float | None = None
    last: float | None = None
    prompt: int | None = 0
    cached: int | None = 0
    generated: int = 0
    finish_reason: FinishReason | None = None
    end: RequestEnd | None = None

    @classmethod
    def of(cls, record: SequenceRecord) -> "SentSequence":
        return cls(*(getattr(record, name) for name in cls.__struct_fields__))


class EndedRequests(msgspec.Struct, array_like=True, tag="ended", frozen=True):
    """Requests that the hub knows have ended: `answered` as it expects, `others` like that, with their protocol's id.
    `sequences` of some, where the hub logs requests and sends their spans."""

    answered: list[int]
    others: list[tuple[int, RequestEnd, str]]
    sequences: list[tuple[int, list[SentSequence]]] = []


class LoneRequest(msgspec.Struct, array_like=True, tag="lone", frozen=True):
    """A request has ended that the hub never heard of: it was refused, or its client left before."""

    origin: RequestOrigin
    model: str
    version: str
    model_found: bool
    end: RequestEnd


class LoraTaskMessage(msgspec.Struct, array_like=True, frozen=True):
    """A `core.adapter.LoraTask`."""

    number: int
    weights: SentTensor | None
    config: SentTensor | None


class SubmitSequence(msgspec.Struct, array_like=True, tag="submit", frozen=True):
    """A sequence for the engine of the model that the request `request` has acquired: `add`, whose adapter goes by its
    name. `opened`: when the frontend began with it. `tokens_wanted`: it is not for its prompt alone. The rest: as in
    `GenerateRequest`."""

    key: int
    request: int
    add: AddRequest
    opened: float
    tokens_wanted: bool
    choice: int
    choice_count: int
    prompt_count: int
    lora_task: LoraTaskMessage | None = None


class AbortSequence(msgspec.Struct, array_like=True, tag="abort", frozen=True):
    """Its reader left."""

    key: int


class CancelRequests(msgspec.Struct, array_like=True, tag="cancel_id", frozen=True):
    """A client ends all generations of a model with its own request id, whichever frontend has them. Goes both ways."""

    model: int
    request_id: str


class HttpCall(msgspec.Struct, array_like=True, tag="http", frozen=True):
    """A request of HTTP that the hub answers: `HttpAnswer`. `in_pieces`: so are its body and the answer's, which come
    as `HttpPiece`s, each when there is a `PieceWanted`."""

    key: int
    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    tenant: str
    tenant_weight: float
    in_pieces: bool = False


class HttpPiece(msgspec.Struct, array_like=True, tag="piece", frozen=True):
    """The next piece of a body; `more` are to come. Goes both ways."""

    key: int
    data: bytes
    more: bool


class PieceWanted(msgspec.Struct, array_like=True, tag="piece_wanted", frozen=True):
    """The one before was taken. Goes both ways."""

    key: int


class GrpcCall(msgspec.Struct, array_like=True, tag="grpc", frozen=True):
    """A control RPC with its encoded message: `GrpcAnswer` or `CallFailed`."""

    key: int
    rpc: str
    message: bytes


class SnapshotTaken(msgspec.Struct, array_like=True, tag="taken", frozen=True):
    """The frontend answers by this snapshot; its language models are ready here."""

    number: int


class FrontendListening(msgspec.Struct, array_like=True, tag="listening", frozen=True):
    """Its sockets take connections."""


class ReaderDelays(msgspec.Struct, array_like=True, frozen=True):
    """What readers of the language model `model` left unread since they were last told of: tokens that came while
    others were unread, and the seconds of their streams."""

    model: int
    merged_tokens: int
    seconds: float


class FrontendState(msgspec.Struct, array_like=True, tag="state", frozen=True):
    """How the frontend's event loop and its clients go; answers a `Heartbeat`."""

    loop: LoopState
    readers: list[ReaderDelays]


class LogText(msgspec.Struct, array_like=True, tag="log", frozen=True):
    """Lines of the frontend's log, as they are to be written."""

    text: str


FromFrontend: TypeAlias = (
    ModelCall
    | TextCall
    | AcquireCall
    | TensorsRead
    | ResponsesRead
    | CancelCall
    | EndedRequests
    | LoneRequest
    | SubmitSequence
    | AbortSequence
    | CancelRequests
    | HttpCall
    | HttpPiece
    | PieceWanted
    | GrpcCall
    | SnapshotTaken
    | FrontendListening
    | FrontendState
    | LogText
)


# From the hub


class CountedText(msgspec.Struct, array_like=True, frozen=True):
    """Tokens of the language models that a request's model asked: as `Usage`; the reason why the last text ended."""

    prompt: int
    generated: int
    cached: int
    finish_reason: str


class ResponseNotes(msgspec.Struct, array_like=True, frozen=True):
    """What is told beside responses, since the last notes: warnings for the client; the model and version that answer,
    where a sequence goes to another arm of a route; what was generated."""

    warnings: list[str] = []
    model: str = ""
    version: str = ""
    text: CountedText | None = None


class ModelAnswer(msgspec.Struct, array_like=True, tag="answer", frozen=True):
    """A response. `final`: as in `InferResponse`; `last`: no other comes."""

    key: int
    outputs: list[SentTensor]
    parameters: dict[str, ParameterValue] = {}
    final: bool = False
    last: bool = False
    notes: ResponseNotes | None = None


class TextAnswer(msgspec.Struct, array_like=True, tag="chunk", frozen=True):
    """A chunk of a generation."""

    key: int
    chunk: GenerateChunk
    notes: ResponseNotes | None = None


class ResponsesEnded(msgspec.Struct, array_like=True, tag="end", frozen=True):
    """A stream of responses has ended."""

    key: int


class AcquiredModel(msgspec.Struct, array_like=True, tag="acquired", frozen=True):
    """The model of an `AcquireCall`. `number`: of the loaded model. `model`, `version`, `adapter`, `route`: for the
    request's context. `config`: pickled, where it is none of the snapshot's. `kv_tokens`: those that its cache holds,
    and can hold. `follows`: the hub answers for it as a whole, and logs the request. `refusal`: why no sequence of it
    may begin."""

    key: int
    number: int
    model: str
    version: str
    adapter: str
    route: str
    config: bytes
    kv_tokens: tuple[int, int]
    follows: bool = False
    refusal: SentError | None = None


class CallFailed(msgspec.Struct, array_like=True, tag="failed", frozen=True):
    """A call has no answer, or no further one."""

    key: int
    error: SentError
    notes: ResponseNotes | None = None


class SequenceSteps(msgspec.Struct, array_like=True, tag="steps", frozen=True):
    """What became of sequences since the last such message, at the time `at`: `keys[i]` got `counts[i]` of `tokens`.

    `started`: (key, prompt tokens found in the prefix cache, when). `finished`: (key, reason). `logprobs`, where there
    are any: (key, those of its new tokens). `prompt_logprobs`: (key, those of the prompt's next tokens). `drafts`:
    (key, tokens drafted and accepted of each step). `failed`: (key, error).
    """

    at: float
    keys: list[int]
    counts: list[int]
    tokens: list[int]
    started: list[tuple[int, int, float]] = []
    finished: list[tuple[int, str]] = []
    logprobs: list[tuple[int, list[Logprobs]]] = []
    prompt_logprobs: list[tuple[int, list[PromptLogprobs]]] = []
    drafts: list[tuple[int, list[tuple[int, int]]]] = []
    failed: list[tuple[int, SentError]] = []


class HttpAnswer(msgspec.Struct, array_like=True, tag="http_answer", frozen=True):
    """`more`: of the body there are further pieces."""

    key: int
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    more: bool = False


class GrpcAnswer(msgspec.Struct, array_like=True, tag="grpc_answer", frozen=True):
    """The fields of a response to a `GrpcCall`, as JSON has them."""

    key: int
    fields: dict[str, Any]


class LogLevels(msgspec.Struct, array_like=True, frozen=True):
    """A `LogSettings`, but for the file, which the hub writes."""

    log_info: bool
    log_warning: bool
    log_error: bool
    log_verbose_level: int
    log_format: str

    @classmethod
    def of(cls, settings: LogSettings) -> "LogLevels":
        return cls(*(getattr(settings, name) for name in cls.__struct_fields__))

    def settings(self) -> LogSettings:
        return LogSettings(**asdict(self))


class HubSnapshot(msgspec.Struct, array_like=True, tag="snapshot", frozen=True):
    """What a frontend knows of the hub until the next one; `SnapshotTaken` answers. `models`: pickled, see
    `snapshot.ServedModels`. `has_routes`: requests may be for routes, which may go by headers; `has_traces`: they may
    be traced, so that the hub wants to know at once when they end."""

    number: int
    ready: bool
    exiting: bool
    has_routes: bool
    has_traces: bool
    models: bytes
    logs: LogLevels
    regions: list[SharedMemoryRegion]
    cuda_regions: list[CudaMemoryRegion]


BEAT_SECONDS = 1.0
"""Between two heartbeats."""

HUNG_SECONDS = 60.0
"""Of silence, after which the other end is taken to hang."""


class Heartbeat(msgspec.Struct, array_like=True, tag="beat", frozen=True):
    """The hub's loop turns; `FrontendState` answers."""


class StopFrontend(msgspec.Struct, array_like=True, tag="stop", frozen=True):
    """Close the sockets and exit; with `force`, end what still runs."""

    force: bool


ToFrontend: TypeAlias = (
    ModelAnswer
    | TextAnswer
    | TensorsRead
    | ResponsesEnded
    | AcquiredModel
    | CallFailed
    | SequenceSteps
    | CancelRequests
    | HttpAnswer
    | HttpPiece
    | PieceWanted
    | GrpcAnswer
    | HubSnapshot
    | Heartbeat
    | StopFrontend
)

encode_origin = msgspec.msgpack.Encoder().encode
decode_origin = msgspec.msgpack.Decoder(RequestOrigin).decode
decode_from_frontend = msgspec.msgpack.Decoder(list[FromFrontend], dec_hook=decode_tokens).decode
decode_to_frontend = msgspec.msgpack.Decoder(list[ToFrontend]).decode
