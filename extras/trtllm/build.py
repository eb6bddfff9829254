"""The backends `tensorrtllm` and `llmapi`: models on TensorRT-LLM or, of Triton's repositories where that is not
installed, on our own engine. Imports no torch."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...core.backends import OnProgress, TextBackend
from ...core.errors import InvalidArgument
from ...core.model import MemoryNeed, Model, ModelConfig
from ...engine import build
from ...engine.client.client import own_engine_spec
from ...engine.client.engine import EngineSpec
from ...engine.client.infer import OWN_LAYOUT, InferLayout
from ...engine.client.llm import LlmModel
from ...engine.core.messages import CoreLoading
from ...engine.options import parse_settings
from ...telemetry.llm_metrics import LlmMetrics
from .check import report
from .client import TrtllmClient
from .llmapi_layout import LlmapiLayout
from .options import TrtllmOptions, is_set, read_model_source, read_model_yaml
from .own_engine import computes_here, read_own_settings
from .runtime import TrtllmRuntimeLoader
from .token_layout import TokenLayout

log = logging.getLogger(__name__)

BACKEND = "tensorrtllm"

_EXCLUDED = "exclude_input_in_output"


def trtllm_engine_spec(model: str, options: TrtllmOptions) -> EngineSpec:
    """The engine of a model that TensorRT-LLM runs, with the capabilities that its options give it."""
    means = {"adapter": options.adapters, "guided_decoding": options.guided_decoding_backend}
    capabilities = frozenset(name for name, option in means.items() if option)

    def connect(on_progress: Callable[[CoreLoading], None], metrics: LlmMetrics) -> TrtllmClient:
        return TrtllmClient(TrtllmRuntimeLoader(model, options), options, on_progress, metrics)

    template = options.chat_template or ""
    return EngineSpec(
        BACKEND,
        options.tokenizer or model,
        connect,
        capabilities,
        template,
        parsers=options.parsers,
        adapters=options.adapters,
    )


def tensorrt_llm_model(
    written: ModelConfig,
    path: str,
    parameters: Mapping[str, str],
    on_progress: OnProgress,
    **granted: Any,
) -> Model:
    """A language model: the checkpoint or prebuilt engine at `path`, which a parameter or `model.yaml` may replace.
    `written`: its config, whose tensors tell which of Triton's layouts it has; without any it has our own.

    Raises:
        InvalidArgument: a parameter is unknown or wrong; the message names it.
    """
    layout = _layout(written, path, parameters)
    if computes_here(path, parameters):
        own = read_own_settings(path, parameters)
        idle = own.idle
        spec = own_engine_spec(build.granted_config(path, own.parameters, **granted))
    else:
        idle, spec = _trtllm_spec(path, parameters)
    if idle:
        log.warning("model '%s': parameters without effect here: %s", written.name, ", ".join(idle))
    return LlmModel(written.name, written.version, replace(spec, backend=written.backend), on_progress, layout)


def _trtllm_spec(path: str, parameters: Mapping[str, str]) -> tuple[tuple[str, ...], EngineSpec]:
    source = read_model_source(path, parameters)
    return source.idle, trtllm_engine_spec(source.model, parse_settings(source.settings, TrtllmOptions))


def _layout(written: ModelConfig, path: str, parameters: Mapping[str, str]) -> InferLayout:
    inputs = {spec.name for spec in written.inputs}
    if "input_lengths" in inputs:
        excludes = parameters.get(_EXCLUDED, "")
        return TokenLayout.of_config(written, is_set(excludes) and excludes.lower() in ("true", "1"))
    if written.backend != "llmapi" and not any(name.startswith("sampling_param_") for name in inputs):
        return OWN_LAYOUT
    triton_config = read_model_yaml(path).get("triton_config") or {}
    if written.max_batch_size or triton_config.get("max_batch_size"):
        message = f"model '{written.name}' must have max_batch_size 0: a request has one prompt"
        raise InvalidArgument(message, field="max_batch_size")
    return LlmapiLayout(written.decoupled or bool(triton_config.get("decoupled")))


def memory_needed(path: str, parameters: Mapping[str, str], gpus: Sequence[int]) -> tuple[MemoryNeed, ...]:
    """See `engine.build`'s; nothing is known of TensorRT-LLM's."""
    if not computes_here(path, parameters):
        return ()
    return build.memory_needed(path, read_own_settings(path, parameters).parameters, gpus)


def examine(path: str, parameters: Mapping[str, str]) -> str:
    """See `engine.build`'s; nothing is known of TensorRT-LLM's."""
    if not computes_here(path, parameters):
        return ""
    return build.examine(path, read_own_settings(path, parameters).parameters)


TENSORRT_LLM = TextBackend(
    tensorrt_llm_model,
    memory_needed,
    examine,
    written_tensors="served",
    serves_checkpoints=True,
    check_library=report,
)
LLMAPI = TENSORRT_LLM._replace(serves_checkpoints=False, check_library=None)
