"""The seam between endpoints and models: an endpoint asks models through a `ModelLookup`, changes them through an
`Administration`, and knows nothing of how they are served."""

from collections.abc import AsyncIterator, Awaitable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

from .adapter import Adapter
from .metrics import ModelStatistics
from .model import ModelConfig, ModelStats
from .request import GenerateChunk, GenerateRequest, InferRequest, InferResponse, TokenizeRequest
from .request_context import ExecutionTimes, Headers, RequestContext
from .traffic import ChangeableRoutes

NO_FILES: Mapping[str, bytes] = MappingProxyType({})

T_co = TypeVar("T_co", covariant=True)


class ResponseStream(Protocol[T_co]):
    """An async iterator that can be closed (`contextlib.aclosing`), as async generators are."""

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
    """An adapter that requests may ask for by `name`, as if it were a model: its own name, or `model:adapter` where
    another model or adapter has that one. `config`: of its model."""

    name: str
    config: ModelConfig
    adapter: Adapter

    def is_called(self, name: str) -> bool:
        """Whether it is asked for by that name, too."""
        return name in (self.name, f"{self.config.name}:{self.adapter.name}")


class ModelHandle(Protocol):
    """One loaded version of a model, held by one request until that request ends. `name`: its own, or that of the
    adapter that it was acquired by, with which it answers.

    A version that is replaced or unloaded meanwhile goes on serving the requests that hold it. A full queue raises
    `QueueFull` and an ending server `ServerExiting`, before the first item of a stream. Endpoints close every stream.
    """

    @property
    def config(self) -> ModelConfig: ...

    @property
    def name(self) -> str: ...

    def for_request(self, context: RequestContext) -> "ModelHandle":
        """The same version, held by another request too: one that a model makes of it for the same client."""

    def answer_now(self, request: InferRequest) -> tuple[InferResponse, ExecutionTimes] | None:
        """The answer of a model that computes in the event loop, without a context for the request; None if it does
        not, or would refuse the request: ask `for_request`."""

    def check_room(self) -> None:
        """Raises what the request would be refused with now, whatever its body says, which is not read then:
        `QueueFull`, or `Unavailable`."""

    def stats(self) -> ModelStats: ...

    def validate(self, request: InferRequest) -> None:
        """Raises `InvalidArgument` if the request does not fit the model's config."""

    def infer(self, request: InferRequest) -> ResponseStream[InferResponse]:
        """Raises as `validate` does."""

    def generate(self, request: GenerateRequest) -> ResponseStream[GenerateChunk]:
        """Raises `InvalidArgument` for a model that does not generate text."""

    async def tokenize(self, request: TokenizeRequest) -> list[int]:
        """Raises as `generate` does."""

    async def detokenize(self, ids: list[int]) -> str:
        """Raises as `generate` does."""

    async def token_strings(self, ids: list[int]) -> list[str]:
        """The vocabulary's entry of each token, as its tokenizer spells it. Raises as `generate` does."""


class ModelLookup(Protocol):
    """The models of the server, for whoever asks them: endpoints, and models that ask others. Every process that has
    endpoints has one; one that has no models answers by what it was told last.

    An empty `version` means the latest. Every lookup raises `NotFound` for an unknown model or version, `Unavailable`
    for one that is not served, and `NotReady` for one that is being loaded.
    """

    def open_request(self, endpoint: str, headers: Headers = ()) -> RequestContext:
        """The context of a request that came in through `endpoint`: counted and recorded when its block ends."""

    async def acquire(self, context: RequestContext, name: str, version: str = "") -> ModelHandle:
        """Look up the model that a request is for, once for a request: the context has its name and version from then
        on, also if there is none, and releases the handle when the request ends. `name`: also of an adapter, or
        `model:adapter`. Waits while a model is loaded that its first request loads; `NotReady` if that takes long."""

    def check_room(self, context: RequestContext) -> None:
        """As `ModelHandle.check_room`, for a request whose body names the model that is to write text, where there is
        only one that does."""

    def alive(self) -> bool:
        """Whether the process that has the models goes on; one that hangs is to be ended from outside."""

    def ready(self) -> bool:
        """Whether every known model is ready and the server is not exiting."""

    def exiting(self) -> bool:
        """Whether the server exits: requests in flight are finished, new ones are refused."""

    def model_configs(self) -> list[ModelConfig]: ...

    def model_config(self, name: str, version: str = "") -> ModelConfig: ...

    def served_versions(self, name: str) -> tuple[str, ...]:
        """The versions of a model that are served, lowest first. Raises as `model_config` does."""

    def is_model_ready(self, name: str, version: str = "") -> bool:
        """Whether that version, or the latest, can be asked now; False for an unknown one."""

    async def unready_reason(self, name: str, version: str = "") -> str:
        """Why `is_model_ready` does not hold, or why the model itself says that it is not ready; empty where it is."""


class Administration(ModelLookup, Protocol):
    """What changes the models of the server, and what is known of them where they are: in one process of a server."""

    @property
    def route_control(self) -> ChangeableRoutes: ...

    def requests_in_flight(self) -> int:
        """How many requests to models are being answered."""

    def model_statistics(self, name: str = "", version: str = "") -> list[ModelStatistics]:
        """Statistics of every served version, or of those asked for.

        Raises:
            InvalidArgument: none that was asked for is served.
        """

    async def tokenizer_info(self, name: str) -> dict[str, Any]:
        """What the checkpoint of a language model says of its tokenizer. Raises as `model_config`, and
        `InvalidArgument` for another model."""

    @property
    def loads_on_request(self) -> bool:
        """Whether requests may load and unload models of the repositories."""

    async def repository_index(self, ready_only: bool = False) -> list[RepositoryIndexEntry]:
        """Every version that the repositories hold, or that was loaded."""

    async def load_model(self, name: str, config: str | None = None, files: Mapping[str, bytes] = NO_FILES) -> None:
        """Load, or load again, a model of the repositories; return when it is served.

        `config`: a whole config as JSON in place of the file's, until the model's directory changes or the model is
        unloaded. `files`: a whole model directory in place of the repository's, by path within it.

        Raises:
            Unavailable: the server was not started with explicit model control.
            Internal: the model's config or files cannot be read; Triton's text, and why.
            InvalidArgument: `name` or a path is invalid, or the model failed to load; what was served stays.
        """

    async def unload_model(self, name: str, dependents: bool = False) -> None:
        """Stop serving a model; return when its unloading has begun. Models that were loaded only because an ensemble
        asks them go with it; with `dependents` all that it asks do.

        Raises:
            Unavailable: the server was not started with explicit model control.
            InvalidArgument: `name` is invalid.
        """

    def adapters(self) -> list[ServedAdapter]:
        """The adapters of all models that are served."""

    async def load_adapter(self, name: str, path: str, model: str = "", replace: bool = False) -> Adapter:
        """Load an adapter from the directory `path`; return when requests may ask for it. `model`: which it is for,
        where several take adapters. `replace`: see `AdaptableModel`.

        Raises:
            NotFound: there is no such model, or none that takes adapters.
            InvalidArgument: the name is taken, the model takes none, or the files are wrong.
        """

    async def unload_adapter(self, name: str) -> ServedAdapter:
        """Serve an adapter no longer; requests that are being answered end with it. Raises `NotFound`."""
