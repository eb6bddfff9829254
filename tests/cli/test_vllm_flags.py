"""Flags and commands that are not ours: what users of other servers are told, and what those are who misspell one."""

import re

import pytest

from charonia.cli.app import app
from charonia.cli.extensions import route_extensions
from charonia.cli.foreign_flags import VllmFlags
from charonia.cli.options import ServeOptions, ServerOptions
from charonia.cli.other_servers import OTHER_SERVERS, flag_tables
from charonia.core.errors import Unsupported
from charonia.engine.options import EngineOptions


def flags() -> set[str]:
    return {name for argument in app["serve"].assemble_argument_collection() for name in argument.names}


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What `charonia` says of a command line that it does not understand, on one line."""
    with pytest.raises(SystemExit) as ended:
        app(words)
    assert ended.value.code == 2
    return " ".join(re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().err).split())


def test_the_tables_are_of_flags_that_are_not_ours_and_name_ours() -> None:
    ours = flags()
    table = flag_tables()
    for others in OTHER_SERVERS.values():
        assert not ours & others.keys()
        named = {flag for here in others.values() for flag in re.findall(r"--[a-z-]+[a-z]", here)}
        assert named - ours == set()
        assert all(flag in table for flag in others)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["serv", "model"], "Unknown command: serv; did you mean 'serve'? There are analyze, "),
        (["xyzzy"], "run-model, serve, simulate."),
        (["bench", "serve"], "bench is a command of other servers; here: python -m charonia.bench.serve"),
    ],
)
def test_a_command_that_there_is_not_is_told(capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    assert says in told(capsys, *words)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-tp", "2"], "-tp is vLLM's; here: --tensor-parallel-size"),
        (["--num-gpu-blocks-override=9"], "is vLLM's; here: --kv-cache-blocks"),
        (["--num_gpu_blocks_override=9"], "--num_gpu_blocks_override is vLLM's; here: --kv-cache-blocks"),
        (["--task", "embed"], "--task is vLLM's; here: --backend encoder, for vectors and scores"),
        (["--mem-fraction-static", ".8"], "is SGLang's; here: --gpu-memory-utilization"),
        (["--max_batch_size", "8"], "--max_batch_size is TensorRT-LLM's; here: --max-num-seqs"),
        (["--max-total-tokens", "4096"], "here: --kv-cache-blocks, each of --block-size tokens"),
        (["--kv-offloading-size", "4"], "is vLLM's; here: --kv-cache-host-bytes, in bytes"),
        (["-ngl", "99", "-c", "4096"], "-c is llama.cpp's; here: --max-model-len, of one text"),
        (["--max-num-seq", "3"], "Unknown option: --max-num-seq; did you mean '--max-num-seqs'?"),
        (["--max_model_len=3", "--max_modle_len=3"], "did you mean '--max-model-len'?"),
        (["--enforce-eagr"], "did you mean '--enforce-eager'?"),
        (["--hast", "x"], "Error Unknown option: --hast; did you mean '--host'?"),
        (
            ["--async-scheduling", "--max-num-seqs", "3", "--root-path=/x", "--chat-template=--a", "--qqqq", "y"],
            "--async-scheduling is vLLM's; here: --ahead 1 --root-path is vLLM's; here: not served: let the proxy take "
            "the prefix away Unknown option: --qqqq",
        ),
        (["--xyzzy"], "Error Unknown option: --xyzzy"),
        (["--max-num-seqs", "many"], 'unable to convert "many"'),
    ],
)
def test_what_is_not_understood_is_told(capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    assert says in told(capsys, "serve", "model", *words)
    if says.endswith("xyzzy"):
        assert "did you mean" not in told(capsys, "serve", "model", *words)


def test_what_is_so_anyway_is_taken_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    words = "--enable-prefix-caching --enable-chunked-prefill --disable-log-requests --seed 0 --load-format auto"
    more = ("--max-logprobs=20", "--swap-space", "4", "--port", "9000")
    _, bound, _ = app.parse_args(["serve", "m", *words.split(), *more], exit_on_error=False, print_error=False)
    bound.arguments["vllm"].check()
    [record] = caplog.records
    for flag in ("--enable-prefix-caching", "--enable-chunked-prefill", "--disable-log-requests", "--seed"):
        assert flag in record.getMessage()
    options = bound.arguments["vllm"].completed(bound.arguments["options"])
    assert (options.server.http_port, options.server.log_requests) == (9000, "errors")
    assert options.engine.prefix_caching is True


def test_flags_of_vllm_set_ours_where_they_are_not_given() -> None:
    assert VllmFlags(enable_prefix_caching=False).completed(ServeOptions()).engine.prefix_caching is False
    assert VllmFlags(enable_log_requests=False).completed(ServeOptions()).server.log_requests == "errors"
    given = ServeOptions(server=ServerOptions(log_requests="all"), engine=EngineOptions(prefix_caching=True))
    assert VllmFlags(disable_log_requests=True, enable_prefix_caching=False).completed(given) == given
    assert VllmFlags().completed(ServeOptions()) == ServeOptions()
    VllmFlags().check()


@pytest.mark.parametrize(
    ("vllm", "flag"),
    [
        (VllmFlags(load_format="dummy"), "--load-format dummy"),
        (VllmFlags(generation_config="vllm"), "--generation-config vllm"),
        (VllmFlags(max_logprobs="50"), "--max-logprobs 50"),
        (VllmFlags(lora_dtype="float16"), "--lora-dtype float16"),
        (VllmFlags(enable_chunked_prefill=False), "--no-enable-chunked-prefill"),
    ],
)
def test_what_asks_for_something_else_is_refused(vllm: VllmFlags, flag: str) -> None:
    with pytest.raises(Unsupported, match=f"^{flag} is not served: "):
        vllm.check()


def test_help_begins_with_examples_and_hides_what_does_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    app(["serve", "--help"])
    shown = capsys.readouterr().out
    assert shown.startswith("Examples:")
    groups = ["Arguments", "Models", "Language models", "Adapters", "Server", "HTTP", "Keys", "gRPC", "Clouds"]
    others = {extension.heading for extension in route_extensions().values()} - {*groups}
    assert [group for group in re.findall(r"╭─ ([\w ]+) ─", shown) if group not in others] == groups
    assert "--http-thread-count" not in shown
    app(["flags"])
    shown = capsys.readouterr().out
    assert "--http-thread-count" in shown
    assert "--trace-rate" in shown
    assert "--enable-chunked-prefill" in shown
    assert "--num-gpu-blocks-override" in shown
