"""The only thing a door knows. Whatever exists once per server lives behind it."""

from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import AbstractContextManager
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeVar

from .model import ModelConfig, ModelStats
from .request import GenerateChunk, GenerateRequest, InferRequest, InferResponse, TokenizeRequest
from .request_context import Headers, RequestContext
from .shared_state import SharedState
from .statistics import ModelStatistics

NO_FILES: Mapping[str, bytes] = MappingProxyType({})

T_co = TypeVar("T_co", covariant=True)


class ResponseStream(Protocol[T_co]):
    """What can be iterated and closed (`contextlib.aclosing`): a generator, or what stands for one."""

    def __aiter__(self) -> AsyncIterator[T_co]: ...

    def __anext__(self) -> Awaitable[T_co]: ...

    async def aclose(self) -> None: ...


class ModelState(StrEnum):
    """Of a version of a model; Triton's words."""

    UNKNOWN = "UNKNOWN"
    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"
    LOADING = "LOADING"
    UNLOADING = "UNLOADING"


class RepositoryIndexEntry(NamedTuple):
    """One version of a known model; of one that was never loaded there is only the name."""

    name: str
    version: str = ""
    state: ModelState | None = None
    reason: str = ""


class Gateway(Protocol):
    """Lookup, admission and dispatch.

    An empty `version` means the latest. Every lookup raises `NotFound` for an unknown model or version and
    `Unavailable` for one that is not ready; a full queue raises `QueueFull`. All raise before the first item.
    Doors close every stream.
    """

    @property
    def shared_state(self) -> SharedState:
        """What clients lend and set."""

    def open_request(self, door: str, headers: Headers = ()) -> AbstractContextManager[RequestContext]:
        """The one exchange of a request that came through `door`: the current one of the block, at whose end it is
        counted and recorded."""

    def ready(self) -> bool:
        """Every known model is ready, and the server is not shutting down."""

    def exiting(self) -> bool:
        """The server shuts down: it finishes what runs and refuses what is new."""

    def model_configs(self) -> list[ModelConfig]: ...

    def model_config(self, name: str, version: str = "") -> ModelConfig: ...

    def served_versions(self, name: str) -> tuple[str, ...]:
        """The versions of a model that are served, lowest first. Raises as `model` does."""

    def model_stats(self, name: str, version: str = "") -> ModelStats: ...

    def model_statistics(self, name: str = "", version: str = "") -> list[ModelStatistics]:
        """Of every served version, or of those asked for.

        Raises:
            InvalidArgument: what was asked for is not served.
        """

    def is_model_ready(self, name: str, version: str = "") -> bool:
        """Whether that version, or the latest, can be asked now; False for what is not known, too. Raises nothing."""

    def infer(self, name: str, version: str, request: InferRequest) -> ResponseStream[InferResponse]: ...

    def generate(self, name: str, request: GenerateRequest) -> ResponseStream[GenerateChunk]:
        """Raises `InvalidArgument` for a model that does not write text."""

    async def tokenize(self, name: str, request: TokenizeRequest) -> list[int]:
        """Raises as `generate` does."""

    async def detokenize(self, name: str, ids: list[int]) -> str:
        """Raises as `generate` does."""

    def repository_index(self, ready_only: bool = False) -> list[RepositoryIndexEntry]:
        """Every version that the repositories hold, or that was loaded."""

    async def load_model(self, name: str, config: str | None = None, files: Mapping[str, bytes] = NO_FILES) -> None:
        """Load a model of the repositories, or load it anew; return when it is served.

        `config`: its whole config as JSON, in place of the file's, until what is on disk changes or the model is
        unloaded. `files`: its whole directory, by path within it.

        Raises:
            Unavailable: the server was not started for that.
            Internal: what it would be made from cannot be read; Triton's text, and why.
            InvalidArgument: `name` or a path is wrong, or the model did not load; what served before serves.
        """

    async def unload_model(self, name: str, dependents: bool = False) -> None:
        """Serve a model no more; return when its unloading has begun. `dependents`: with an ensemble its steps.

        Raises:
            Unavailable: the server was not started for that.
            InvalidArgument: `name` is no name.
        """
