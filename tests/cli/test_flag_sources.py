"""Flags of the environment and of a file beside those of the command line, and other ways to write their values."""

from pathlib import Path
from typing import Any

import pytest
from cyclopts.exceptions import CycloptsError

from charonia.cli.app import app
from charonia.cli.flag_sources import PREFIX, Flags, command_flags, environment_values, file_values, strays
from charonia.cli.options import ServeOptions
from charonia.core.errors import CharoniaError
from charonia.engine.option_values import plain_count
from charonia.engine.options import EngineOptions, parse_settings

LINKS = {
    "CHARONIA_SERVICE_HOST": "10.0.0.1",
    "CHARONIA_SERVICE_PORT_HTTP": "8000",
    "CHARONIA_PORT": "tcp://10.0.0.1:8000",
    "CHARONIA_PORT_8000_TCP_ADDR": "10.0.0.1",
    "CHARONIA_GRPC_PORT": "tcp://10.0.0.2:8001",
    "CHARONIA_GRPC_SERVICE_HOST": "10.0.0.2",
}
"""What Kubernetes sets beside Services named charonia and charonia-grpc."""


def arguments_of(*words: str) -> dict[str, Any]:
    _, bound, _ = app.parse_args(["serve", *words], exit_on_error=False, print_error=False)
    bound.apply_defaults()
    return bound.arguments


def options_of(*words: str) -> ServeOptions:
    arguments = arguments_of(*words)
    options: ServeOptions = arguments["vllm"].completed(arguments["triton"].completed(arguments["options"]))
    return options


@pytest.fixture(scope="module")
def flags() -> Flags:
    """Finding them takes a tenth of a second, as reading a command line does."""
    return command_flags(app["serve"].assemble_argument_collection())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "serve.yaml"


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(
        "max_num_seqs: 1\nblock-size: 2\nmax-model-len: 3k\nserved-model-name: [a, b]\nprefix-caching: no\n"
    )
    monkeypatch.setenv("CHARONIA_MAX_NUM_SEQS", "4")
    monkeypatch.setenv("CHARONIA_BLOCK_SIZE", "5")
    monkeypatch.setenv("CHARONIA_CONFIG", str(file))
    options = options_of("m", "--max-num-seqs", "6")
    assert options.engine == EngineOptions(max_num_seqs=6, block_size=5, max_model_len=3000, prefix_caching=False)
    assert options.repository.served_model_name == ("a", "b")


def test_every_kind_of_flag_is_read_of_both(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(
        "backend-config: ['onnxruntime,a=1', b=2]\nspeculative-config: {method: ngram}\nlog-info: false\n"
        "allow-pipelines: true\nlora-modules: [{name: x, path: y}]\nstate-dir:\n"
    )
    options = options_of("--config", str(file))
    assert options.repository.configs.backend_config == ("onnxruntime,a=1", "b=2")
    assert options.engine.speculative_config == '{"method":"ngram"}'
    assert (options.server.log_info, options.repository.allow_pipelines, options.repository.state_dir) == (
        "false",
        True,
        None,
    )
    assert options.adapters.lora_modules == ('{"name":"x","path":"y"}',)
    for name, value in {
        "MODEL_REPOSITORY": "/a s3://b",
        "ALLOWED_ORIGINS": '["https://a", "https://b c"]',
        "SPECULATIVE_CONFIG": '{"method": "suffix"}',
        "LOG_INFO": "False",
        "ALLOW_PIPELINES": "true",
        "ENFORCE_EAGER": "false",
        "STATE_DIR": "",
        "MODEL_STORE": "",
    }.items():
        monkeypatch.setenv(PREFIX + name, value)
    options = options_of()
    assert options.repository.model_repository == ("/a", "s3://b")
    assert options.http.allowed_origins == ("https://a", "https://b c")
    assert options.engine == EngineOptions(speculative_config='{"method": "suffix"}', enforce_eager=False)
    assert (options.server.log_info, options.repository.allow_pipelines, options.repository.state_dir) == (
        "false",
        True,
        None,
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "htp-port: 1\nhost: x\nasync-scheduling: true\n",
            r"did you mean '--http-port'.*\n.*--async-scheduling is vLLM",
        ),
        ("http-port: [1, 2]", "http-port takes one value, and has a list"),
        ("- a", "must be a mapping of flags to values"),
        ("a: [", r"serve.yaml:1:\d+: "),
        ("config: other.yaml", "Unknown option: --config"),
        (None, "No such file or directory"),
    ],
)
def test_what_is_wrong_with_a_file_is_told(file: Path, flags: Flags, text: str | None, says: str) -> None:
    if text is not None:
        file.write_text(text)
    with pytest.raises(CycloptsError, match=says):
        file_values(flags, file)


