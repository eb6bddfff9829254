"""Command lines that were written for tritonserver."""

import socket
from typing import Any

import pytest
from cyclopts.exceptions import CycloptsError

from charonia.cli.app import app
from charonia.cli.foreign_flags import TritonFlags
from charonia.cli.options import GrpcOptions, ServeOptions, ServerOptions
from charonia.cli.ports import bind_port, reserve_ports
from charonia.core.errors import CharoniaError
from charonia.telemetry.trace_settings import parse_trace_config

WHOLE = """
--model-store=/models --model-control-mode=explicit --load-model=a --load-model=b --strict-readiness=False
--exit-on-error=0 --exit-timeout-secs=45 --strict-model-config=TRUE --backend-directory=/opt/tritonserver/backends
--backend-config=onnxruntime,default-max-batch-size=8 --http-port=8000 --http-address=0.0.0.0 --http-thread-count=16
--reuse-http-port=1 --reuse-grpc-port=true --grpc-infer-allocation-pool-size=16 --grpc-infer-thread-count 4
--allow-metrics=true --metrics-port=8002 --metrics-interval-ms=1000 --allow-gpu-metrics=false --log-verbose=true
--log-info=True --pinned-memory-pool-byte-size=0 --cuda-memory-pool-byte-size=0:67108864
--cuda-memory-pool-byte-size=1:67108864 --min-supported-compute-capability=6.0 --rate-limit=off
--host-policy=gpu_0,numa-node=0 --response-cache-byte-size=1048576 --trace-file=/tmp/trace.json
--trace-level=TIMESTAMPS --trace-rate=100 --trace-config=rate=50 --model-namespacing=false --allow-sagemaker=false
--model-load-thread-count=4 --buffer-manager-thread-count=2 --id=triton
"""


def understood(*words: str) -> dict[str, Any]:
    _, bound, _ = app.parse_args(["serve", *words], exit_on_error=False, print_error=False)
    bound.apply_defaults()
    return bound.arguments


def test_a_whole_command_line_is_understood() -> None:
    told = understood(*WHOLE.split())
    triton, server, repository = told["triton"], told["options"].server, told["options"].repository
    triton.check()
    assert triton.without_effect == [
        "--model-load-thread-count",
        "--http-thread-count",
        "--grpc-infer-thread-count",
        "--grpc-infer-allocation-pool-size",
        "--buffer-manager-thread-count",
        "--metrics-interval-ms",
        "--pinned-memory-pool-byte-size",
        "--cuda-memory-pool-byte-size",
        "--min-supported-compute-capability",
        "--host-policy",
    ]
    assert (server.strict_readiness, server.log_info, server.log_verbose) == ("false", "true", 1)
    assert [str(path) for path in repository.model_repository] == ["/models"]
    completed = triton.completed(told["options"])
    assert completed.repository.configs.disable_auto_complete_config
    assert completed.repository.cache_config == ("local,size=1048576",)
    traces = parse_trace_config(completed.server.trace_config)
    assert (traces.trace_file, traces.trace_level, traces.trace_rate) == ("/tmp/trace.json", ("TIMESTAMPS",), 50)


def test_without_former_names_nothing_changes() -> None:
    assert TritonFlags().completed(ServeOptions()) == ServeOptions()
    assert TritonFlags().without_effect == []


def test_a_cache_is_not_set_twice() -> None:
    both = understood("--response-cache-byte-size", "1048576", "--cache-config", "local,size=2097152")
    with pytest.raises(CharoniaError, match="--response-cache-byte-size and --cache-config"):
        both["triton"].completed(both["options"])


def test_what_is_not_served_is_refused_by_its_flag() -> None:
    with pytest.raises(CharoniaError, match=r"^--model-namespacing .* is not served"):
        understood("--model-namespacing=True")["triton"].check()


@pytest.mark.parametrize("word", ["--log-info=maybe", "--log-verbose=much", "--rate-limit=on"])
def test_what_means_nothing_is_refused(word: str) -> None:
    with pytest.raises(CycloptsError, match=word.partition("=")[0]):
        understood(word)


def test_a_port_can_be_shared_by_those_who_all_say_so() -> None:
    with bind_port("127.0.0.1", 0, "--http-port", shared=True) as mine:
        mine.listen()
        port = mine.getsockname()[1]
        with bind_port("127.0.0.1", port, "--http-port", shared=True) as theirs:
            theirs.listen()
        with pytest.raises(CharoniaError, match="cannot open port"):
            bind_port("127.0.0.1", port, "--http-port")


def test_endpoints_that_nobody_wants_have_no_ports() -> None:
    nowhere: dict[str, Any] = {"http_address": "127.0.0.1", "http_port": 0, "allow_metrics": "false"}
    closed = GrpcOptions(allow_grpc="false")
    with reserve_ports(ServerOptions(**nowhere), closed) as ports:
        assert isinstance(ports.http, socket.socket)
        assert (ports.grpc, ports.metrics) == (None, None)
    with (
        pytest.raises(CharoniaError, match="--allow-http and --allow-grpc are both false"),
        reserve_ports(ServerOptions(allow_http="false"), closed),
    ):
        pass
