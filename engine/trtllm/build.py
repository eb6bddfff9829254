"""What the repository's table of kinds knows of this folder: how to build a model of TensorRT-LLM."""

from collections.abc import Callable, Mapping
from functools import partial

from ...core.metrics import LlmMetrics
from ...core.model import Model
from ..core.messages import Loading
from ..frontend.engine import Driver
from ..frontend.llm import LlmModel
from ..parse_settings import parse
from .client import TrtllmClient
from .options import TrtllmOptions
from .package import Package
from .runtime import Maker
from .triton_config import read_place

BACKEND = "tensorrtllm"


def tensorrt_llm(
    name: str,
    version: str,
    path: str,
    parameters: Mapping[str, str],
    on_progress: Callable[[str, float, float, str], None],
) -> Model:
    """A language model that TensorRT-LLM runs: the checkpoint or prebuilt engine at `path`, which a parameter or
    `model.yaml` may replace.

    Raises:
        InvalidArgument: a parameter is unknown or wrong; the message names it.
    """
    model, settings = read_place(path, parameters)
    return LlmModel(name, version, driver(model, parse(settings, TrtllmOptions)), on_progress)


def driver(model: str, options: TrtllmOptions, find: Callable[[], Package] = Package.find) -> Driver:
    """What drives a model; `find`: the package."""
    grants = {"adapter": options.adapters, "guide": options.guided_decoding_backend}
    granted = frozenset(wish for wish, means in grants.items() if means)
    connect, template = partial(_connect, model, options, find), options.chat_template or ""
    return Driver(BACKEND, options.tokenizer or model, connect, granted, template)


def _connect(
    model: str,
    options: TrtllmOptions,
    find: Callable[[], Package],
    on_progress: Callable[[Loading], None],
    metrics: LlmMetrics,
) -> TrtllmClient:
    return TrtllmClient(Maker(model, options, find), options, on_progress, metrics)
