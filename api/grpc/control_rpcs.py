"""The RPCs of GRPCInferenceService besides inference and metadata: repository, shared memory, statistics, settings.

Translates between the messages and the gateway. Each handler takes the gateway and the request, and raises
`CharoniaError`.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeAlias

from google.protobuf.json_format import ParseDict  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2 as pb

from ...core.errors import InvalidArgument, Unsupported
from ...telemetry.log_settings import parse_log_format
from ...telemetry.shared_state import ServerGateway
from ...telemetry.trace_settings import TraceSettingsChange
from ..model_stats import model_stats_json
from .response_messages import ProtoMessage, parse_version

ControlRpc: TypeAlias = Callable[[ServerGateway, ProtoMessage], Awaitable[ProtoMessage]]

_CONFIG = "config"
_FILE = "file:"
_DEPENDENTS = "unload_dependents"


async def model_config(gateway: ServerGateway, request: ProtoMessage) -> ProtoMessage:
    config = gateway.model_config(request.name, parse_version(request.version))
    return ParseDict({"config": config.raw}, pb.ModelConfigResponse())


async def model_statistics(gateway: ServerGateway, request: ProtoMessage) -> ProtoMessage:
    found = gateway.model_statistics(request.name, parse_version(request.version))
    return ParseDict({"model_stats": model_stats_json(found)}, pb.ModelStatisticsResponse())


# The repository


async def repository_index(gateway: ServerGateway, request: ProtoMessage) -> ProtoMessage:
    _refuse_repository(request)
    found = gateway.repository_index(request.ready)
    models = [{"name": e.name, "version": e.version, "state": str(e.state or ""), "reason": e.reason} for e in found]
    return pb.RepositoryIndexResponse(models=models)


async def load_model(gateway: ServerGateway, request: ProtoMessage) -> ProtoMessage:
    _refuse_repository(request)
    config, files = None, {}
    for key, parameter in request.parameters.items():
        if key == _CONFIG:
            config = _typed(parameter, "string_param", f"load parameter '{key}'")
        elif key.startswith(_FILE):
            files[key.removeprefix(_FILE)] = _typed(parameter, "bytes_param", f"load parameter '{key}'")
        else:
            raise InvalidArgument(f"unrecognized load parameter '{key}'", field=key)
    await gateway.load_model(request.model_name, config, files)
    return pb.RepositoryModelLoadResponse()


async def unload_model(gateway: ServerGateway, request: ProtoMessage) -> ProtoMessage:
    _refuse_repository(request)
    for key, parameter in request.parameters.items():
        if key != _DEPENDENTS:
            raise InvalidArgument(f"unrecognized unload parameter '{key}'", field=key)
        _typed(parameter, "bool_param", f"'{key}' parameter")
    await gateway.unload_model(request.model_name)
    return pb.RepositoryModelUnloadResponse()


def _refuse_repository(request: ProtoMessage) -> None:
    if request.repository_name:
        raise Unsupported("'repository_name' specification is not supported", field="repository_name")


def _typed(parameter: ProtoMessage, kind: str, what: str) -> Any:
    if parameter.WhichOneof("parameter_choice") != kind:
        raise InvalidArgument(f"invalid value type for {what}, expected {kind}.")
    return getattr(parameter, kind)


# Shared memory


async def system_status(gateway: ServerGateway, request: ProtoMessage) -> ProtoMessage:
    found = gateway.shared_state.shared_memory.status(request.name)
    status = pb.SystemSharedMemoryStatusResponse.RegionStatus
    regions = {region.name: status(**region._asdict()) for region in found}
    return pb.SystemSharedMemoryStatusResponse(regions=regions)


async def system_register(gateway: ServerGateway, request: ProtoMessage) -> ProtoMessage:
    gateway.shared_state.shared_memory.register(request.name, request.key, request.offset, request.byte_size)
    return pb.SystemSharedMemoryRegisterResponse()


async def system_unregister(gateway: ServerGateway, request: ProtoMessage) -> ProtoMessage:
    gateway.shared_state.shared_memory.unregister(request.name)
    return pb.SystemSharedMemoryUnregisterResponse()


async def cuda_status(gateway: ServerGateway, request: ProtoMessage) -> ProtoMessage:
    gateway.shared_state.shared_memory.status_cuda(request.name)
    return pb.CudaSharedMemoryStatusResponse()


async def cuda_register(gateway: ServerGateway, request: ProtoMessage) -> ProtoMessage:
    gateway.shared_state.shared_memory.register_cuda(request.name)
    return pb.CudaSharedMemoryRegisterResponse()


async def cuda_unregister(gateway: ServerGateway, request: ProtoMessage) -> ProtoMessage:
    gateway.shared_state.shared_memory.unregister_cuda()
    return pb.CudaSharedMemoryUnregisterResponse()


# Settings


async def trace_setting(gateway: ServerGateway, request: ProtoMessage) -> ProtoMessage:
    if request.model_name and not gateway.is_model_ready(request.model_name):
        raise InvalidArgument(f"Request for unknown model : {request.model_name}", field="model_name")
    change: TraceSettingsChange = {name: tuple(setting.value) for name, setting in request.settings.items()}
    traces = gateway.shared_state.traces
    settings = traces.update(change, request.model_name) if change else traces.settings(request.model_name)
    texts = {name: {"value": values} for name, values in settings.as_v2_texts().items()}
    return ParseDict({"settings": texts}, pb.TraceSettingResponse())


# By name: the field of the message that holds the value, and its type in Triton's error texts.
_LOG_KINDS = {
    "log_file": ("string_param", "string"),
    "log_info": ("bool_param", "boolean"),
    "log_warning": ("bool_param", "boolean"),
    "log_error": ("bool_param", "boolean"),
    "log_verbose_level": ("uint32_param", "int32"),
    "log_format": ("string_param", "string"),
}


async def log_settings(gateway: ServerGateway, request: ProtoMessage) -> ProtoMessage:
    logs = gateway.shared_state.logs
    changed = {name: _log_value(name, value) for name, value in request.settings.items()}
    settings = logs.update(replace(logs.settings, **changed)) if changed else logs.settings
    values = {name: {kind: getattr(settings, name)} for name, (kind, _) in _LOG_KINDS.items()}
    return ParseDict({"settings": values}, pb.LogSettingsResponse())


def _log_value(name: str, value: ProtoMessage) -> Any:
    if name not in _LOG_KINDS:
        raise InvalidArgument(f"unknown log setting '{name}'", field=name)
    kind, called = _LOG_KINDS[name]
    if value.WhichOneof("parameter_choice") != kind:
        raise InvalidArgument(f"expect {called} for '{name}'", field=name)
    given = getattr(value, kind)
    return parse_log_format(given) if name == "log_format" else given


CONTROL_RPCS: dict[str, ControlRpc] = {
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
