"""The plan of a server: options of the command line become models, endpoints and shared state. Opens no port."""

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from ..api.api_keys import Keyring, load_keyring
from ..api.gateway_headers import parse_gateway_headers
from ..api.grpc.settings import GrpcCallPolicy, GrpcSettings, build_call_policy
from ..api.header_rules import HeaderForwarding, read_restrictions
from ..api.http.rules import HttpRules, parse_allowed_hosts, parse_allowed_origins
from ..api.tls import KeyPair, load_tls_files, parse_key_pair
from ..api.triton.clouds import CloudEndpoint, sagemaker_endpoint, vertex_ai_endpoint
from ..core.errors import InvalidArgument, Unavailable
from ..core.extension_contracts import ObserverExtension, RoutesPlan, ServerFacts
from ..core.metrics import MetricFamily
from ..processes.client_shared_memory import SharedMemoryRegistry
from ..telemetry.custom_metrics import CustomMetrics
from ..telemetry.logging_setup import LogControl
from ..telemetry.metric_families import MetricsConfig, parse_metrics_config
from ..telemetry.request_trace import check_trace_file
from ..telemetry.roofline import StepRoofline, read_roofline
from ..telemetry.shared_state import SharedState
from ..telemetry.trace_settings import TENSORS, TraceControl, parse_trace_config
from .extensions import observer_extensions, plan_extensions
from .frontend_count import FrontendCount, count_frontends
from .model_selection import ModelSelection, engine_settings, select_models
from .options import AdapterOptions, CloudOptions, GrpcOptions, HttpOptions, ServeOptions, ServerOptions, is_true

log = logging.getLogger(__name__)

_LOADS = "model-repository"
"""The restricted API that loads and unloads models."""


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """Settings of all endpoints: access, forwarded headers, TLS. `tls` is HTTP's."""

    keys: Keyring
    http: HttpRules
    grpc: GrpcSettings
    grpc_policy: GrpcCallPolicy
    tls: KeyPair | None
    clouds: tuple[CloudEndpoint, ...]


@dataclass(frozen=True, slots=True)
class ServePlan:
    """The models to serve, and how."""

    options: ServeOptions
    endpoints: EndpointSettings
    selection: ModelSelection
    shared: SharedState
    metrics: MetricsConfig
    frontends: FrontendCount
    extensions: tuple[RoutesPlan, ...] = ()
    observers: Sequence[ObserverExtension] = ()

    @property
    def extension_families(self) -> list[MetricFamily]:
        """What extensions measure."""
        return _families(self.extensions, self.observers)


def plan_server(model: str | None, options: ServeOptions, logs: LogControl) -> ServePlan:
    """Read the files and the environment that the options name, and warn of what is risky or has no effect.

    Raises `CharoniaError` if there is nothing to serve, or an option means nothing or contradicts another.
    """
    endpoints = endpoint_settings(options)
    metrics = parse_metrics_config(options.server.metrics_config)
    extensions = tuple(plan_extensions(options.extensions, server_facts(options, endpoints)))
    endpoints = replace(endpoints, http=extended_rules(endpoints.http, extensions))
    unprotected = unprotected_control(options, endpoints)
    if unprotected:
        log.warning(
            "whoever reaches this server over %s may load models, which is to run code here: set --api-key-file, or "
            "restrict '%s' by --http-restricted-api and --grpc-restricted-protocol",
            " or ".join(unprotected),
            _LOADS,
        )
    repository = replace(options.repository, allow_pipelines=options.repository.allow_pipelines or not unprotected)
    if unprotected_routes(options, endpoints):
        log.warning(
            "whoever reaches this server over HTTP may change its routes, which decide what models answer: set "
            "--api-key-file, or restrict '%s' by --http-restricted-api",
            _LOADS,
        )
    if endpoints.http.lora_root is not None and not (endpoints.keys or _LOADS in endpoints.http.required_headers):
        log.warning(
            "whoever reaches this server over HTTP may load and unload adapters: set --api-key-file, or restrict '%s' "
            "by --http-restricted-api",
            _LOADS,
        )
    engine = engine_settings(options.engine, options.adapters)
    selection = select_models(model, repository, engine, metrics.quantiles if metrics.summaries else ())
    observers = observer_extensions()
    reserved = [family.name for family in _families(extensions, observers)]
    shared = _shared_state(options.server, logs, reserved)
    frontends = count_frontends(options.server.frontends)
    return ServePlan(options, endpoints, selection, shared, metrics, frontends, extensions, observers)


