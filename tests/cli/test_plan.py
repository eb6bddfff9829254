"""What the command line's options come to, and what is told of them at the start."""

import pytest

from charonia.cli.cloud_options import CloudOptions
from charonia.cli.endpoint_settings import endpoint_settings
from charonia.cli.grpc_options import GrpcOptions
from charonia.cli.http_options import HttpOptions
from charonia.cli.key_options import KeyOptions
from charonia.cli.plan import warn_of_unprotected_control
from charonia.cli.repository_options import RepositoryOptions
from charonia.cli.server_options import ServerOptions
from charonia.core.errors import InvalidArgument

EXPLICIT = RepositoryOptions(model_control_mode="explicit")
SERVER, NO_HTTP = ServerOptions(), ServerOptions(allow_http="false")
KEYS = KeyOptions(api_key=("k",))
HTTP = HttpOptions(http_restricted_api=("model-repository,logging:k=v",))
GRPC = GrpcOptions(grpc_restricted_protocol=("model-repository:k=v",))


def test_rules_that_mean_nothing_are_refused_before_anything_is_loaded() -> None:
    for http, grpc, text in (
        (HttpOptions(http_restricted_api=("helth:k=v",)), GrpcOptions(), "unknown restricted api 'helth'"),
        (HttpOptions(), GrpcOptions(grpc_restricted_protocol=("all:k=v",)), "unknown restricted protocol 'all'"),
        (HttpOptions(), GrpcOptions(grpc_header_forward_pattern="("), "--grpc-header-forward-pattern"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            endpoint_settings(SERVER, http, KeyOptions(), grpc, CloudOptions())


@pytest.mark.parametrize(
    ("repository", "server", "http", "access", "grpc", "told"),
    [
        (RepositoryOptions(), SERVER, HttpOptions(), KeyOptions(), GrpcOptions(), ""),
        (EXPLICIT, SERVER, HttpOptions(), KeyOptions(), GrpcOptions(), "over HTTP or gRPC may load models"),
        (EXPLICIT, SERVER, HTTP, KeyOptions(), GrpcOptions(), "over gRPC may load models"),
        (EXPLICIT, SERVER, HttpOptions(), KeyOptions(), GRPC, "over HTTP may load models"),
        (EXPLICIT, NO_HTTP, HttpOptions(), KeyOptions(), GRPC, ""),
        (EXPLICIT, SERVER, HTTP, KeyOptions(), GRPC, ""),
        (EXPLICIT, SERVER, HttpOptions(), KEYS, GrpcOptions(), ""),
    ],
)
def test_a_door_by_which_anybody_may_load_is_told_of(
    caplog: pytest.LogCaptureFixture,
    repository: RepositoryOptions,
    server: ServerOptions,
    http: HttpOptions,
    access: KeyOptions,
    grpc: GrpcOptions,
    told: str,
) -> None:
    warn_of_unprotected_control(repository, server, grpc, endpoint_settings(server, http, access, grpc, CloudOptions()))
    assert told in caplog.text
    assert bool(caplog.text) is bool(told)
