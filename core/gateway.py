"""The only thing a door knows. Whatever exists once per server lives behind it."""

from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager
from typing import Protocol

from .exchange import Exchange, Headers
from .model import ModelConfig, ModelStats
from .request import GenerateChunk, GenerateRequest, InferRequest, InferResponse, TokenizeRequest


class Gateway(Protocol):
    """Lookup, admission and dispatch.

    An empty `version` means the latest. Every lookup raises `NotFound` for an unknown model or version and
    `Unavailable` for one that is not ready; a full queue raises `QueueFull`. All raise before the first item.
    Streams are generators, so that doors can close them (`contextlib.aclosing`).
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

    def infer(self, name: str, version: str, request: InferRequest) -> AsyncGenerator[InferResponse, None]: ...

    def generate(self, name: str, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        """Raises `InvalidArgument` for a model that does not write text."""

    async def tokenize(self, name: str, request: TokenizeRequest) -> list[int]:
        """Raises as `generate` does."""

    async def detokenize(self, name: str, ids: list[int]) -> str:
        """Raises as `generate` does."""
