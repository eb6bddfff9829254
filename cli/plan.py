"""What to serve and how: the command line's options as what they stand for. Loads nothing, opens no port."""

import logging
import os
from dataclasses import dataclass

from ..api.api_keys import KeyOptions, Keyring, load_keyring
from ..api.grpc import call_policy
from ..api.grpc.tls_files import load_tls_files
from ..api.http.rules import HttpRules, parse_http_rules
from ..api.tls import KeyPair, parse_key_pair
from ..api.triton.clouds import CloudEndpoint, configure_clouds
from ..core.client_shared_memory import SharedMemoryRegistry
from ..core.log_settings import LogControl
from ..core.shared_state import SharedState
from ..core.trace_settings import TENSORS, TraceControl, parse_trace_config
from ..engine.options import EngineOptions
from ..telemetry.metrics_config import MetricsConfig
from ..telemetry.trace_file import check_trace_file
from .cloud_options import CloudOptions
from .grpc_options import GrpcOptions
from .http_options import HttpOptions
from .model_selection import ModelSelection, select_models
from .repository_options import RepositoryOptions
from .server_options import ServerOptions, is_true
from .triton_flags import TritonFlags

log = logging.getLogger(__name__)

_LOADS = "model-repository"
"""The restricted API that loads and unloads."""


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """Who may come in over HTTP (`rules`) or gRPC (`calls`), and how; `clouds`: by other doors."""

    keys: Keyring
    http: HttpRules
    grpc: call_policy.GrpcCallPolicy
    tls: KeyPair | None
    clouds: tuple[CloudEndpoint, ...] = ()


@dataclass(frozen=True, slots=True)
class ServePlan:
    """What to serve and how."""

    endpoints: EndpointSettings
    selection: ModelSelection
    shared: SharedState
    server: ServerOptions
    grpc: GrpcOptions
    metrics: MetricsConfig


def check_triton_flags(options: TritonFlags) -> None:
    """What tritonserver would have done and nobody does here is told, and refused where it would be missed.

    Raises:
        Unsupported: that is so; the message names the flag.
    """
    options.unsupported.check()
    if options.ignored.given:
        log.warning("flags of tritonserver that have no effect here: %s", ", ".join(options.ignored.given))


def endpoint_settings(
    server: ServerOptions, http: HttpOptions, access: KeyOptions, grpc: GrpcOptions, cloud: CloudOptions
) -> EndpointSettings:
    """What the doors are made with, gRPC's files read on trial.

    Raises:
        InvalidArgument: files of TLS or keys are no good, or a rule means nothing, or a cloud's environment lacks what
            its door needs.
    """
    load_tls_files(grpc)
    tls = parse_key_pair(server.http_server_cert, server.http_server_key, "--http-server")
    keys = load_keyring(access)
    return EndpointSettings(
        keys,
        parse_http_rules(http),
        call_policy.build_call_policy(grpc, keys),
        tls,
        configure_clouds(cloud, os.environ),
    )


def warn_of_unprotected_control(
    repository: RepositoryOptions, server: ServerOptions, grpc: GrpcOptions, entry: EndpointSettings
) -> None:
    """In mode explicit, tell which doors let anybody load a model, and so run what it brings."""
    if repository.model_control_mode != "explicit" or entry.keys:
        return
    doors = {
        "HTTP": is_true(server.allow_http) and _LOADS not in entry.http.required_headers,
        "gRPC": is_true(grpc.allow_grpc) and "RepositoryModelLoad" not in entry.grpc.required_headers,
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
    """The models that are asked for.

    Raises:
        InvalidArgument: there is nothing to serve, or what is asked for contradicts itself.
    """
    given = {name: str(value) for name, value in engine.given().items()}
    return select_models(model, repository, given, metrics.quantiles if metrics.summaries else ())


def shared_state(server: ServerOptions, logs: LogControl) -> SharedState:
    """What all models share.

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
