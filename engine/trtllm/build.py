"""Builds a model that TensorRT-LLM runs, for the repository's table of backends."""

from collections.abc import Callable, Mapping

from ...core.model import Model
from ...telemetry.llm_metrics import LlmMetrics
from ..core.messages import CoreLoading
from ..frontend.engine import EngineSpec
from ..frontend.llm import LlmModel
from ..options import parse_settings
from .client import TrtllmClient
from .options import TrtllmOptions, read_model_source
from .runtime import TrtllmRuntimeLoader

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


def trtllm_engine_spec(model: str, options: TrtllmOptions) -> EngineSpec:
    """The engine of a model, with the capabilities that its options give it."""
    means = {"adapter": options.adapters, "guided_decoding": options.guided_decoding_backend}
    capabilities = frozenset(name for name, given in means.items() if given)

    def connect(on_progress: Callable[[CoreLoading], None], metrics: LlmMetrics) -> TrtllmClient:
        return TrtllmClient(TrtllmRuntimeLoader(model, options), options, on_progress, metrics)

    return EngineSpec(BACKEND, options.tokenizer or model, connect, capabilities, options.chat_template or "")
