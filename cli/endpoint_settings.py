"""The endpoints that flags ask for: options of the command line become the values that `api` is made with."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ..api.api_keys import Keyring, load_keyring
from ..api.grpc.call_policy import GrpcCallPolicy, build_call_policy
from ..api.grpc.settings import GrpcSettings, load_tls_files
from ..api.header_forwarding import HeaderForwarding
from ..api.http.rules import HttpRules, parse_allowed_origins
from ..api.restricted_apis import read_restrictions
from ..api.tls import KeyPair, parse_key_pair
from ..api.triton.clouds import CloudEndpoint, sagemaker_endpoint, vertex_ai_endpoint
from .cloud_options import CloudOptions
from .grpc_options import GrpcOptions
from .http_options import HttpOptions
from .key_options import KeyOptions
from .server_options import ServerOptions, is_true


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """Who may use which endpoint, and how. `tls`: of HTTP."""

    keys: Keyring
    http: HttpRules
    grpc: GrpcSettings
    grpc_policy: GrpcCallPolicy
    tls: KeyPair | None
    clouds: tuple[CloudEndpoint, ...] = ()


def endpoint_settings(
    server: ServerOptions, http: HttpOptions, access: KeyOptions, grpc: GrpcOptions, cloud: CloudOptions
) -> EndpointSettings:
    """Read the files and the environment that the options name.

    Raises:
        InvalidArgument: TLS files or keys are no good, a rule means nothing, or the environment lacks what a cloud's
            endpoint needs.
    """
    grpc_settings = parse_grpc_settings(grpc)
    tls = parse_key_pair(server.http_server_cert, server.http_server_key, "--http-server")
    keys = load_keyring(access.api_key, access.api_key_file)
    policy = parse_call_policy(grpc, keys)
    return EndpointSettings(keys, parse_http_rules(http), grpc_settings, policy, tls, parse_clouds(cloud, os.environ))


def parse_http_rules(options: HttpOptions) -> HttpRules:
    """Raises `InvalidArgument` for a flag that means nothing."""
    required = read_restrictions(options.http_restricted_api, "--http-restricted-api")
    forwarding = HeaderForwarding(options.http_header_forward_pattern)
    origins = parse_allowed_origins(options.allowed_origins)
    return HttpRules(forwarding, required, origins, options.http_body_timeout_secs)


def parse_call_policy(options: GrpcOptions, keys: Keyring) -> GrpcCallPolicy:
    """Raises `InvalidArgument` for a flag that means nothing."""
    return build_call_policy(options.grpc_restricted_protocol, options.grpc_header_forward_pattern, keys)


def parse_grpc_settings(options: GrpcOptions) -> GrpcSettings:
    """Raises `InvalidArgument` for TLS files that are no good."""
    tls, mutual = None, is_true(options.grpc_use_ssl_mutual)
    if mutual or is_true(options.grpc_use_ssl):
        tls = load_tls_files(options.grpc_server_cert, options.grpc_server_key, options.grpc_root_cert, mutual)
    compression = options.grpc_infer_response_compression_level
    return GrpcSettings(options.grpc_address, tls, compression, options.channel_options)


def parse_clouds(options: CloudOptions, environment: Mapping[str, str]) -> tuple[CloudEndpoint, ...]:
    """Raises `InvalidArgument` where the environment lacks what an endpoint needs; the message names the variable."""
    clouds = []
    if is_true(options.allow_sagemaker):
        clouds.append(sagemaker_endpoint(options.sagemaker_port, environment))
    if is_true(options.allow_vertex_ai):
        clouds.append(vertex_ai_endpoint(options.vertex_ai_port, options.vertex_ai_default_model, environment))
    return tuple(clouds)
