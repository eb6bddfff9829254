"""Builds a model of Triton's vLLM backend on our own engine, and says what it needs: entries of the repository's table
of backends. Imports no torch."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ...core.model import MemoryNeed, Model, ModelConfig
from .. import build
from ..frontend.llm import LlmModel, own_engine_spec
from .model_json import read_model_json
from .tensors import VLLM_LAYOUT

log = logging.getLogger(__name__)


def vllm_model(
    written: ModelConfig,
    path: str,
    parameters: Mapping[str, str],
    on_progress: Callable[[str, float, float, str], None],
    **granted: int,
) -> Model:
    """The model that `model.json` in the directory `path` describes. Names the arguments without effect in the log.

    Raises:
        InvalidArgument: see `read_model_json`.
    """
    found = read_model_json(path, parameters)
    if found.idle:
        reasons = ", ".join(f"{argument} ({reason})" for argument, reason in found.idle.items())
        log.warning("model '%s': engine arguments of vLLM without effect here: %s", written.name, reasons)
    spec = replace(own_engine_spec(build.granted_config(path, found.parameters, **granted)), backend="vllm")
    layout = VLLM_LAYOUT if spec.lora is None else replace(VLLM_LAYOUT, refused={})
    return LlmModel(written.name, written.version, spec, on_progress, layout)


def memory_needed(path: str, parameters: Mapping[str, str], gpus: Sequence[int]) -> tuple[MemoryNeed, ...]:
    """See `engine.build`'s."""
    return build.memory_needed(path, read_model_json(path, parameters).parameters, gpus)


def examine(path: str, parameters: Mapping[str, str]) -> str:
    """See `engine.build`'s."""
    return build.examine(path, read_model_json(path, parameters).parameters)