def _families(plans: Sequence[RoutesPlan], observers: Sequence[ObserverExtension]) -> list[MetricFamily]:
    routed = [family for plan in plans for family in plan.metrics]
    return [*routed, *(family for observer in observers for family in observer.metrics)]


def server_facts(options: ServeOptions, endpoints: EndpointSettings) -> ServerFacts:
    """What extensions are told before they plan."""
    return ServerFacts(
        serves_http=is_true(options.server.allow_http),
        http_address=options.server.http_address,
        host_names=endpoints.http.allowed_hosts,
        tenants=endpoints.keys.tenant_count,
    )


def extended_rules(rules: HttpRules, extensions: Iterable[RoutesPlan]) -> HttpRules:
    """The rules of the server, and those of what extensions serve."""
    access = tuple(path for plan in extensions for path in plan.access)
    names = [name for plan in extensions for name in plan.host_names]
    return replace(rules, extensions=access, allowed_hosts=(*rules.allowed_hosts, *names))


def endpoint_settings(options: ServeOptions) -> EndpointSettings:
    """Raises `InvalidArgument` for keys or TLS files that are no good, and as the functions below do."""
    grpc = parse_grpc_settings(options.grpc)
    tls = parse_key_pair(options.server.http_server_cert, options.server.http_server_key, "--http-server")
    keys = load_keyring(options.keys.api_key, options.keys.api_key_file)
    gateway = parse_gateway_headers(options.http.trust_gateway_headers, options.http.gateway_objectives)
    grpc_flags = options.grpc.grpc_restricted_protocol, options.grpc.grpc_header_forward_pattern
    policy = build_call_policy(*grpc_flags, keys, gateway)
    clouds = parse_clouds(options.cloud, os.environ)
    http = replace(parse_http_rules(options.http), lora_root=parse_lora_root(options.adapters), gateway=gateway)
    return EndpointSettings(keys, http, grpc, policy, tls, clouds)


def parse_http_rules(options: HttpOptions) -> HttpRules:
    """Raises `InvalidArgument` for a flag that means nothing."""
    required = read_restrictions(options.http_restricted_api, "--http-restricted-api")
    forwarding = HeaderForwarding(options.http_header_forward_pattern)
    origins = parse_allowed_origins(options.allowed_origins)
    hosts = parse_allowed_hosts(options.allowed_hosts)
    timeout = options.http_body_timeout_secs
    return HttpRules(forwarding, required, origins, timeout, allowed_hosts=hosts, api_docs=options.api_docs)


def parse_lora_root(options: AdapterOptions) -> Path | None:
    """The directory that requests may load adapters from; None if they may not. Raises `InvalidArgument` for one of the
    two flags without the other, and if there is no such directory."""
    if options.allow_runtime_lora != (options.lora_root is not None):
        message = "--allow-runtime-lora and --lora-root go together: the latter is what requests may load adapters from"
        raise InvalidArgument(message)
    if options.lora_root is not None and not options.lora_root.is_dir():
        raise InvalidArgument(f"--lora-root: there is no directory '{options.lora_root}'")
    return options.lora_root


