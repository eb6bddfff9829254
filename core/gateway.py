"""The seam between endpoints and models: endpoints ask models through a `ModelLookup` and change them through an
`Administration`."""

from collections.abc import AsyncIterator, Awaitable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

from .adapter import Adapter
from .metrics import ModelStatistics
from .model import ModelConfig, ModelStats
from .request import GenerateChunk, GenerateRequest, InferRequest, InferResponse, TokenizedPrompt, TokenizeRequest
from .request_context import ExecutionTimes, Headers, RequestContext
from .traffic import ChangeableRoutes

NO_FILES: Mapping[str, bytes] = MappingProxyType({})

T_co = TypeVar("T_co", covariant=True)


class ResponseStream(Protocol[T_co]):
    """An async iterator that can be closed, as async generators can."""

    def __aiter__(self) -> AsyncIterator[T_co]: ...

    def __anext__(self) -> Awaitable[T_co]: ...

    async def aclose(self) -> None: ...


class ModelState(StrEnum):
    """The state of a model's version, in Triton's words."""

    UNKNOWN = "UNKNOWN"
    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"
    LOADING = "LOADING"
    UNLOADING = "UNLOADING"


class RepositoryIndexEntry(NamedTuple):
    """One version of a known model; a model that was never loaded has a name only."""

    name: str
    version: str = ""
    state: ModelState | None = None
    reason: str = ""


class ServedAdapter(NamedTuple):
    """An adapter that requests may name in place of a model."""

    name: str
    """Its own name, or `model:adapter` if another model or adapter has that name."""
    config: ModelConfig
    """The config of its model."""
    adapter: Adapter

    def is_called(self, name: str) -> bool:
        """Whether requests may call it by that name."""
        return name in (self.name, f"{self.config.name}:{self.adapter.name}")


class ModelHandle(Protocol):
    """One loaded version of a model, held by one request until it ends.

    A version that is replaced or unloaded meanwhile goes on serving its holders. A stream raises `QueueFull` or
    `ServerExiting` before its first item. Endpoints close every stream.
    """

    @property
    def config(self) -> ModelConfig: ...

    @property
    def name(self) -> str:
        """The model's name, or that of the adapter that it was acquired by and answers with."""

    def for_request(self, context: RequestContext) -> "ModelHandle":
        """The same version for another request, which a model makes for the same client."""

    def answer_now(self, request: InferRequest) -> tuple[InferResponse, ExecutionTimes] | None:
        """The answer of a model that computes in the event loop. None if this one does not, or would refuse the
        request: then use `for_request`."""

    def check_room(self) -> None:
        """Raise what the request would be refused with now whatever its body says, `QueueFull` or `Unavailable`, so
        that the body need not be read."""

    def stats(self) -> ModelStats: ...

    def validate(self, request: InferRequest) -> None:
        """Raises `InvalidArgument` if the request does not fit the model's config."""

    def infer(self, request: InferRequest) -> ResponseStream[InferResponse]:
        """Raises as `validate` does."""

    def generate(self, request: GenerateRequest) -> ResponseStream[GenerateChunk]:
        """Raises `InvalidArgument` for a model that does not generate text."""

    async def tokenize(self, request: TokenizeRequest) -> TokenizedPrompt:
        """Raises as `generate` does."""

    async def detokenize(self, ids: list[int]) -> str:
        """Raises as `generate` does."""


class InlineHandle(Protocol):
    """A loaded model that computes in the event loop, for requests without a context."""

    @property
    def config(self) -> ModelConfig: ...

    def answer_now(self, request: InferRequest) -> tuple[InferResponse, ExecutionTimes] | None:
        """As `ModelHandle.answer_now`; a request that is answered, or fails, is counted."""


