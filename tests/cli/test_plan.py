"""What the command line's options come to, and what is told of them at the start."""

from pathlib import Path

import pytest

from charonia.cli.options import (
    AdapterOptions,
    GrpcOptions,
    HttpOptions,
    KeyOptions,
    RepositoryOptions,
    ServeOptions,
    ServerOptions,
)
from charonia.cli.plan import (
    endpoint_settings,
    parse_lora_root,
    read_rooflines,
    unprotected_control,
    unprotected_routes,
)
from charonia.core.errors import InvalidArgument

EXPLICIT = RepositoryOptions(model_control_mode="explicit")
CHANGING = RepositoryOptions(state_dir=Path("state"))
NO_HTTP = ServerOptions(allow_http="false")
KEYS = KeyOptions(api_key=("k",))
HTTP = HttpOptions(http_restricted_api=("model-repository,logging:k=v",))
GRPC = GrpcOptions(grpc_restricted_protocol=("model-repository:k=v",))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            ServeOptions(grpc=GrpcOptions(grpc_server_cert=Path("a.pem"))),
            "--grpc-server-cert has no effect without --grpc-use-ssl true",
        ),
        (
            ServeOptions(grpc=GrpcOptions(grpc_server_key=Path("a.key"))),
            "--grpc-server-key has no effect without --grpc-use-ssl true",
        ),
        (
            ServeOptions(grpc=GrpcOptions(grpc_use_ssl="true", grpc_root_cert=Path("a.pem"))),
            "--grpc-root-cert has no effect without --grpc-use-ssl-mutual true",
        ),
        (ServeOptions(http=HttpOptions(http_restricted_api=("helth:k=v",))), "unknown restricted api 'helth'"),
        (
            ServeOptions(grpc=GrpcOptions(grpc_restricted_protocol=("all:k=v",))),
            "unknown restricted protocol 'all'",
        ),
        (ServeOptions(grpc=GrpcOptions(grpc_header_forward_pattern="(")), "--grpc-header-forward-pattern"),
    ],
)
def test_rules_that_mean_nothing_are_refused_before_anything_is_loaded(options: ServeOptions, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        endpoint_settings(options)


def test_a_flag_asks_for_the_page_about_endpoints() -> None:
    assert not endpoint_settings(ServeOptions()).http.api_docs
    assert endpoint_settings(ServeOptions(http=HttpOptions(api_docs=True))).http.api_docs


@pytest.mark.parametrize(
    ("options", "open_to_all"),
    [
        (ServeOptions(), []),
        (ServeOptions(repository=EXPLICIT), ["HTTP", "gRPC"]),
        (ServeOptions(repository=EXPLICIT, http=HTTP), ["gRPC"]),
        (ServeOptions(repository=EXPLICIT, grpc=GRPC), ["HTTP"]),
        (ServeOptions(repository=EXPLICIT, grpc=GRPC, server=NO_HTTP), []),
        (ServeOptions(repository=EXPLICIT, http=HTTP, grpc=GRPC), []),
        (ServeOptions(repository=EXPLICIT, keys=KEYS), []),
    ],
)
def test_an_endpoint_by_which_anybody_may_load_is_known(options: ServeOptions, open_to_all: list[str]) -> None:
    assert unprotected_control(options, endpoint_settings(options)) == open_to_all


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        (ServeOptions(), False),
        (ServeOptions(repository=CHANGING), True),
        (ServeOptions(repository=CHANGING, http=HTTP), False),
        (ServeOptions(repository=CHANGING, keys=KEYS), False),
        (ServeOptions(repository=CHANGING, server=NO_HTTP), False),
    ],
)
def test_whether_anybody_may_change_routes_is_known(options: ServeOptions, warned: bool) -> None:
    assert unprotected_routes(options, endpoint_settings(options)) == warned


def test_requests_load_adapters_from_a_directory_that_is_there(tmp_path: Path) -> None:
    assert parse_lora_root(AdapterOptions()) is None
    assert parse_lora_root(AdapterOptions(allow_runtime_lora=True, lora_root=tmp_path)) == tmp_path
    for options in (AdapterOptions(allow_runtime_lora=True), AdapterOptions(lora_root=tmp_path)):
        with pytest.raises(InvalidArgument, match="--allow-runtime-lora and --lora-root go together"):
            parse_lora_root(options)
    with pytest.raises(InvalidArgument, match="--lora-root: there is no directory"):
        parse_lora_root(AdapterOptions(allow_runtime_lora=True, lora_root=tmp_path / "none"))


def test_calibrates_files_are_read_before_anything_is_loaded(tmp_path: Path) -> None:
    file = Path(__file__).parents[1] / "telemetry" / "recorded" / "machine.json"
    assert read_rooflines([f"demo={file}"])["demo"].products[0][0] == 1
    for words, error in (
        ([str(file)], "--machine must be NAME=FILE, got"),
        ([f"demo={file}", f"demo={file}"], "--machine is given twice for 'demo'"),
        ([f"demo={tmp_path}"], "cannot read .*: Is a directory"),
        (["demo=/dev/zero"], "/dev/zero is no file of charonia calibrate"),
    ):
        with pytest.raises(InvalidArgument, match=error):
            read_rooflines(words)
