"""What the repository's table of kinds knows of this folder: how to build a model of TensorRT-LLM."""

from collections.abc import Callable, Mapping
from functools import partial

from ...core.metrics import LlmMetrics
from ...core.model import Model
from ..core.messages import CoreLoading
from ..frontend.engine import EngineSpec
from ..frontend.llm import LlmModel
from ..parse_settings import parse_settings
from .client import TrtllmClient
from .options import TrtllmOptions
from .package import TrtllmPackage
from .runtime import TrtllmRuntimeLoader
from .triton_config import read_model_source

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
    model, settings = read_model_source(path, parameters)
    return LlmModel(name, version, trtllm_engine_spec(model, parse_settings(settings, TrtllmOptions)), on_progress)


def trtllm_engine_spec(
    model: str, options: TrtllmOptions, find: Callable[[], TrtllmPackage] = TrtllmPackage.find
) -> EngineSpec:
    """What drives a model; `find`: the package."""
    grants = {"adapter": options.adapters, "guided_decoding": options.guided_decoding_backend}
    granted = frozenset(wish for wish, means in grants.items() if means)
    connect, template = partial(_connect, model, options, find), options.chat_template or ""
    return EngineSpec(BACKEND, options.tokenizer or model, connect, granted, template)


def _connect(
    model: str,
    options: TrtllmOptions,
    find: Callable[[], TrtllmPackage],
    on_progress: Callable[[CoreLoading], None],
    metrics: LlmMetrics,
) -> TrtllmClient:
    return TrtllmClient(TrtllmRuntimeLoader(model, options, find), options, on_progress, metrics)
