"""Builds the models of the backends `tensorrtllm` and `llmapi`: on TensorRT-LLM or, of Triton's repositories where that
is not installed, on our own engine. Entries of the repository's table of backends. Imports no torch."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ...core.errors import InvalidArgument
from ...core.model import MemoryNeed, Model, ModelConfig
from .. import build
from ..client.engine import EngineSpec
from ..client.infer import OWN_LAYOUT, InferLayout
from ..client.llm import LlmModel, own_engine_spec
from ..options import parse_settings
from ..trtllm.build import trtllm_engine_spec
from ..trtllm.options import TrtllmOptions, is_set, read_model_source, read_model_yaml
from .llmapi_layout import LlmapiLayout
from .own_engine import computes_here, read_own_settings
from .token_layout import TokenLayout

log = logging.getLogger(__name__)

_EXCLUDED = "exclude_input_in_output"


def tensorrt_llm_model(
    written: ModelConfig,
    path: str,
    parameters: Mapping[str, str],
    on_progress: Callable[[str, float, float, str], None],
    **granted: int,
) -> Model:
    """A language model: the checkpoint or prebuilt engine at `path`, which a parameter or `model.yaml` may replace.
    `written`: its config, whose tensors tell which of Triton's layouts it has; without any it has our own.

    Raises:
        InvalidArgument: a parameter is unknown or wrong; the message names it.
    """
    layout = _layout(written, path, parameters)
    if computes_here(path, parameters):
        own = read_own_settings(path, parameters)
        idle, spec = own.idle, own_engine_spec(build.granted_config(path, own.parameters, **granted))
    else:
        idle, spec = _trtllm_spec(path, parameters)
    if idle:
        log.warning("model '%s': parameters without effect here: %s", written.name, ", ".join(idle))
    return LlmModel(written.name, written.version, replace(spec, backend=written.backend), on_progress, layout)


def _trtllm_spec(path: str, parameters: Mapping[str, str]) -> tuple[tuple[str, ...], EngineSpec]:
    found = read_model_source(path, parameters)
    return found.idle, trtllm_engine_spec(found.model, parse_settings(found.settings, TrtllmOptions))


def _layout(written: ModelConfig, path: str, parameters: Mapping[str, str]) -> InferLayout:
    inputs = {spec.name for spec in written.inputs}
    if "input_lengths" in inputs:
        excludes = parameters.get(_EXCLUDED, "")
        return TokenLayout.of_config(written, is_set(excludes) and excludes.lower() in ("true", "1"))
    if written.backend != "llmapi" and not any(name.startswith("sampling_param_") for name in inputs):
        return OWN_LAYOUT
    asked = read_model_yaml(path).get("triton_config") or {}
    if written.max_batch_size or asked.get("max_batch_size"):
        message = f"model '{written.name}' must have max_batch_size 0: a request has one prompt"
        raise InvalidArgument(message, field="max_batch_size")
    return LlmapiLayout(written.decoupled or bool(asked.get("decoupled")))


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
