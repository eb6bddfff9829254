"""The kinds of model that an entry point of `charonia.backends` or `charonia.native_models` may name, beside a
`RuntimeLoader`."""

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, TypeAlias

from .gateway import ModelLookup
from .media_models import MediaPart, MediaRefusal, MediaServices
from .model import MemoryNeed, Model, ModelConfig, RawConfig
from .request import InferRequest, InferResponse
from .request_context import ExecutionTimes, RequestContext

OnProgress: TypeAlias = Callable[[str, float, float, str], None]
"""Called while a model loads: phase, fraction done, seconds that it took once it is done, detail."""


def ignore_progress(phase: str, fraction: float, seconds: float, detail: str) -> None:
    """An `OnProgress` that does nothing."""


class TextModelBuilder(Protocol):
    """Builds a language model without loading it. Raises `CharoniaError` for a wrong parameter.

    `written` is the config in the model's directory. A backend that estimates memory is given its allowance: `memory`
    bytes of the host, `gpu_memory` of each GPU; one that finds a part for media, what serves that.
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
        media: MediaServices | MediaRefusal | None = None,
    ) -> Model: ...


MemoryEstimator: TypeAlias = Callable[[str, Mapping[str, str], Sequence[int]], Sequence[MemoryNeed]]
"""The least that a model takes of each memory, from its path, its parameters and the numbers of the GPUs. Raises as the
builder does."""

MediaPartFinder: TypeAlias = Callable[[str, Mapping[str, str], Sequence[int]], MediaPart | None]
"""The part of a model for media, if any, from its path, its parameters and the numbers of the GPUs. Raises as a
builder."""

CheckpointExaminer: TypeAlias = Callable[[str, Mapping[str, str]], str]
"""Checks a model's files as its load would, and returns what only the load will find out. Raises as the load does."""


class TextBackend(NamedTuple):
    """A backend of language models, which make their own configs. A version's path is its directory, a checkpoint or a
    hub id; its config's parameters override those of `--backend-config`."""

    build: TextModelBuilder
    estimate_memory: MemoryEstimator | None = None
    """With it, models take all the memory that they are granted."""
    examine: CheckpointExaminer | None = None
    """With it, a model can be checked without loading it."""
    written_tensors: Literal["ignored", "implied", "served"] = "ignored"
    """How the model treats tensors that its config declares: it ignores them, has them among its own, or serves exactly
    these."""
    serves_checkpoints: bool = False
    """Whether `--backend` may choose it for a checkpoint on its own."""
    find_media_part: MediaPartFinder | None = None
    """With it, models may take media in prompts."""
    check_library: Callable[[str | None], int] | None = None
    """Compares the installed library with what this backend expects of it, and with a checkpoint if a path is given.
    Prints the differences, and returns the exit status of `charonia check`."""


class AskedVersion(NamedTuple):
    """A model that another model asks; an empty version is the latest."""

    model: str
    version: str = ""


@dataclass(slots=True)
class RequestTimes:
    """Nanoseconds that the requests to other models waited and worked, added up."""

    queued: int = 0
    input: int = 0
    infer: int = 0
    output: int = 0

    def add(self, child: RequestContext) -> None:
        summary = child.summary
        arrived_at = child.arrived_at
        if child.execution is not None:
            self.add_execution(child.execution)
        elif summary.last is not None:
            submitted = summary.submitted or arrived_at
            begun_at = summary.begun or arrived_at
            self.input += int(1e9 * (submitted - arrived_at))
            self.queued += int(1e9 * (begun_at - submitted))
            self.infer += int(1e9 * (summary.last - begun_at))

    def add_execution(self, times: ExecutionTimes) -> None:
        self.queued += times.begun - times.queued
        self.input += times.spent[0]
        self.infer += times.spent[1]
        self.output += times.spent[2]


class Composition(Protocol):
    """A model that asks other models: an ensemble, a pipeline, or one that a package brings."""

    @property
    def asked(self) -> Iterable[AskedVersion]:
        """The models that it needs, once it is loaded."""

    async def load(self) -> ModelConfig:
        """Return its config, now that its models are known. Raises `CharoniaError` if one of them is not loaded or does
        not fit."""

    async def unload(self) -> None: ...

    def answer(
        self, request: InferRequest, context: RequestContext, times: RequestTimes
    ) -> AsyncGenerator[InferResponse, None]:
        """The responses to a request. It adds the times of the requests that it makes to `times`."""


class CompositionBackend(NamedTuple):
    compose: Callable[[ModelConfig, ModelLookup, Path], Composition]
    """Makes a version's composition from its config, the server's models and its directory. Raises `CharoniaError` for
    a wrong config."""


NativeBackendFinder: TypeAlias = Callable[[RawConfig, Path], str | None]
"""Names the backend that serves a Python model in place of its code, given its config as written and the directory of
one version; None leaves it to its code."""
