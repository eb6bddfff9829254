"""Metadata and statistics as KServe's v2 protocol and Triton's extensions have them, the same over HTTP and gRPC.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_statistics.md
"""

from dataclasses import asdict, dataclass
from typing import Any

from ..core.gateway import ModelLookup
from ..core.metrics import ModelStatistics, StatisticDuration
from ..core.tensor import TensorSpec
from ..processes.client_shared_memory import CudaMemoryRegion
from .size_limits import MAX_JSON_BYTES, MAX_RAW_BYTES, MAX_RESPONSE_BYTES

EXTENSIONS = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "cuda_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
)
"""Names of the extensions that are served in full, in Triton's order. The generate extension has no name."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The server's name and version; how many bytes of JSON, and of raw tensors, a request may have, and of tensors a
    response."""

    name: str = "triton"
    version: str = ""
    max_input_size: int = MAX_JSON_BYTES
    max_raw_size: int = MAX_RAW_BYTES
    max_response_size: int = MAX_RESPONSE_BYTES


def server_metadata(info: ServerInfo) -> dict[str, Any]:
    return {"name": info.name, "version": info.version, "extensions": list(EXTENSIONS)}


def model_metadata(lookup: ModelLookup, name: str, version: str) -> dict[str, Any]:
    """The metadata of a version; without one, of the latest, with all versions that are served."""
    config = lookup.model_config(name, version)
    batch = [-1] if config.max_batch_size > 0 else []

    def describe(spec: TensorSpec) -> dict[str, Any]:
        return {"name": spec.name, "datatype": spec.datatype, "shape": [*batch, *spec.dims]}

    return {
        "name": config.name,
        "versions": [version] if version else list(lookup.served_versions(name)),
        "platform": config.platform or config.backend,
        "inputs": [describe(spec) for spec in config.inputs],
        "outputs": [describe(spec) for spec in config.outputs],
    }


def model_stats_json(model: ModelStatistics) -> dict[str, Any]:
    """A member of a response's `model_stats`, but for `explain`, which the extension has no field for."""
    statistics = model.statistics
    return {
        "name": model.name,
        "version": model.version,
        "last_inference": statistics.last_inference,
        "inference_count": statistics.inference_count,
        "execution_count": statistics.execution_count,
        "inference_stats": _times(statistics.inference),
        "response_stats": {index: _times(response) for index, response in statistics.responses.items()},
        "batch_stats": [_times(batch) for batch in statistics.batches],
        "memory_usage": [usage._asdict() for usage in statistics.memory],
    }


def cuda_region_json(region: CudaMemoryRegion) -> dict[str, Any]:
    """A region as its status shows it: without the handle, by which anybody could open it."""
    return {"name": region.name, "device_id": region.device_id, "byte_size": region.byte_size}


def _times(of: Any) -> dict[str, Any]:
    """The fields of a named tuple of durations, and maybe numbers."""
    return {name: asdict(time) if isinstance(time, StatisticDuration) else time for name, time in of._asdict().items()}
