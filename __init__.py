"""Charonia: a streaming, LLM-centric inference server that speaks Triton's and OpenAI's protocols, and a library.

Programs import `Server` and `LLM`, and what belongs to them, from here; `import charonia` itself reads none of it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from .core.errors import AlreadyExists as AlreadyExists
    from .core.errors import Cancelled as Cancelled
    from .core.errors import CharoniaError as CharoniaError
    from .core.errors import ContextLengthExceeded as ContextLengthExceeded
    from .core.errors import Internal as Internal
    from .core.errors import InvalidArgument as InvalidArgument
    from .core.errors import NotFound as NotFound
    from .core.errors import NotReady as NotReady
    from .core.errors import QueueFull as QueueFull
    from .core.errors import RequestTimeout as RequestTimeout
    from .core.errors import ServerExiting as ServerExiting
    from .core.errors import Unavailable as Unavailable
    from .core.errors import Unsupported as Unsupported
    from .inprocess.beam_search import BeamSearchOutput as BeamSearchOutput
    from .inprocess.beam_search import BeamSearchParams as BeamSearchParams
    from .inprocess.beam_search import BeamSearchSequence as BeamSearchSequence
    from .inprocess.llm import LLM as LLM
    from .inprocess.outputs import ClassificationRequestOutput as ClassificationRequestOutput
    from .inprocess.outputs import CompletionOutput as CompletionOutput
    from .inprocess.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from .inprocess.outputs import Logprob as Logprob
    from .inprocess.outputs import PoolingRequestOutput as PoolingRequestOutput
    from .inprocess.outputs import RequestOutput as RequestOutput
    from .inprocess.outputs import ScoringRequestOutput as ScoringRequestOutput
    from .inprocess.requests import InferenceRequest as InferenceRequest
    from .inprocess.requests import InferenceResponse as InferenceResponse
    from .inprocess.sampling_params import SamplingParams as SamplingParams
    from .inprocess.server import Model as Model
    from .inprocess.server import Server as Server
    from .inprocess.tensor import Tensor as Tensor

_ERRORS = (
    "AlreadyExists Cancelled CharoniaError ContextLengthExceeded Internal InvalidArgument NotFound NotReady QueueFull "
    "RequestTimeout ServerExiting Unavailable Unsupported"
)
_MODULES = {
    "core.errors": _ERRORS,
    "inprocess.beam_search": "BeamSearchOutput BeamSearchParams BeamSearchSequence",
    "inprocess.llm": "LLM",
    "inprocess.outputs": (
        "ClassificationRequestOutput CompletionOutput EmbeddingRequestOutput Logprob PoolingRequestOutput "
        "RequestOutput ScoringRequestOutput"
    ),
    "inprocess.sampling_params": "SamplingParams",
    "inprocess.requests": "InferenceRequest InferenceResponse",
    "inprocess.server": "Model Server",
    "inprocess.tensor": "Tensor",
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names.split()}
"""The module of each public name."""

__all__ = ["__version__", *_PLACES]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'charonia' has no attribute '{name}'")
    value = getattr(import_module(f".{_PLACES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
