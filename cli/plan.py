"""The plan of a server, from the options of the command line: models, endpoints, shared state. Opens no port."""

import logging
from dataclasses import dataclass

from ..engine.options import EngineOptions
from ..processes.client_shared_memory import SharedMemoryRegistry
from ..telemetry.log_settings import LogControl
from ..telemetry.metric_families import MetricsConfig
from ..telemetry.shared_state import SharedState
from ..telemetry.trace_file import check_trace_file
from ..telemetry.trace_settings import TENSORS, TraceControl, parse_trace_config
from .endpoint_settings import EndpointSettings
from .grpc_options import GrpcOptions
from .model_selection import ModelSelection, select_models
from .repository_options import RepositoryOptions
from .server_options import ServerOptions, is_true
from .triton_flags import TritonFlags

log = logging.getLogger(__name__)

_LOADS = "model-repository"
"""The restricted API that loads and unloads models."""


@dataclass(frozen=True, slots=True)
class ServePlan:
    """The models to serve, and how."""

    endpoints: EndpointSettings
    selection: ModelSelection
    shared: SharedState
    server: ServerOptions
    grpc: GrpcOptions
    metrics: MetricsConfig


def check_triton_flags(options: TritonFlags) -> None:
    """Warn of flags of tritonserver that have no effect, and refuse those that would be missed.

    Raises:
        Unsupported: that is so; the message names the flag.
    """
    options.unsupported.check()
    if options.ignored.given:
        log.warning("flags of tritonserver that have no effect here: %s", ", ".join(options.ignored.given))


def warn_of_unprotected_control(
    repository: RepositoryOptions, server: ServerOptions, grpc: GrpcOptions, endpoints: EndpointSettings
) -> None:
    """In mode explicit, warn of endpoints that let everybody load a model, and so run the code that it brings."""
    if repository.model_control_mode != "explicit" or endpoints.keys:
        return
    doors = {
        "HTTP": is_true(server.allow_http) and _LOADS not in endpoints.http.required_headers,
        "gRPC": is_true(grpc.allow_grpc) and "RepositoryModelLoad" not in endpoints.grpc_policy.required_headers,
    }
    if any(doors.values()):
        log.warning(
            "whoever reaches this server over %s may load models, which is to run code here: set --api-key-file, or "
            "restrict '%s' by --http-restricted-api and --grpc-restricted-protocol",
            " or ".join(door for door, everybody in doors.items() if everybody),
            _LOADS,
        )


def selection_from_flags(
    model: str | None, repository: RepositoryOptions, engine: EngineOptions, metrics: MetricsConfig
) -> ModelSelection:
    """The models that the flags ask for.

    Raises:
        InvalidArgument: there is nothing to serve, or what is asked for contradicts itself.
    """
    given = {name: str(value) for name, value in engine.given().items()}
    return select_models(model, repository, given, metrics.quantiles if metrics.summaries else ())


def shared_state(server: ServerOptions, logs: LogControl) -> SharedState:
    """The state that all models share: client shared memory, log and trace settings.

    Raises:
        InvalidArgument: --trace-config says what it cannot, or names a file that cannot be written.
    """
    traces = parse_trace_config(server.trace_config)
    check_trace_file(traces)
    if traces.spans is not None and TENSORS in traces.trace_level:
        log.warning("--trace-config level=TENSORS has no effect: spans hold no tensors")
    if traces.spans is not None and not traces.enabled:
        log.warning("nothing is traced: --trace-config level=TIMESTAMPS is not given")
    return SharedState(SharedMemoryRegistry(is_true(server.allow_client_shm)), logs, TraceControl(traces))
