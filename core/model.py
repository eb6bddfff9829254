"""The contract: a request goes into a Model, a stream of responses comes out."""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

from .adapter import Adapter
from .metrics import Reading, VersionStatistics
from .request import GenerateChunk, GenerateRequest, InferRequest, InferResponse, TokenizeRequest
from .request_context import ExecutionTimes, RequestContext, RequestEnd
from .tensor import Tensor, TensorSpec

MODELS_PARAMETER = "models"

_ANY = "*"
_MAY_BE_MISSING = "?"


@dataclass(frozen=True, slots=True)
class DeclaredModels:
    """Names between commas. One with `?` behind it may be missing; `*` stands for whatever models there are."""

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
"""A model's config, or a message in one, as /config shows it: protobuf's JSON mapping with the names and order of the
.proto, plain JSON values throughout."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The completed config of one version. `created`: seconds since the epoch. `fingerprint`: of the files that a
    language model was read from. `raw`: the whole config. `labels`: the names of the classes of outputs that have a
    label file, by output. `implied_stream`: where it is absent, generate_stream makes an input `stream` true.
    `aliases`: other names that requests may call the model by."""

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
    fingerprint: str = ""
    raw: RawConfig = field(default_factory=dict)
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    implied_stream: bool = True
    aliases: tuple[str, ...] = ()

    @property
    def openai_api(self) -> str:
        """The endpoint of OpenAI's that a model of tensors serves, by its parameter `openai`: `chat` or `completions`;
        empty for none."""
        return self.parameters.get("openai", "")


@dataclass(frozen=True, slots=True)
class ModelStats:
    """Counters since load; for a language model, tokens that its cache holds for running requests, and can hold.
    `sequences`: those that a stateful model has open."""

    ready: bool
    success: int = 0
    failure: int = 0
    cancelled: int = 0
    kv_tokens: int = 0
    kv_token_capacity: int = 0
    sequences: int = 0


class WarmupRequest(NamedTuple):
    """A request that every instance answers `times` times before the model is ready."""

    request: InferRequest
    times: int = 1


class ModelSamples(NamedTuple):
    """Data that a config names, from files beside it. `initial_states`: of a sequence's first request, by the state's
    input."""

    warmup_requests: Sequence[WarmupRequest] = ()
    initial_states: Mapping[str, Tensor] = {}


class MemoryNeed(NamedTuple):
    """Bytes that a model needs of one memory: of GPU `gpu`, as this process numbers them, or of the host's (None)."""

    size: int
    gpu: int | None = None


class ReservedMemory(NamedTuple):
    """Bytes. `promised`: all that a model will ever hold; `resident`: the part that is in memory now."""

    promised: int = 0
    resident: int = 0

    @property
    def outstanding(self) -> int:
        return max(0, self.promised - self.resident)


class MemoryHolder(Protocol):
    """A model that takes the host's memory bit by bit, and knows how much that will be."""

    def reserved_memory(self) -> ReservedMemory: ...


class Model(Protocol):
    """Anything that answers requests: a request goes in, a stream of responses comes out.

    `context` is that of the client's request: the tenant, the time of arrival, and the record of its end. Cancelling is
    cancelling the task that consumes `infer`'s stream: the iterator's `finally` frees everything. Consumers wrap it in
    `contextlib.aclosing`.
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
        """What it can do beside that, once it is loaded."""


class TextModel(Model, Protocol):
    """A model that writes text."""

    def generate(self, request: GenerateRequest, context: RequestContext) -> AsyncIterator[GenerateChunk]: ...

    async def tokenize(self, request: TokenizeRequest) -> list[int]: ...

    async def detokenize(self, ids: list[int]) -> str: ...

    async def token_strings(self, ids: list[int]) -> list[str]: ...

    async def tokenizer_info(self) -> dict[str, Any]: ...


class QueueingModel(Protocol):
    """A model whose queue may be full, whatever a request says."""

    def check_room(self, tenant: str) -> None:
        """Raises what each request of that tenant would be refused with now: `QueueFull`, or `Unavailable`."""


class AdaptableModel(Protocol):
    """A model that may answer with a LoRA adapter, which requests name: `GenerateRequest.adapter`."""

    @property
    def adapters(self) -> Mapping[str, Adapter] | None:
        """Those that requests may name, by their names; None for a model that takes none."""

    async def load_adapter(self, name: str, path: str, replace: bool = False) -> Adapter:
        """Load the adapter in the directory `path`; return when requests may name it. With `replace`, it takes the
        place of one of that name: requests that are being answered end with the one they began with.

        Raises:
            InvalidArgument: the model takes none, it has one of that name, or its files are wrong.
        """

    async def unload_adapter(self, name: str) -> None:
        """Take no more requests for it; those that are being answered end with it. Raises `NotFound`."""


class SelfCheckingModel(Protocol):
    """A model that can be asked whether it works, beyond what `stats` knows."""

    async def unready_reason(self) -> str:
        """Empty where it works. Never raises."""


class InlineModel(Protocol):
    """A model that computes in the event loop itself, in less time than a context for the request would cost."""

    def answer_now(self, request: InferRequest) -> tuple[InferResponse, ExecutionTimes] | None:
        """The one response to a valid request; None if the model does not compute so. Raises as `infer` does. Whoever
        asks calls `count_end` when the request has ended."""

    def count_end(self, end: RequestEnd) -> None:
        """Count a request for this model that had no context."""


class MeasuredModel(Model, Protocol):
    """A model that counts its requests, and has readings for a scrape."""

    def count(self, context: RequestContext) -> None:
        """Count a request for this model that has ended."""

    def readings(self) -> Iterator[Reading]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a loaded model can do beside answering with tensors: for each ability the object that has it, most often the
    model itself, or None."""

    text: TextModel | None = None
    adapters: AdaptableModel | None = None
    queue: QueueingModel | None = None
    inline: InlineModel | None = None
    self_check: SelfCheckingModel | None = None
    memory: MemoryHolder | None = None
    measured: MeasuredModel | None = None
