"""The flags of gRPC, under tritonserver's names. Free of grpc: the command line reads it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from cyclopts import Parameter
from cyclopts.validators import Number

from .server_options import BooleanFlag, PortFlag, is_true

_Count: TypeAlias = Annotated[int, Parameter(validator=Number(gte=0, lte=2**31 - 1))]


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcOptions:
    """Settings of the gRPC endpoint."""

    allow_grpc: BooleanFlag = "true"
    """Serve gRPC."""
    grpc_address: str = "0.0.0.0"
    """Address to listen on for gRPC."""
    grpc_port: PortFlag = 8001
    """Port of the v2 protocol over gRPC."""
    reuse_grpc_port: BooleanFlag = "false"
    """Let other servers listen on the port too: each gets some of the connections."""
    grpc_use_ssl: BooleanFlag = "false"
    """Encrypt gRPC."""
    grpc_use_ssl_mutual: BooleanFlag = "false"
    """Encrypt gRPC and let in only clients with a certificate of --grpc-root-cert."""
    grpc_server_cert: Path | None = None
    """The server's certificate, PEM."""
    grpc_server_key: Path | None = None
    """The certificate's private key, PEM."""
    grpc_root_cert: Path | None = None
    """Certificates of those who may sign a client's, PEM."""
    grpc_keepalive_time: _Count = 7_200_000
    """Milliseconds of silence after which a client is pinged."""
    grpc_keepalive_timeout: _Count = 20_000
    """Milliseconds a pinged client may take to answer."""
    grpc_keepalive_permit_without_calls: BooleanFlag = "false"
    """Ping clients that have no call open."""
    grpc_http2_max_pings_without_data: _Count = 2
    """Pings in a row without data in between."""
    grpc_http2_min_recv_ping_interval_without_data: _Count = 300_000
    """Least milliseconds between pings of a client that sends no data."""
    grpc_http2_max_ping_strikes: _Count = 2
    """Pings that come too early before the connection is closed; 0 never closes it."""
    grpc_max_connection_age: _Count = 0
    """Milliseconds after which a connection is closed; 0 never does."""
    grpc_max_connection_age_grace: _Count = 0
    """Milliseconds more that its calls may take then; 0 is no limit."""
    grpc_infer_response_compression_level: Literal["none", "low", "medium", "high"] = "none"
    """How to compress responses, for clients that take it; low: deflate, the others: gzip."""
    grpc_restricted_protocol: Annotated[tuple[str, ...], Parameter(negative=())] = ()
    """Parts of the protocol that only those may use whose metadata has `triton-grpc-protocol-<key>`, as
    `<protocol>[,<protocol>]:<key>=<value>`; may be given several times."""
    grpc_header_forward_pattern: str = ""
    """Regular expression; metadata whose name has a part that matches become parameters of requests."""

    @property
    def channel_options(self) -> tuple[tuple[str, int], ...]:
        """The flags that grpc has options for, by its names."""
        ages = (
            ("grpc.max_connection_age_ms", self.grpc_max_connection_age),
            ("grpc.max_connection_age_grace_ms", self.grpc_max_connection_age_grace),
        )
        return (
            ("grpc.so_reuseport", int(is_true(self.reuse_grpc_port))),  # grpc's own default is to share
            ("grpc.keepalive_time_ms", self.grpc_keepalive_time),
            ("grpc.keepalive_timeout_ms", self.grpc_keepalive_timeout),
            ("grpc.keepalive_permit_without_calls", int(is_true(self.grpc_keepalive_permit_without_calls))),
            ("grpc.http2.max_pings_without_data", self.grpc_http2_max_pings_without_data),
            ("grpc.http2.min_ping_interval_without_data_ms", self.grpc_http2_min_recv_ping_interval_without_data),
            ("grpc.http2.max_ping_strikes", self.grpc_http2_max_ping_strikes),
            *(option for option in ages if option[1]),
        )
