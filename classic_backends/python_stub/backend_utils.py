"""`triton_python_backend_utils`, as a `model.py` imports it: tensors, requests, responses, senders, calls to other
models, logs and metrics.

The interface is that of https://github.com/triton-inference-server/python_backend#readme. A leading underscore, or no
place in `__all__`, marks what models should not use.
"""

from __future__ import annotations

from typing import Any, Sequence

from .connection import server
from .logger import Logger
from .metrics import Metric, MetricFamily
from .model_config import ModelConfig
from .request import (
    TRITONSERVER_MEMORY_CPU,
    TRITONSERVER_MEMORY_GPU,
    TRITONSERVER_REQUEST_RELEASE_ALL,
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    InferenceRequest,
    InferenceTrace,
    PreferredMemory,
    ResponseIterator,
)
from .response import InferenceResponse
from .response_sender import TRITONSERVER_RESPONSE_COMPLETE_FINAL, InferenceResponseSender
from .tensor import (
    TRITON_STRING_TO_NUMPY,
    Tensor,
    deserialize_bytes_tensor,
    numpy_to_triton_type,
    serialize_byte_tensor,
    triton_string_to_numpy,
    triton_to_numpy_type,
)
from .triton_error import TritonError, TritonModelException

__all__ = [
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "TRITON_STRING_TO_NUMPY",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "InferenceTrace",
    "Logger",
    "Metric",
    "MetricFamily",
    "ModelConfig",
    "PreferredMemory",
    "ResponseIterator",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "deserialize_bytes_tensor",
    "get_input_config_by_name",
    "get_input_tensor_by_name",
    "get_model_dir",
    "get_output_config_by_name",
    "get_output_tensor_by_name",
    "is_model_ready",
    "load_model",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "unload_model",
    "using_decoupled_model_transaction_policy",
]

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2

_model_directory = ""


def set_model_directory(directory: str) -> None:
    """Set what `get_model_dir` returns."""
    global _model_directory
    _model_directory = directory


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    return _find(inference_request.inputs(), name)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    if inference_response._error is not None:
        raise TritonModelException(inference_response._error.message())
    return _find(inference_response.output_tensors(), name)


def _find(tensors: Sequence[Tensor], name: str) -> Tensor | None:
    return next((tensor for tensor in tensors if tensor._name == name), None)


def get_input_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((each for each in model_config.get("input", ()) if each["name"] == name), None)


def get_output_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((each for each in model_config.get("output", ()) if each["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: dict[str, Any]) -> bool:
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def get_model_dir() -> str:
    """The directory of the model's version."""
    return _model_directory


def load_model(model_name: str, config: str = "", files: dict[str, bytes] | None = None) -> None:
    """Load a model of the server's repositories, where the server was started with explicit model control."""
    encoded = {path: content.hex() for path, content in (files or {}).items()}
    server().call("load_model", name=model_name, config=config, files=encoded)


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    server().call("unload_model", name=model_name, dependents=unload_dependents)


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    return bool(server().call("is_model_ready", name=model_name, version=str(model_version)))
