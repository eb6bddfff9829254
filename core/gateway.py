"""The only thing a door knows. Whatever exists once per server lives behind it."""

from collections.abc import AsyncIterator, Awaitable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from .exchange import Exchange, Headers
from .model import ModelConfig, ModelStats
from .request import GenerateChunk, GenerateRequest, InferRequest, InferResponse, TokenizeRequest

T_co = TypeVar("T_co", covariant=True)


class Stream(Protocol[T_co]):
    """What can be iterated and closed (`contextlib.aclosing`): a generator, or what stands for one."""

    def __aiter__(self) -> AsyncIterator[T_co]: ...

    def __anext__(self) -> Awaitable[T_co]: ...

    async def aclose(self) -> None: ...


class Gateway(Protocol):
    """Lookup, admission and dispatch.

    An empty `version` means the latest. Every lookup raises `NotFound` for an unknown model or version and
    `Unavailable` for one that is not ready; a full queue raises `QueueFull`. All raise before the first item.
    Doors close every stream.
    """

    def open(self, door: str, headers: Headers = ()) -> AbstractContextManager[Exchange]:
        """The one exchange of a request that came through `door`: the current one of the block, at whose end it is
        counted and recorded."""

    def ready(self) -> bool:
        """Every known model is ready, and the server is not shutting down."""

    def exiting(self) -> bool:
        """The server shuts down: it finishes what runs and refuses what is new."""

    def models(self) -> list[ModelConfig]: ...

    def model(self, name: str, version: str = "") -> ModelConfig: ...

    def stats(self, name: str, version: str = "") -> ModelStats: ...

    def model_ready(self, name: str, version: str = "") -> bool: ...

    def infer(self, name: str, version: str, request: InferRequest) -> Stream[InferResponse]: ...

    def generate(self, name: str, request: GenerateRequest) -> Stream[GenerateChunk]:
        """Raises `InvalidArgument` for a model that does not write text."""

    async def tokenize(self, name: str, request: TokenizeRequest) -> list[int]:
        """Raises as `generate` does."""

    async def detokenize(self, name: str, ids: list[int]) -> str:
        """Raises as `generate` does."""