class ModelLookup(Protocol):
    """The models of the server, for endpoints and for models that ask others. Every process with endpoints has one.

    An empty `version` is the latest. Lookups raise `NotFound` for an unknown model or version, `Unavailable` if it is
    not served, and `NotReady` while it loads.
    """

    def open_request(self, endpoint: str, headers: Headers = ()) -> RequestContext:
        """The context of a request to `endpoint`, counted and recorded when its block ends."""

    async def acquire(self, context: RequestContext, name: str, version: str = "") -> ModelHandle:
        """Look up the model or adapter of a request, once. The context gets its name and version, and releases the
        handle at the end. Waits for a model that loads on request; `NotReady` if that takes long."""

    def find_inline(self, name: str, version: str = "") -> InlineHandle | None:
        """The model where nobody has a use for a context of a request that it answers: it computes in the event loop,
        and such requests leave no record. None: then `acquire` it."""

    def check_room(self, context: RequestContext) -> None:
        """As `ModelHandle.check_room`, before the body of a text request is read, on a server with one language
        model."""

    def alive(self) -> bool:
        """Whether the process that has the models works; one that hangs must be ended from outside."""

    def ready(self) -> bool:
        """Whether every known model is ready and the server is not exiting."""

    def exiting(self) -> bool:
        """Whether the server exits: it finishes requests in flight and refuses new ones."""

    def model_configs(self) -> list[ModelConfig]: ...

    def model_config(self, name: str, version: str = "") -> ModelConfig: ...

    def served_versions(self, name: str) -> tuple[str, ...]:
        """The served versions of a model, lowest first. Raises as `model_config` does."""

    def is_model_ready(self, name: str, version: str = "") -> bool:
        """Whether that version, or the latest, can be asked now; False for an unknown one."""

    async def unready_reason(self, name: str, version: str = "") -> str:
        """Why the model is not ready, by the server or by itself; empty if it is."""


class Administration(ModelLookup, Protocol):
    """Changes and describes the models of the server, in the one process that has them."""

    @property
    def route_control(self) -> ChangeableRoutes: ...

    def requests_in_flight(self) -> int:
        """The number of requests to models that are being answered."""

    def model_statistics(self, name: str = "", version: str = "") -> list[ModelStatistics]:
        """Statistics of every served version, or of those named. Raises `InvalidArgument` if none of those named is
        served."""

    async def tokenizer_info(self, name: str) -> dict[str, Any]:
        """What a language model's checkpoint says of its tokenizer. Raises as `model_config`, and `InvalidArgument` for
        other models."""

    @property
    def loads_on_request(self) -> bool:
        """Whether requests may load and unload models."""

    async def repository_index(self, ready_only: bool = False) -> list[RepositoryIndexEntry]:
        """Every version that the repositories hold, or that was loaded."""

    async def load_model(self, name: str, config: str | None = None, files: Mapping[str, bytes] = NO_FILES) -> None:
        """Load or reload a model; return when it is served. `config` (JSON) replaces the file's until the model is
        unloaded or its directory changes; `files` (by relative path) replace the directory.

        Raises:
            Unavailable: no explicit model control.
            Internal: config or files cannot be read; Triton's text.
            InvalidArgument: a bad `name` or path, or the load failed; what was served stays.
        """

    async def unload_model(self, name: str, dependents: bool = False) -> None:
        """Stop serving a model; return when its unloading has begun. With `dependents` also what it asks, as far as
        that was loaded for models that ask it and none of these is left.

        Raises:
            Unavailable: the server was not started with explicit model control.
            InvalidArgument: `name` is invalid.
        """

    def adapters(self) -> list[ServedAdapter]:
        """The adapters of all served models."""

    async def load_adapter(self, name: str, path: str, model: str = "", replace: bool = False) -> Adapter:
        """Load an adapter from the directory `path`; return when requests may name it. `model` is needed if several
        take adapters; `replace`: see `AdaptableModel`.

        Raises:
            NotFound: there is no such model, or none that takes adapters.
            InvalidArgument: the name is taken, the model takes none, or the files are wrong.
        """

    async def unload_adapter(self, name: str) -> ServedAdapter:
        """Stop serving an adapter; running requests end with it. Raises `NotFound`."""

    def release_scope(self, model: str, tenant: str, scope: str) -> None:
        """Let what a model's caches retain for a scope of a tenant's make room, those of all versions, or of all that a
        route names; an unknown scope is released already.

        Raises:
            NotFound: there is no such model.
            InvalidArgument: its cache retains nothing for anybody.
        """
