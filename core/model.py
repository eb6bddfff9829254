"""The contract: a request goes into a Model, a stream of responses comes out."""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from .metrics import Reading
from .request import GenerateChunk, GenerateRequest, InferRequest, InferResponse, TokenizeRequest
from .request_context import RequestContext
from .statistics import VersionStatistics
from .tensor import Tensor, TensorSpec

RawConfig: TypeAlias = Mapping[str, Any]
"""A model's config, or a message in one, as /config shows it: protobuf's JSON mapping with the names of the .proto, in
its order, plain JSON values throughout."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What a model tells the world of itself, after completion. `created`: seconds since the epoch. `fingerprint`: of
    the files that a language model was read from.

    `raw`: the whole config. `labels`: of the classes of an output, by its name, where it has a label file.
    """

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


@dataclass(frozen=True, slots=True)
class ModelStats:
    """Counters since load; for a language model, tokens that its cache holds for running requests, and could hold."""

    ready: bool
    success: int = 0
    failure: int = 0
    cancelled: int = 0
    kv_tokens: int = 0
    kv_token_capacity: int = 0


class WarmupRequest(NamedTuple):
    """A request that every instance answers so many `times` before the model is ready."""

    request: InferRequest
    times: int = 1


class ModelSamples(NamedTuple):
    """Data that a config asks for and that lies beside it: `warm_up`, in this order; `states`, what the first request
    of a sequence gets of a state, by the state's input."""

    warmup_requests: Sequence[WarmupRequest] = ()
    initial_states: Mapping[str, Tensor] = {}


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


@runtime_checkable
class TextModel(Model, Protocol):
    """A model that writes text."""

    def generate(self, request: GenerateRequest, context: RequestContext) -> AsyncIterator[GenerateChunk]: ...

    async def tokenize(self, request: TokenizeRequest) -> list[int]: ...

    async def detokenize(self, ids: list[int]) -> str: ...


@runtime_checkable
class MeasuredModel(Model, Protocol):
    """A model that counts its requests, and has something to show at a scrape."""

    def count(self, context: RequestContext) -> None:
        """One request that was for this model has ended."""

    def readings(self) -> Iterator[Reading]: ...
