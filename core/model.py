"""The contract: a request goes into a Model, a stream of responses comes out."""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

from .adapter import Adapter
from .media import MediaKind
from .metrics import Reading, VersionStatistics
from .request import GenerateChunk, GenerateRequest, InferRequest, InferResponse, TokenizedPrompt, TokenizeRequest
from .request_context import ExecutionTimes, RequestContext, RequestEnd
from .tensor import Tensor, TensorSpec

MODELS_PARAMETER = "models"

_ANY = "*"
_MAY_BE_MISSING = "?"


@dataclass(frozen=True, slots=True)
class DeclaredModels:
    """The models that another model may ask, from its parameter `models`: names between commas. A name that ends in `?`
    is optional; `*` stands for any model."""

    required: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    any: bool = False

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> "DeclaredModels":
        names = {name.strip() for name in parameters.get(MODELS_PARAMETER, "").split(",")} - {"", _MAY_BE_MISSING}
        optional = frozenset(name.removesuffix(_MAY_BE_MISSING) for name in names if name.endswith(_MAY_BE_MISSING))
        required = frozenset(name for name in names if not name.endswith(_MAY_BE_MISSING)) - {_ANY}
        return cls(required, optional - required, _ANY in names)

    @property
    def names(self) -> frozenset[str]:
        return self.required | self.optional

    def allows(self, name: str) -> bool:
        return self.any or name in self.names


RawConfig: TypeAlias = Mapping[str, Any]
"""A model's config, or a message in it, as /config shows it: protobuf's JSON mapping with the names and order of the
.proto."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The completed config of one version."""

    name: str
    version: str
    backend: str
    platform: str = ""
    max_batch_size: int = 0
    decoupled: bool = False
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    parameters: Mapping[str, str] = field(default_factory=dict)
    created: int = 0
    """Seconds since the epoch."""
    fingerprint: str = ""
    """Identifies the files that a language model was read from."""
    raw: RawConfig = field(default_factory=dict)
    """The whole config."""
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The classes of outputs that have a label file, by output."""
    implied_stream: bool = True
    """The value of an input `stream` that a request to generate_stream lacks."""
    aliases: tuple[str, ...] = ()
    """Other names that requests may call the model by."""
    media: frozenset[MediaKind] = frozenset()
    """The kinds of media that the prompts of a language model may have, once it is loaded."""
    refused_media: Mapping[MediaKind, str] = field(default_factory=dict)
    """By a kind of media that its prompts may not have, why, if its files have something for it."""
    transcribes: bool = False
    """Whether it writes down sounds, and nothing else."""

    @property
    def openai_api(self) -> str:
        """The OpenAI endpoint that a model of tensors serves by its parameter `openai`: `chat`, `completions` or
        none."""
        return self.parameters.get("openai", "")


@dataclass(frozen=True, slots=True)
class ModelStats:
    """Counters since the load."""

    ready: bool
    success: int = 0
    failure: int = 0
    cancelled: int = 0
    kv_tokens: int = 0
    """Tokens that a language model's cache holds for running requests."""
    kv_token_capacity: int = 0
    """Tokens that its cache can hold."""
    sequences: int = 0
    """Open sequences of a stateful model."""


class WarmupRequest(NamedTuple):
    """A request that every instance answers `times` times before the model is ready."""

    request: InferRequest
    times: int = 1


class ModelSamples(NamedTuple):
    """Data from files that a config names. `initial_states` are by the state's input, for the first request of a
    sequence."""

    warmup_requests: Sequence[WarmupRequest] = ()
    initial_states: Mapping[str, Tensor] = {}


class MemoryNeed(NamedTuple):
    """Bytes that a model needs of the host's memory, or of the GPU that this process numbers so."""

    size: int
    gpu: int | None = None


class ReservedMemory(NamedTuple):
    """Bytes that a model will ever hold, and those that are in memory now."""

    promised: int = 0
    resident: int = 0

    @property
    def outstanding(self) -> int:
        return max(0, self.promised - self.resident)