def test_a_wrong_value_is_told_with_where_it_stands(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("port: 70000")
    with pytest.raises(CycloptsError, match=r'Invalid value "70000" for .*serve.yaml: port'):
        options_of("--config", str(file))
    file.write_text("port: 1\nhttp-port: 2")
    with pytest.raises(CycloptsError, match="are of the same flag, --http-port: set one of them"):
        options_of("--config", str(file))
    monkeypatch.setenv("CHARONIA_HTTP_PORT", "many")
    with pytest.raises(CycloptsError, match="CHARONIA_HTTP_PORT"):
        options_of()


def test_variables_of_kubernetes_and_of_others_set_nothing(flags: Flags) -> None:
    assert environment_values(flags, LINKS) == []
    known = {"CHARONIA_API_KEYS": "k", "CHARONIA_KERNELS": "none", "CHARONIA_HTTP_PORT": "1"}
    assert [value.flag for value in environment_values(flags, known)] == ["--http-port"]
    assert strays(flags, LINKS | known | {"PATH": "/"}) == []
    assert strays(flags, {"CHARONIA_QQQQ": "1"}) == ["CHARONIA_QQQQ sets no flag"]


def test_a_host_is_of_both_protocols_unless_one_says_otherwise(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def addresses(*words: str) -> tuple[str, str]:
        options = options_of(*words)
        return options.server.http_address, options.grpc.grpc_address

    assert addresses("--host=::1", "--grpc-address", "0.0.0.0") == ("::1", "0.0.0.0")
    monkeypatch.setenv("CHARONIA_GRPC_ADDRESS", "1.2.3.4")
    file.write_text("http-address: 5.6.7.8\n")
    assert addresses("--host", "::1", "--config", str(file)) == ("::1", "::1")
    assert addresses("--config", str(file)) == ("5.6.7.8", "1.2.3.4")


def test_the_model_may_be_named_by_a_flag(file: Path) -> None:
    file.write_text("model: of-file\n")
    arguments = arguments_of("--config", str(file))
    assert (arguments["model"], arguments["vllm"].model) == (None, "of-file")
    arguments = arguments_of("own", "--config", str(file))
    assert (arguments["model"], arguments["vllm"].model) == ("own", "")


def test_two_models_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert app(["serve", "a", "--model", "b"]) == 1
    assert "two models to serve: 'a', and --model 'b'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "count"),
    [("2k", "2000"), ("2K", "2048"), ("25.6k", "25600"), ("1m", "1000000"), ("1G", str(2**30)), ("0.5K", "512")]
    + [(text, text) for text in ("12", "k", "1.0001k", "2kk", "-1", "1e3", "", "1.5")],
)
def test_counts_may_end_with_a_multiple(text: str, count: str) -> None:
    assert plain_count(text) == count


def test_values_that_are_written_as_elsewhere_mean_the_same() -> None:
    words = (
        "--dtype",
        "half",
        "--max-num-batched-tokens",
        "2K",
        "--model-control-mode=EXPLICIT",
        "--log-format=iso8601",
    )
    options = options_of(*words)
    assert (options.engine.dtype, options.engine.max_num_batched_tokens) == ("float16", 2048)
    assert options.repository.model_control_mode == "explicit"
    assert options.server.log_format == "ISO8601"
    assert parse_settings({"dtype": "float", "max_model_len": "2k"}, EngineOptions) == EngineOptions(
        dtype="float32", max_model_len=2000
    )
    with pytest.raises(CharoniaError, match=r"'max_model_len' .* got '2x'"):
        parse_settings({"max_model_len": "2x"}, EngineOptions)
