"""The RPCs of GRPCInferenceService besides inference: health, metadata, repository, shared memory, settings.

A handler takes the administration and the request. It returns the fields of the response as JSON has them, or raises
`CharoniaError`.
"""

import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from ...core.errors import InvalidArgument, ServerExiting, Unsupported
from ...core.gateway import ModelLookup
from ...processes.client_shared_memory import CudaMemoryRegion
from ...telemetry.logging_setup import parse_log_format
from ...telemetry.shared_state import ServerAdministration
from ...telemetry.trace_settings import TraceSettingsChange
from ..chunked_json import check_config_size
from ..metadata import cuda_region_json, model_metadata, model_stats_json
from .messages import parse_version, read_parameter
from .wire_format import ProtoMessage

JsonMessage: TypeAlias = dict[str, Any]
"""A message as JSON has it."""

ControlRpc: TypeAlias = Callable[[ServerAdministration, ProtoMessage], Awaitable[JsonMessage | None]]

BoundRpc: TypeAlias = Callable[[ProtoMessage], Awaitable[JsonMessage | None]]
"""A control RPC, whoever answers it."""

_FILE = "file:"


async def server_live(lookup: ModelLookup, request: ProtoMessage) -> JsonMessage:
    return {"live": lookup.alive()}


async def server_ready(lookup: ModelLookup, request: ProtoMessage) -> JsonMessage:
    if lookup.exiting():
        raise ServerExiting
    return {"ready": lookup.ready()}


async def model_ready(administration: ServerAdministration, request: ProtoMessage) -> JsonMessage:
    return {"ready": not await administration.unready_reason(request.name, parse_version(request.version))}


async def describe_model(administration: ServerAdministration, request: ProtoMessage) -> JsonMessage:
    return model_metadata(administration, request.name, parse_version(request.version))


async def model_config(administration: ServerAdministration, request: ProtoMessage) -> JsonMessage:
    return {"config": administration.model_config(request.name, parse_version(request.version)).raw}


async def model_statistics(administration: ServerAdministration, request: ProtoMessage) -> JsonMessage:
    statistics = administration.model_statistics(request.name, parse_version(request.version))
    return {"model_stats": [model_stats_json(model) for model in statistics]}


# The repository


async def repository_index(administration: ServerAdministration, request: ProtoMessage) -> JsonMessage:
    _refuse_repository(request)
    entries = await administration.repository_index(request.ready)
    return {"models": [{**entry._asdict(), "state": entry.state or ""} for entry in entries]}


async def load_model(administration: ServerAdministration, request: ProtoMessage) -> None:
    _refuse_repository(request)
    config, files = None, {}
    for key, parameter in request.parameters.items():
        if key == "config":
            config = read_parameter(parameter, "string_param", f"load parameter '{key}'", key)
            await check_config_size(config)
        elif key.startswith(_FILE):
            files[key.removeprefix(_FILE)] = read_parameter(parameter, "bytes_param", f"load parameter '{key}'", key)
        else:
            raise InvalidArgument(f"unrecognized load parameter '{key}'", field=key)
    await administration.load_model(request.model_name, config, files)


async def unload_model(administration: ServerAdministration, request: ProtoMessage) -> None:
    _refuse_repository(request)
    dependents = False
    for key, parameter in request.parameters.items():
        if key != "unload_dependents":
            raise InvalidArgument(f"unrecognized unload parameter '{key}'", field=key)
        dependents = bool(read_parameter(parameter, "bool_param", f"'{key}' parameter", key))
    await administration.unload_model(request.model_name, dependents)


def _refuse_repository(request: ProtoMessage) -> None:
    if request.repository_name:
        raise Unsupported("'repository_name' specification is not supported", field="repository_name")


# Shared memory


async def system_status(administration: ServerAdministration, request: ProtoMessage) -> JsonMessage:
    regions = administration.shared_state.shared_memory.status(request.name)
    return {"regions": {region.name: region._asdict() for region in regions}}


async def system_register(administration: ServerAdministration, request: ProtoMessage) -> None:
    administration.shared_state.shared_memory.register(request.name, request.key, request.offset, request.byte_size)


async def system_unregister(administration: ServerAdministration, request: ProtoMessage) -> None:
    administration.shared_state.shared_memory.unregister(request.name)


