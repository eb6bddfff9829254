"""What an entry point of `charonia.backends` may name beside a `RuntimeLoader`: a backend of language models, or of
models that only ask others; and what one of `charonia.native_models` names.
"""

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, TypeAlias

from .gateway import ModelLookup
from .model import MemoryNeed, Model, ModelConfig, RawConfig
from .request import InferRequest, InferResponse
from .request_context import ExecutionTimes, RequestContext

OnProgress: TypeAlias = Callable[[str, float, float, str], None]
"""Called while a model loads: phase, fraction done, seconds that it took once it is done, detail."""


class TextModelBuilder(Protocol):
    """Builds a model that makes its own config, without loading it. Raises `CharoniaError` for a wrong parameter.

    `written`: the config of its directory. If its backend estimates memory, the model is told the bytes that it may
    take: `memory` of the host's, and `gpu_memory` of each GPU's if it needs any there.
    """

    def __call__(
        self,
        written: ModelConfig,
        path: str,
        parameters: Mapping[str, str],
        on_progress: OnProgress,
        *,
        memory: int | None = None,
        gpu_memory: int | None = None,
    ) -> Model: ...


MemoryEstimator: TypeAlias = Callable[[str, Mapping[str, str], Sequence[int]], Sequence[MemoryNeed]]
"""The least that the model of a path and parameters takes of each memory; the numbers are those of the GPUs here.
Raises as the builder does."""

CheckpointExaminer: TypeAlias = Callable[[str, Mapping[str, str]], str]
"""Reads a model's files as its load does, and returns what only the load will find out. Raises as the load does."""


class TextBackend(NamedTuple):
    """A backend of language models, which make their own configs. A version's path is its directory, or a checkpoint
    or hub id; parameters are those of its config over those of `--backend-config`."""

    build: TextModelBuilder
    estimate_memory: MemoryEstimator | None = None
    """With it, models take all the memory that they are granted."""
    examine: CheckpointExaminer | None = None
    """With it, a model can be checked without loading it."""
    written_tensors: Literal["ignored", "implied", "served"] = "ignored"
    """What becomes of the tensors that a config writes out: the models have their own, these are among their own, or
    the models are served by these."""
    serves_checkpoints: bool = False
    """Whether `--backend` may choose it for a checkpoint on its own."""
    check_library: Callable[[str | None], int] | None = None
    """Holds the installed library against what this backend expects of it, with the checkpoint of this path where there
    is one; prints what differs, and returns the exit status of `charonia check`."""


class AskedVersion(NamedTuple):
    """A model that another one asks; an empty `version` stands for the latest."""

    model: str
    version: str = ""


@dataclass(slots=True)
class RequestTimes:
    """Nanoseconds that the requests to all models took together: to wait, and for the three parts of their work."""

    queued: int = 0
    input: int = 0
    infer: int = 0
    output: int = 0

    def add(self, child: RequestContext) -> None:
        """Add the times of a request that has ended."""
        summary, arrived_at = child.summary, child.arrived_at
        if child.execution is not None:
            self.add_execution(child.execution)
        elif summary.last is not None:
            submitted, begun_at = summary.submitted or arrived_at, summary.begun or arrived_at
            self.input += int(1e9 * (submitted - arrived_at))
            self.queued += int(1e9 * (begun_at - submitted))
            self.infer += int(1e9 * (summary.last - begun_at))

    def add_execution(self, times: ExecutionTimes) -> None:
        queued, begun, spent = times
        self.queued += begun - queued
        self.input += spent[0]
        self.infer += spent[1]
        self.output += spent[2]


class Composition(Protocol):
    """How a model asks others: an ensemble, a pipeline, or what a package brings."""

    @property
    def asked(self) -> Iterable[AskedVersion]:
        """The models that it needs, once it is loaded."""

    async def load(self) -> ModelConfig:
        """The config that it has, now that its models are known. Raises `CharoniaError` if it cannot be loaded: a model
        that it needs is not, or does not fit."""

    async def unload(self) -> None: ...

    def answer(
        self, request: InferRequest, context: RequestContext, times: RequestTimes
    ) -> AsyncGenerator[InferResponse, None]:
        """The responses to a request. `times`: it adds those of the requests that it makes."""


class CompositionBackend(NamedTuple):
    """A backend of models that only ask others."""

    compose: Callable[[ModelConfig, ModelLookup, Path], Composition]
    """Makes a version's, from its config, the models of the server, and its directory. Raises `CharoniaError` if the
    config is wrong."""


NativeBackendFinder: TypeAlias = Callable[[RawConfig, Path], str | None]
"""The backend that serves a model whose config asks for the Python backend, in the place of its code; None to leave it
to that. Called with its config as it is written, and the directory of one version."""