def parse_grpc_settings(options: GrpcOptions) -> GrpcSettings:
    """Raises `InvalidArgument` for TLS files that are no good, or of no use, `Unavailable` for reflection without its
    package."""
    tls, mutual = None, is_true(options.grpc_use_ssl_mutual)
    encrypts = mutual or is_true(options.grpc_use_ssl)
    for flag, file, used, switch in (
        ("--grpc-server-cert", options.grpc_server_cert, encrypts, "--grpc-use-ssl true"),
        ("--grpc-server-key", options.grpc_server_key, encrypts, "--grpc-use-ssl true"),
        ("--grpc-root-cert", options.grpc_root_cert, mutual, "--grpc-use-ssl-mutual true"),
    ):
        if file is not None and not used:
            raise InvalidArgument(f"{flag} has no effect without {switch}")
    if encrypts:
        tls = load_tls_files(options.grpc_server_cert, options.grpc_server_key, options.grpc_root_cert, mutual)
    compression = options.grpc_infer_response_compression_level
    reflection = is_true(options.grpc_reflection)
    if reflection and find_spec("grpc_reflection") is None:
        raise Unavailable("--grpc-reflection needs package grpcio-reflection: pip install '.[reflection]'")
    return GrpcSettings(options.grpc_address, tls, compression, options.channel_options, reflection)


def parse_clouds(options: CloudOptions, environment: Mapping[str, str]) -> tuple[CloudEndpoint, ...]:
    """Raises `InvalidArgument` where the environment lacks what an endpoint needs; the message names the variable."""
    clouds = []
    if is_true(options.allow_sagemaker):
        clouds.append(sagemaker_endpoint(options.sagemaker_port, environment))
    if is_true(options.allow_vertex_ai):
        clouds.append(vertex_ai_endpoint(options.vertex_ai_port, options.vertex_ai_default_model, environment))
    return tuple(clouds)


def unprotected_control(options: ServeOptions, endpoints: EndpointSettings) -> list[str]:
    """The protocols over which, in mode explicit, any client may load a model."""
    if options.repository.model_control_mode != "explicit" or endpoints.keys:
        return []
    unprotected = []
    if is_true(options.server.allow_http) and _LOADS not in endpoints.http.required_headers:
        unprotected.append("HTTP")
    if is_true(options.grpc.allow_grpc) and "RepositoryModelLoad" not in endpoints.grpc_policy.required_headers:
        unprotected.append("gRPC")
    return unprotected


def unprotected_routes(options: ServeOptions, endpoints: EndpointSettings) -> bool:
    """Whether any client may change routes."""
    protected = endpoints.keys or _LOADS in endpoints.http.required_headers
    return options.repository.state_dir is not None and is_true(options.server.allow_http) and not protected


def _shared_state(server: ServerOptions, logs: LogControl, reserved: Iterable[str]) -> SharedState:
    traces = parse_trace_config(server.trace_config)
    check_trace_file(traces)
    if traces.spans is not None and TENSORS in traces.trace_level:
        log.warning("--trace-config level=TENSORS has no effect: spans hold no tensors")
    if traces.spans is not None and not traces.enabled:
        log.warning("nothing is traced: --trace-config level=TIMESTAMPS is not given")
    regions = SharedMemoryRegistry(is_true(server.allow_client_shm))
    rooflines = read_rooflines(server.machine)
    return SharedState(regions, logs, TraceControl(traces), CustomMetrics(reserved), rooflines=rooflines)


def read_rooflines(words: Iterable[str]) -> dict[str, StepRoofline]:
    """The machines of models by name; see `machine_files`. Raises `InvalidArgument` as `read_roofline` does."""
    return {name: read_roofline(file) for name, file in machine_files(words).items()}


def machine_files(words: Iterable[str]) -> dict[str, Path]:
    """The files of `charonia calibrate` by model, each given as NAME=FILE. Raises `InvalidArgument` for another
    form."""
    files: dict[str, Path] = {}
    for word in words:
        name, equals, file = word.partition("=")
        if not (name and equals and file):
            raise InvalidArgument(f"--machine must be NAME=FILE, got '{word}'")
        if name in files:
            raise InvalidArgument(f"--machine is given twice for '{name}'")
        files[name] = Path(file)
    return files