async def cuda_status(administration: ServerAdministration, request: ProtoMessage) -> JsonMessage:
    regions = administration.shared_state.shared_memory.status_cuda(request.name)
    return {"regions": {region.name: cuda_region_json(region) for region in regions}}


async def cuda_register(administration: ServerAdministration, request: ProtoMessage) -> None:
    region = CudaMemoryRegion(request.name, request.raw_handle, request.device_id, request.byte_size)
    await administration.shared_state.shared_memory.register_cuda(region)


async def cuda_unregister(administration: ServerAdministration, request: ProtoMessage) -> None:
    administration.shared_state.shared_memory.unregister_cuda(request.name)


# Settings


async def trace_setting(administration: ServerAdministration, request: ProtoMessage) -> JsonMessage:
    if request.model_name and not administration.is_model_ready(request.model_name):
        raise InvalidArgument(f"Request for unknown model : {request.model_name}", field="model_name")
    change: TraceSettingsChange = {name: tuple(setting.value) for name, setting in request.settings.items()}
    traces = administration.shared_state.traces
    settings = traces.update(change, request.model_name) if change else traces.settings(request.model_name)
    return {"settings": {name: {"value": values} for name, values in settings.as_v2_texts().items()}}


# By name: the field of the message that holds the value, and its type in Triton's error texts.
_LOG_KINDS = {
    "log_file": ("string_param", "string"),
    "log_info": ("bool_param", "boolean"),
    "log_warning": ("bool_param", "boolean"),
    "log_error": ("bool_param", "boolean"),
    "log_verbose_level": ("uint32_param", "int32"),
    "log_format": ("string_param", "string"),
}


async def log_settings(administration: ServerAdministration, request: ProtoMessage) -> JsonMessage:
    logs = administration.shared_state.logs
    changed: dict[str, Any] = {}
    for name, setting in request.settings.items():
        if name not in _LOG_KINDS:
            raise InvalidArgument(f"unknown log setting '{name}'", field=name)
        kind, called = _LOG_KINDS[name]
        if setting.WhichOneof("parameter_choice") != kind:
            raise InvalidArgument(f"expect {called} for '{name}'", field=name)
        value = getattr(setting, kind)
        changed[name] = parse_log_format(value) if name == "log_format" else value
    settings = logs.update(replace(logs.settings, **changed)) if changed else logs.settings
    return {"settings": {name: {kind: getattr(settings, name)} for name, (kind, _) in _LOG_KINDS.items()}}


CONTROL_RPCS: dict[str, ControlRpc] = {
    "ServerLive": server_live,
    "ServerReady": server_ready,
    "ModelReady": model_ready,
    "ModelMetadata": describe_model,
    "ModelConfig": model_config,
    "ModelStatistics": model_statistics,
    "RepositoryIndex": repository_index,
    "RepositoryModelLoad": load_model,
    "RepositoryModelUnload": unload_model,
    "SystemSharedMemoryStatus": system_status,
    "SystemSharedMemoryRegister": system_register,
    "SystemSharedMemoryUnregister": system_unregister,
    "CudaSharedMemoryStatus": cuda_status,
    "CudaSharedMemoryRegister": cuda_register,
    "CudaSharedMemoryUnregister": cuda_unregister,
    "TraceSetting": trace_setting,
    "LogSettings": log_settings,
}
"""The handlers, by the names of their RPCs."""


_READING = re.compile(r"\w+(Config|Index|Live|Metadata|Ready|Statistics|Status)")
"""The names of RPCs that change nothing."""


def bound_rpcs(
    administration: ServerAdministration, settle: Callable[[], Awaitable[None]] | None = None
) -> dict[str, BoundRpc]:
    """The control RPCs of a process that has models, by their names. `settle`: awaited before the response to those
    that may change the server's state, where other processes go by it too."""

    async def answer(rpc: ControlRpc, settle: Callable[[], Awaitable[None]], request: ProtoMessage) -> Any:
        try:
            return await rpc(administration, request)
        finally:
            await settle()

    bound: dict[str, BoundRpc] = {name: partial(rpc, administration) for name, rpc in CONTROL_RPCS.items()}
    if settle is not None:
        bound |= {
            name: partial(answer, rpc, settle) for name, rpc in CONTROL_RPCS.items() if not _READING.fullmatch(name)
        }
    return bound
