"""The messages between a worker and the hub: msgpack arrays, many in a frame (`link.py`).

A call that the hub answers, and a request that it knows, has a `key` that its worker chose. Times are of the monotonic
clock, which all processes of a machine share. `sequence_messages.py` has those about sequences of language models,
`state_messages.py` those of no request.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from ..core.errors import SentError
from ..core.logprobs import TokenPiece, TokenPieces
from ..core.request import FinishReason, GenerateChunk, GenerateRequest, ParameterValue, TokenizeRequest
from ..core.request_context import NO_HINTS, GatewayHints, RequestContext, RequestEnd, SequenceRecord
from ..core.sampling import SamplingParams
from ..engine.core.messages import decode_tokens, encode_tokens
from .sequence_messages import AbortSequence, CancelRequests, SequenceSteps, SubmitSequence
from .state_messages import (
    Heartbeat,
    HubSnapshot,
    LogText,
    SnapshotAcknowledged,
    StopWorker,
    WorkerListening,
    WorkerState,
)
from .tensors import SentTensor


class RequestOrigin(msgspec.Struct, array_like=True, frozen=True):
    """The fields of a worker's `RequestContext` that count in the hub; `headers` where routes or spans need them."""

    endpoint: str
    tenant: str
    tenant_weight: float
    arrived_at: float
    id: str = ""
    client_id: str = ""
    headers: list[tuple[bytes, bytes]] = []
    client: str = ""
    hints: GatewayHints = NO_HINTS

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
            context.hints,
        )

    def note_in(self, context: RequestContext, logged: bool) -> None:
        """Make a context that was just opened that of this request. `logged`: by the worker."""
        context.tenant = self.tenant
        context.tenant_weight = self.tenant_weight
        context.arrived_at = self.arrived_at
        context.id = self.id
        context.client_id = self.client_id
        context.client = self.client
        context.hints = self.hints
        context.logged = logged


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


# From a worker


class ModelCall(msgspec.Struct, array_like=True, tag="infer", frozen=True):
    """A call of a model of tensors. Where the hub has no model for its request yet, by an earlier call or an
    `AcquireCall`, it looks `model` and `version` up."""

    key: int

    request: int
    """The key of the request."""

    origin: msgspec.Raw
    """An encoded `RequestOrigin`, which models that answer in the event loop do without."""

    model: str
    version: str

    request_id: str
    """The client's, as v2 has it."""

    inputs: list[SentTensor]
    outputs: tuple[str, ...] | None
    parameters: dict[str, ParameterValue]

    checked: int = 0
    """The number of the loaded model whose config the request fits; 0 if the hub is to say what does not fit."""


class TextCall(msgspec.Struct, array_like=True, tag="text", frozen=True):
    """A generation for the request `request`, whose model the hub has acquired and is to answer for as a whole; or its
    `prompt` alone, whose token ids one chunk answers."""

    key: int
    request: int
    generation: GenerateRequest | None
    prompt: TokenizeRequest | None = None


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
    """The worker has read so many responses of a stream: as many more may come."""

    key: int
    count: int


class CancelCall(msgspec.Struct, array_like=True, tag="cancel", frozen=True):
    """The worker wants nothing more of a `ModelCall`, or of another call that waits for its answer."""

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


class HttpCall(msgspec.Struct, array_like=True, tag="http", frozen=True):
    """A request over HTTP that the hub answers: `HttpAnswer`."""

    key: int
    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes

    tenant: str
    """The client's, by its key, which the worker has checked."""

    tenant_weight: float

    in_pieces: bool = False
    """Whether its body, and the answer's, come as `HttpPiece`s, each when there is a `PieceWanted`."""


class HttpPiece(msgspec.Struct, array_like=True, tag="piece", frozen=True):
    """The next piece of a body; `more` are to come. Goes both ways."""

    key: int
    data: bytes
    more: bool


class PieceWanted(msgspec.Struct, array_like=True, tag="piece_wanted", frozen=True):
    """The other end took a piece, and wants the next. Goes both ways."""

    key: int


class GrpcCall(msgspec.Struct, array_like=True, tag="grpc", frozen=True):
    """A control RPC with its encoded message: `GrpcAnswer` or `CallFailed`."""

    key: int
    rpc: str
    message: bytes


FromWorker: TypeAlias = (
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
    | SnapshotAcknowledged
    | WorkerListening
    | WorkerState
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
    """News beside responses, since the last notes: warnings for the client, what was generated, and the model and
    version that answer, where a sequence goes to another arm of a route."""

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
    """A chunk of a generation, the pieces of whose tokens a worker has itself."""

    key: int
    chunk: GenerateChunk
    notes: ResponseNotes | None = None


class ResponsesEnded(msgspec.Struct, array_like=True, tag="end", frozen=True):
    """A stream of responses has ended."""

    key: int


class AcquiredModel(msgspec.Struct, array_like=True, tag="acquired", frozen=True):
    """The model of an `AcquireCall`."""

    key: int

    number: int
    """The loaded model's."""

    model: str
    """A field of the request's context, as the next three are."""

    version: str
    adapter: str
    route: str

    config: bytes
    """Pickled, where it is none of the snapshot's."""

    kv_tokens: tuple[int, int]
    """Tokens that its cache holds, and can hold."""

    follows: bool = False
    """Whether the hub answers for it as a whole, and logs the request."""

    refusal: SentError | None = None
    """Why no sequence of it may begin."""


class CallFailed(msgspec.Struct, array_like=True, tag="failed", frozen=True):
    """The error of a call, which has no answer, or no further one."""

    key: int
    error: SentError
    notes: ResponseNotes | None = None


class HttpAnswer(msgspec.Struct, array_like=True, tag="http_answer", frozen=True):
    """The answer to an `HttpCall`; `more` pieces of its body follow."""

    key: int
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    more: bool = False


class GrpcAnswer(msgspec.Struct, array_like=True, tag="grpc_answer", frozen=True):
    """The fields of a response to a `GrpcCall`, as JSON has them."""

    key: int
    fields: dict[str, Any]


ToWorker: TypeAlias = (
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
    | StopWorker
)


def encode_part(part: Any) -> bytes:
    """The `enc_hook` of encoders for messages."""
    return b"" if isinstance(part, TokenPieces) else encode_tokens(part)


def _decode_part(kind: type, content: bytes) -> Any:
    return _NO_PIECES if kind is TokenPieces else decode_tokens(kind, content)


_NO_PIECES = TokenPieces(lambda token: TokenPiece("", b""))
encode_origin = msgspec.msgpack.Encoder().encode
decode_origin = msgspec.msgpack.Decoder(RequestOrigin).decode
decode_from_worker = msgspec.msgpack.Decoder(list[FromWorker], dec_hook=decode_tokens).decode
decode_to_worker = msgspec.msgpack.Decoder(list[ToWorker], dec_hook=_decode_part).decode
