"""Who may call which RPC, and what of his metadata models get: the flags of the gRPC door, once they are understood."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from ...core.errors import Unavailable
from ..api_keys import ANONYMOUS, Keyring, Tenant
from ..header_forwarding import HeaderForwarding
from ..restricted_apis import RequiredHeader, read_restrictions

UNAUTHENTICATED_RPCS = ("ServerLive", "ServerReady", "ModelReady")
"""What needs no key."""

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
    """Who calls, and what of his metadata models get."""

    tenant: Tenant = ANONYMOUS
    parameters: Mapping[str, str] = MappingProxyType({})


_ANYBODY = Caller()


@dataclass(frozen=True, slots=True)
class GrpcCallPolicy:
    """`tolls`: by RPC; `forwarding`: which metadata models get."""

    keys: Keyring = field(default_factory=Keyring)
    required_headers: Mapping[str, RequiredHeader] = field(default_factory=dict)
    forwarding: HeaderForwarding = field(default_factory=HeaderForwarding)

    def identify_caller(self, rpc: str, metadata: Sequence[tuple[str, Any]]) -> Caller:
        """Who wants an inference. Raises as `admit` does, and `InvalidArgument` for what cannot be forwarded."""
        if not (self.keys or self.required_headers or self.forwarding):
            return _ANYBODY
        texts = {name: value for name, value in metadata if isinstance(value, str)}
        return Caller(self.authorize(rpc, texts), self.forwarding.select(texts.items()))

    def authorize(self, rpc: str, metadata: Mapping[str, str]) -> Tenant:
        """Who calls.

        Raises:
            Unavailable: the RPC is restricted, and he does not show what it asks for.
            Unauthenticated: his key is missing or wrong.
        """
        toll = self.required_headers.get(rpc)
        if toll is not None and not toll.matches(metadata.get(_PREFIX + toll.key.lower())):
            raise Unavailable(f"This protocol is restricted, expecting header '{_PREFIX}{toll.key}'")
        return ANONYMOUS if rpc in UNAUTHENTICATED_RPCS else self.keys.authenticate(metadata.get("authorization"))


def build_call_policy(restrictions: Sequence[str], forward_pattern: str, keys: Keyring) -> GrpcCallPolicy:
    """The policy that --grpc-restricted-protocol and --grpc-header-forward-pattern ask for.

    Raises:
        InvalidArgument: a flag means nothing.
    """
    required = read_restrictions(restrictions, "--grpc-restricted-protocol")
    by_rpc = {rpc: header for name, header in required.items() for rpc in _PROTOCOLS[name]}
    return GrpcCallPolicy(keys, by_rpc, HeaderForwarding(forward_pattern, "--grpc-header-forward-pattern"))
