"""The settings of the gRPC endpoint, and the rules for its calls: keys, required headers, forwarded metadata.

Free of grpc, which takes its time to import.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import unquote

from ...core.errors import Unavailable
from ...core.request_context import NO_HINTS, GatewayHints, RequestContext
from ..api_keys import ANONYMOUS, Keyring, Tenant
from ..gateway_headers import GatewayHeaders
from ..header_rules import HeaderForwarding, RequiredHeader, read_restrictions
from ..size_limits import MAX_RESPONSE_BYTES
from ..tls import TlsFiles

RpcContext: TypeAlias = Any
"""A `grpc.aio.ServicerContext`: grpc ships no types."""

UNAUTHENTICATED_RPCS = ("ServerLive", "ServerReady", "ModelReady")
"""RPCs that need no API key."""

_PREFIX = "triton-grpc-protocol-"
_SHARED_MEMORY = ("SharedMemoryStatus", "SharedMemoryRegister", "SharedMemoryUnregister")
_PROTOCOLS = {
    "health": UNAUTHENTICATED_RPCS,
    "metadata": ("ServerMetadata", "ModelMetadata"),
    "inference": ("ModelInfer", "ModelStreamInfer"),
    "shared-memory": tuple(kind + rpc for kind in ("System", "Cuda") for rpc in _SHARED_MEMORY),
    "model-config": ("ModelConfig",),
    "model-repository": ("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"),
    "statistics": ("ModelStatistics",),
    "trace": ("TraceSetting",),
    "logging": ("LogSettings",),
}
"""The RPCs of each part of v2 that can be restricted."""


class GrpcSettings(NamedTuple):
    """`compression` of responses: none, low, medium or high. `channel_options`: grpc's, by its names. `reflection`:
    whether clients may ask for the messages of the service."""

    address: str
    tls: TlsFiles | None = None
    compression: str = "none"
    channel_options: Sequence[tuple[str, int]] = ()
    reflection: bool = False


def call_metadata(context: RpcContext) -> Sequence[tuple[str, Any]]:
    """The metadata that the client sent: values are text, or bytes where the name ends in -bin."""
    return context.invocation_metadata() or ()


def peer_address(context: RpcContext) -> str:
    """The client's address without its port; grpc has it as `ipv4:10.0.0.1:5123`, with a quoted one of IPv6."""
    return _address_of(context.peer())


@lru_cache(1024)
def _address_of(peer: str) -> str:
    kind, _, place = unquote(peer).partition(":")
    return place.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else kind


class Caller(NamedTuple):
    """The client of an inference call: its tenant, its metadata that becomes parameters of requests, its id for them,
    its address, and how many bytes of tensors a response to it may have."""

    tenant: Tenant = ANONYMOUS
    parameters: Mapping[str, str] = MappingProxyType({})
    request_id: str = ""
    address: str = ""
    max_response_size: int = MAX_RESPONSE_BYTES
    hints: GatewayHints = NO_HINTS

    def note_in(self, context: RequestContext) -> None:
        """Note the tenant, the id, the address and what a gateway says in the context of a request."""
        context.tenant, context.tenant_weight = self.tenant
        context.client_id, context.client = self.request_id, self.address
        context.hints = self.hints


@dataclass(frozen=True, slots=True)
class GrpcCallPolicy:
    """`required_headers` by the name of the RPC; `forwarding` selects the metadata that models get;
    `max_response_size`: bytes of tensors."""

    keys: Keyring = field(default_factory=Keyring)
    required_headers: Mapping[str, RequiredHeader] = field(default_factory=dict)
    forwarding: HeaderForwarding = field(default_factory=HeaderForwarding)
    max_response_size: int = MAX_RESPONSE_BYTES
    gateway: GatewayHeaders = field(default_factory=GatewayHeaders)
    takes_all: bool = field(init=False)
    """Whether calls are answered as they come, whatever their metadata say."""

    def __post_init__(self) -> None:
        chooses = self.keys or self.required_headers or self.forwarding or self.gateway
        object.__setattr__(self, "takes_all", not chooses)

    def identify_caller(self, rpc: str, metadata: Sequence[tuple[str, Any]], address: str = "") -> Caller:
        """The client of an inference call. Raises as `authorize` does, and `InvalidArgument` for what the forwarding or
        a gateway's headers do not take."""
        request_id = str(dict(metadata).get("x-request-id", ""))
        if self.takes_all:
            return Caller(request_id=request_id, address=address, max_response_size=self.max_response_size)
        texts = {name: value for name, value in metadata if isinstance(value, str)}
        tenant = self.authorize(rpc, texts)
        noted = RequestContext(rpc, tenant=tenant.name, tenant_weight=tenant.weight)
        if self.gateway:
            pairs = ((name, value) for name, value in metadata if isinstance(value, str))
            self.gateway.note_in(noted, pairs, has_key=bool(self.keys))
        parameters, size = self.forwarding.select(texts.items()), self.max_response_size
        return Caller(Tenant(noted.tenant, noted.tenant_weight), parameters, request_id, address, size, noted.hints)

    def authorize(self, rpc: str, metadata: Mapping[str, str]) -> Tenant:
        """The tenant of a call. Raises `Unavailable` without the header that the RPC requires, `Unauthenticated`
        without a valid API key."""
        required = self.required_headers.get(rpc)
        if required is not None and not required.matches(metadata.get(_PREFIX + required.key.lower())):
            raise Unavailable(f"This protocol is restricted, expecting header '{_PREFIX}{required.key}'")
        return ANONYMOUS if rpc in UNAUTHENTICATED_RPCS else self.keys.authenticate(metadata.get("authorization"))


def build_call_policy(
    restrictions: Sequence[str], forward_pattern: str, keys: Keyring, gateway: GatewayHeaders | None = None
) -> GrpcCallPolicy:
    """The policy that --grpc-restricted-protocol and --grpc-header-forward-pattern ask for. Raises `InvalidArgument`
    for a flag that means nothing."""
    required = read_restrictions(restrictions, "--grpc-restricted-protocol")
    by_rpc = {rpc: header for name, header in required.items() for rpc in _PROTOCOLS[name]}
    forwarding = HeaderForwarding(forward_pattern, "--grpc-header-forward-pattern")
    return GrpcCallPolicy(keys, by_rpc, forwarding, gateway=gateway or GatewayHeaders())
