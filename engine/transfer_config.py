"""What `kv_transfer_config` says, by vLLM's names: whether this server computes prompts for others, or goes on with
what others computed."""

from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from ..core.errors import InvalidArgument, describe_validation_error

FIELD = "kv_transfer_config"
CONNECTOR = "CharoniaConnector"
LEAST_TOKEN = 16
"""Characters of the secret that both servers have."""

Transport = Literal["shared_memory", "tcp"]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]


class TransferLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config`: what vLLM has no key for."""

    token: str = ""
    """The secret that both servers have."""
    token_file: str = ""
    """A file with it, in place of `token`."""
    advertised_host: str = ""
    """The name by which others reach this server, where it is not `kv_ip`."""
    peers: tuple[str, ...] = ()
    """Networks, such as 10.0.0.0/8, whose servers prefixes are fetched from; empty: any that is private."""
    transports: tuple[Transport, ...] = ("shared_memory", "tcp")
    """How bytes may travel, the first that both can."""
    hold_seconds: Seconds = 480.0
    """How long a computed prefix is held for the server that is to fetch it."""
    hold_fraction: Annotated[float, msgspec.Meta(gt=0, le=0.9)] = 0.5
    """Share of the cache's blocks that are held at most; the oldest prefixes make room."""
    timeout_seconds: Seconds = 10.0
    """How long a peer may take to connect, to agree, and for each piece that it sends or takes."""
    piece_bytes: Annotated[int, msgspec.Meta(ge=1 << 12, le=1 << 30)] = 8 << 20
    """Bytes that travel at once; a block at least does."""
    most_fetches: Annotated[int, msgspec.Meta(ge=1, le=64)] = 8
    """Prefixes that are fetched at a time; others wait."""
    most_peers: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 64
    """Connections at a time from those that fetch."""


class KVTransferConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The transfer of computed prefixes between servers."""

    kv_connector: str
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"]
    engine_id: str = ""
    """Unset: drawn at the start."""
    kv_ip: str = "127.0.0.1"
    """The address that is listened on."""
    kv_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 14579
    """A replica adds its number; 0: any free one."""
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    """What becomes of a request whose prefix does not come: it is computed here, or the request ends with an error."""
    kv_connector_extra_config: TransferLimits = TransferLimits()

    def __post_init__(self) -> None:
        if self.kv_connector != CONNECTOR:
            raise ValueError(
                f"kv_connector must be {CONNECTOR}, got {self.kv_connector!r}: this server speaks no other"
            )
        ip_address(self.kv_ip)
        limits = self.kv_connector_extra_config
        for network in limits.peers:
            ip_network(network)
        if not limits.transports:
            raise ValueError("transports must name one at least")
        if bool(limits.token) == bool(limits.token_file):
            raise ValueError(
                "kv_connector_extra_config needs either token or token_file: a secret that both servers have"
            )

    @property
    def limits(self) -> TransferLimits:
        return self.kv_connector_extra_config

    @property
    def produces(self) -> bool:
        """Whether this server computes prompts for others."""
        return self.kv_role != "kv_consumer"

    @property
    def consumes(self) -> bool:
        """Whether it goes on with what others computed."""
        return self.kv_role != "kv_producer"

    @property
    def abilities(self) -> set[str]:
        """As of `EngineSpec.capabilities`."""
        handing = {"hands_prompts_over"} if self.produces else set[str]()
        return handing | ({"takes_prompts_over"} if self.consumes else set())

    @property
    def secret(self) -> bytes:
        return self.limits.token.encode()

    def may_fetch_from(self, address: str) -> bool:
        """Whether a server at this address may be connected to. Requests name it, and clients write requests."""
        parsed = ip_address(address.partition("%")[0])
        if not self.limits.peers:
            return parsed.is_private or parsed.is_loopback
        networks = map(ip_network, self.limits.peers)
        return any(parsed.version == network.version and parsed in network for network in networks)


_OF_OTHERS = (
    *("kv_rank", "kv_parallel_size", "kv_buffer_size", "kv_buffer_device"),
    *("kv_connector_module_path", "enable_permute_local_kv"),
)
"""vLLM's keys that its own connectors need."""


def read_kv_transfer_config(written: str, prefix_caching: bool) -> KVTransferConfig:
    """What `kv_transfer_config` says, with the token of a file.

    Raises:
        InvalidArgument: it is no JSON object, a key or its value means nothing, there is no token, or no prefix cache.
    """
    try:
        fields = msgspec.json.decode(written, type=dict[str, Any])
        if stray := next(filter(fields.__contains__, _OF_OTHERS), None):
            raise InvalidArgument(f"{FIELD}: {stray} means nothing to {CONNECTOR}", field=FIELD)
        config = msgspec.convert(fields, KVTransferConfig)
    except msgspec.ValidationError as error:
        path, reason, *_ = describe_validation_error(error)
        raise InvalidArgument(f"{FIELD}: {path or 'it'} {reason}", field=FIELD) from None
    except msgspec.DecodeError as error:
        raise InvalidArgument(f"{FIELD} must be a JSON object: {error}", field=FIELD) from None
    if not prefix_caching:
        raise InvalidArgument(
            f"{FIELD}: what is transferred is the prefix cache's, and prefix_caching is off", field=FIELD
        )
    limits = config.limits
    if limits.token_file:
        try:
            token = Path(limits.token_file).expanduser().read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"{FIELD}: token_file {limits.token_file}: {error}", field=FIELD) from None
        limits = msgspec.structs.replace(limits, token=token, token_file="")
    if len(limits.token) < LEAST_TOKEN:
        raise InvalidArgument(f"{FIELD}: the token must have at least {LEAST_TOKEN} characters", field=FIELD)
    return msgspec.structs.replace(config, kv_connector_extra_config=limits)
