"""Metadata of the server and of models as KServe's v2 protocol has them, the same over HTTP and gRPC."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..core.model import ModelConfig
from ..core.tensor import TensorSpec
from .size_limits import MAX_RAW_BYTES

EXTENSIONS = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
)
"""Names of the extensions that are served in full, in Triton's order. The generate extension has no name."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The server's name and version; and how many bytes of JSON, and of raw tensors, a request may have."""

    name: str = "triton"
    version: str = ""
    max_input_size: int = 64 * 1024 * 1024
    max_raw_size: int = MAX_RAW_BYTES


def server_metadata(info: ServerInfo) -> dict[str, Any]:
    return {"name": info.name, "version": info.version, "extensions": list(EXTENSIONS)}


def model_metadata(config: ModelConfig, versions: Sequence[str]) -> dict[str, Any]:
    return {
        "name": config.name,
        "versions": list(versions),
        "platform": config.platform or config.backend,
        "inputs": [_tensor_metadata(spec, config) for spec in config.inputs],
        "outputs": [_tensor_metadata(spec, config) for spec in config.outputs],
    }


def _tensor_metadata(spec: TensorSpec, config: ModelConfig) -> dict[str, Any]:
    batch = [-1] if config.max_batch_size > 0 else []
    return {"name": spec.name, "datatype": spec.datatype, "shape": [*batch, *spec.dims]}
