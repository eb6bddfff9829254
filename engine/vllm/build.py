"""Triton's vLLM backend (https://github.com/triton-inference-server/vllm_backend) on our own engine. Sampling
parameters that a request leaves out have vLLM's defaults, not the checkpoint's. Imports no torch."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...core.backends import OnProgress, TextBackend
from ...core.media_models import MediaPart, MediaRefusal, MediaServices
from ...core.model import MemoryNeed, Model, ModelConfig
from ...core.request import GenerateChunk
from ...core.tensor import TensorSpec
from .. import build
from ..client.client import own_engine_spec
from ..client.infer import OUTPUT_VALUES, OutputTensor, TensorLayout
from ..client.llm import LlmModel
from .model_json import read_model_json

_RETURNED = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")


def _finish_reasons(chunks: Sequence[GenerateChunk], _: Sequence[float]) -> list[bytes]:
    return [str(chunk.finish_reason).encode() for chunk in chunks]


VLLM_LAYOUT = TensorLayout(
    inputs=(
        TensorSpec("text_input", "BYTES", (1,)),
        TensorSpec("image", "BYTES", (-1,), optional=True),
        TensorSpec("stream", "BOOL", (1,), optional=True),
        TensorSpec("sampling_parameters", "BYTES", (1,), optional=True),
        TensorSpec("exclude_input_in_output", "BOOL", (1,), optional=True),
        *(TensorSpec(f"return_{name}", "BOOL", (1,), optional=True) for name in _RETURNED),
        TensorSpec("embedding_request", "BYTES", (1,), optional=True),
    ),
    outputs=(
        OutputTensor(TensorSpec("text_output", "BYTES", (-1,)), OUTPUT_VALUES["text_output"]),
        OutputTensor(
            TensorSpec("finish_reason", "BYTES", (-1,)),
            _finish_reasons,
        ),
        OutputTensor(TensorSpec("cumulative_logprob", "FP32", (-1,)), OUTPUT_VALUES["cumulative_logprob"]),
        OutputTensor(TensorSpec("logprobs", "BYTES", (-1,)), OUTPUT_VALUES["logprobs"]),
        OutputTensor(TensorSpec("num_input_tokens", "UINT32", (1,)), OUTPUT_VALUES["num_input_tokens"]),
        OutputTensor(TensorSpec("num_output_tokens", "UINT32", (-1,)), OUTPUT_VALUES["num_output_tokens"]),
    ),
    defaults={"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0},
    refused={"lora_name": "LoRA feature is not enabled."},
    echoes=True,
    implied_stream=False,
)
"""Before the last response of a stream the finish reason is "None", as in vLLM's backend."""


log = logging.getLogger(__name__)


def vllm_model(
    written: ModelConfig,
    path: str,
    parameters: Mapping[str, str],
    on_progress: OnProgress,
    media: MediaServices | MediaRefusal | None = None,
    **granted: Any,
) -> Model:
    """The model that `model.json` in the directory `path` describes. Logs the arguments without effect. Raises as
    `read_model_json`."""
    model_json = read_model_json(path, parameters)
    if model_json.idle:
        reasons = ", ".join(f"{argument} ({reason})" for argument, reason in model_json.idle.items())
        log.warning("model '%s': engine arguments of vLLM without effect here: %s", written.name, reasons)
    config = build.granted_config(path, model_json.parameters, **granted)
    spec = replace(own_engine_spec(config), backend="vllm")
    seen = build.model_media(written.name, config, media)
    layout = VLLM_LAYOUT if spec.lora is None else replace(VLLM_LAYOUT, refused={})
    return LlmModel(written.name, written.version, spec, on_progress, layout, seen)


def memory_needed(path: str, parameters: Mapping[str, str], gpus: Sequence[int]) -> tuple[MemoryNeed, ...]:
    """See `engine.build`'s."""
    return build.memory_needed(path, read_model_json(path, parameters).parameters, gpus)


def media_part(path: str, parameters: Mapping[str, str], gpus: Sequence[int]) -> MediaPart | None:
    """See `engine.build`'s."""
    return build.media_part(path, read_model_json(path, parameters).parameters, gpus)


def examine(path: str, parameters: Mapping[str, str]) -> str:
    """See `engine.build`'s."""
    return build.examine(path, read_model_json(path, parameters).parameters)


TEXT_BACKEND = TextBackend(vllm_model, memory_needed, examine, written_tensors="implied", find_media_part=media_part)