class MemoryHolder(Protocol):
    """A model that takes the host's memory bit by bit, up to a known amount."""

    def reserved_memory(self) -> ReservedMemory: ...


class Model(Protocol):
    """Anything that answers a request with a stream of responses.

    The context is that of the client's request. To cancel, cancel the task that consumes the stream: the iterator's
    `finally` frees everything. Consumers wrap the stream in `contextlib.aclosing`.
    """

    @property
    def config(self) -> ModelConfig: ...

    async def load(self) -> None:
        """Return when the model is warm and ready."""

    async def unload(self) -> None:
        """Free everything; called after draining."""

    def infer(self, request: InferRequest, context: RequestContext) -> AsyncIterator[InferResponse]: ...

    def stats(self) -> ModelStats: ...

    def statistics(self) -> VersionStatistics: ...

    @property
    def capabilities(self) -> "Capabilities":
        """Its other abilities, once it is loaded."""


class TextModel(Model, Protocol):
    """A model that writes text."""

    def generate(self, request: GenerateRequest, context: RequestContext) -> AsyncIterator[GenerateChunk]: ...

    async def tokenize(self, request: TokenizeRequest) -> TokenizedPrompt: ...

    async def detokenize(self, ids: list[int]) -> str: ...

    async def tokenizer_info(self) -> dict[str, Any]: ...

    @property
    def end_tokens(self) -> Sequence[int]:
        """The tokens by which it ends a text by itself."""

    @property
    def tokenizer_files(self) -> str:
        """The directory, or the file, that its tokenizer was read from."""


class QueueingModel(Protocol):
    """A model whose queue may be full."""

    def check_room(self, tenant: str) -> None:
        """Raise what every request of the tenant would be refused with now: `QueueFull` or `Unavailable`."""


class AdaptableModel(Protocol):
    """A model that may answer with a LoRA adapter, which requests name in `GenerateRequest.adapter`."""

    @property
    def adapters(self) -> Mapping[str, Adapter] | None:
        """The loaded adapters by name; None for a model that takes none."""

    async def load_adapter(self, name: str, path: str, replace: bool = False) -> Adapter:
        """Load an adapter from the directory `path`; return when requests may name it. With `replace` it supersedes one
        of that name, which running requests keep.

        Raises:
            InvalidArgument: the model takes none, it has one of that name, or its files are wrong.
        """

    async def unload_adapter(self, name: str) -> None:
        """Refuse new requests for it; running ones end with it. Raises `NotFound`."""


class RetainingModel(Protocol):
    """A model, or its engine, that keeps of its cache what sessions asked for."""

    def release_scope(self, tenant: str, scope: str) -> None:
        """What was retained for this scope of a tenant's is not wanted any more; an unknown one is none."""


class SelfCheckingModel(Protocol):
    """A model that can be asked whether it works."""

    async def unready_reason(self) -> str:
        """Why it does not work; empty if it does. Never raises."""


class InlineModel(Protocol):
    """A model that computes in the event loop, in less time than a request's context would cost."""

    def answer_now(self, request: InferRequest) -> tuple[InferResponse, ExecutionTimes] | None:
        """The one response to a valid request; None if the model does not compute inline. Raises as `infer` does. The
        caller reports the request's end to `count_end`."""

    def count_end(self, end: RequestEnd) -> None:
        """Count a request that had no context."""


class MeasuredModel(Model, Protocol):
    """A model that counts its requests and has readings for a scrape."""

    def count(self, context: RequestContext) -> None:
        """Count a request that has ended."""

    def readings(self) -> Iterator[Reading]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The abilities of a loaded model: for each the object that has it, usually the model itself, or None."""

    text: TextModel | None = None
    adapters: AdaptableModel | None = None
    queue: QueueingModel | None = None
    inline: InlineModel | None = None
    self_check: SelfCheckingModel | None = None
    memory: MemoryHolder | None = None
    retention: RetainingModel | None = None
    measured: MeasuredModel | None = None
