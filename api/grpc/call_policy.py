"""The rules for calls over gRPC: keys, RPCs that require a header, and metadata that is forwarded to models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from ...core.errors import Unavailable
from ..api_keys import ANONYMOUS, Keyring, Tenant
from ..header_forwarding import HeaderForwarding
from ..restricted_apis import RequiredHeader, read_restrictions

UNAUTHENTICATED_RPCS = ("ServerLive", "ServerReady", "ModelReady")
"""RPCs that need no API key."""

_PREFIX = "triton-grpc-protocol-"
_PROTOCOLS = {
    "health": UNAUTHENTICATED_RPCS,
    "metadata": ("ServerMetadata", "ModelMetadata"),
    "inference": ("ModelInfer", "ModelStreamInfer"),
    "shared-memory": (
        *(f"SystemSharedMemory{verb}" for verb in ("Status", "Register", "Unregister")),
        *(f"CudaSharedMemory{verb}" for verb in ("Status", "Register", "Unregister")),
    ),
    "model-config": ("ModelConfig",),
    "model-repository": ("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"),
    "statistics": ("ModelStatistics",),
    "trace": ("TraceSetting",),
    "logging": ("LogSettings",),
}
"""The RPCs of each part of v2 that can be restricted."""


class Caller(NamedTuple):
    """The client of an inference call: its tenant, and its metadata that becomes parameters of requests."""

    tenant: Tenant = ANONYMOUS
    parameters: Mapping[str, str] = MappingProxyType({})


_ANONYMOUS_CALLER = Caller()


@dataclass(frozen=True, slots=True)
class GrpcCallPolicy:
    """`required_headers` by the name of the RPC; `forwarding` selects the metadata that models get."""

    keys: Keyring = field(default_factory=Keyring)
    required_headers: Mapping[str, RequiredHeader] = field(default_factory=dict)
    forwarding: HeaderForwarding = field(default_factory=HeaderForwarding)

    def identify_caller(self, rpc: str, metadata: Sequence[tuple[str, Any]]) -> Caller:
        """The client of an inference call.

        Raises:
            InvalidArgument: metadata cannot be forwarded.
            Unavailable, Unauthenticated: as `authorize`.
        """
        if not (self.keys or self.required_headers or self.forwarding):
            return _ANONYMOUS_CALLER
        texts = {name: value for name, value in metadata if isinstance(value, str)}
        return Caller(self.authorize(rpc, texts), self.forwarding.select(texts.items()))

    def authorize(self, rpc: str, metadata: Mapping[str, str]) -> Tenant:
        """The tenant of a call.

        Raises:
            Unavailable: the RPC requires a header that the metadata lack.
            Unauthenticated: the API key is missing or wrong.
        """
        required = self.required_headers.get(rpc)
        if required is not None and not required.matches(metadata.get(_PREFIX + required.key.lower())):
            raise Unavailable(f"This protocol is restricted, expecting header '{_PREFIX}{required.key}'")
        return ANONYMOUS if rpc in UNAUTHENTICATED_RPCS else self.keys.authenticate(metadata.get("authorization"))


def build_call_policy(restrictions: Sequence[str], forward_pattern: str, keys: Keyring) -> GrpcCallPolicy:
    """The policy that --grpc-restricted-protocol and --grpc-header-forward-pattern ask for.

    Raises:
        InvalidArgument: a flag means nothing.
    """
    required = read_restrictions(restrictions, "--grpc-restricted-protocol")
    by_rpc = {rpc: header for name, header in required.items() for rpc in _PROTOCOLS[name]}
    return GrpcCallPolicy(keys, by_rpc, HeaderForwarding(forward_pattern, "--grpc-header-forward-pattern"))
