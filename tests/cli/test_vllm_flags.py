"""Flags that are not ours: what vLLM's users are told, and what those are who misspell one."""

import re

import pytest

from charonia.cli.app import app
from charonia.cli.foreign_flags import VLLM_FLAGS, vllm_flag_table


def flags() -> set[str]:
    return {name for argument in app["serve"].assemble_argument_collection() for name in argument.names}


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What `charonia serve` says of a command line that it does not understand, on one line."""
    with pytest.raises(SystemExit) as ended:
        app(["serve", "model", *words])
    assert ended.value.code == 2
    return " ".join(re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().err).split())


def test_the_table_is_of_flags_that_are_not_ours_and_names_ours() -> None:
    ours = flags()
    assert not ours & VLLM_FLAGS.keys()
    named = {flag for here in VLLM_FLAGS.values() for flag in re.findall(r"--[a-z-]+[a-z]", here)}
    assert named - ours == set()
    assert all(flag in vllm_flag_table() for flag in VLLM_FLAGS)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--host", "::"], "--host is vLLM's; here: --http-address, --grpc-address and --metrics-address"),
        (["--port=8080"], "--port is vLLM's; here: --http-port; gRPC has --grpc-port"),
        (["-tp", "2"], "-tp is vLLM's; here: --tensor-parallel-size"),
        (["--gpu-memory-utilization=0.9"], "is vLLM's; here: --kv-cache-memory-fraction"),
        (["--max-num-seq", "3"], "Unknown option: --max-num-seq; did you mean '--max-num-seqs'?"),
        (["--max_model_len=3", "--max_modle_len=3"], "did you mean '--max-model-len'?"),
        (["--enforce-eagr"], "did you mean '--enforce-eager'?"),
        (["--hast", "x"], "Error Unknown option: --hast; did you mean '--host'?"),
        (["--xyzzy"], "Error Unknown option: --xyzzy"),
        (["--max-num-seqs", "many"], 'unable to convert "many"'),
    ],
)
def test_what_is_not_understood_is_told(capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    assert says in told(capsys, *words)
    if says.endswith("xyzzy"):
        assert "did you mean" not in told(capsys, *words)


def test_help_begins_with_examples_and_hides_what_does_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    app(["serve", "--help"])
    shown = capsys.readouterr().out
    assert shown.startswith("Examples:")
    groups = ["Models", "Language models", "Adapters", "Server", "HTTP", "Keys", "gRPC", "Files and batches", "Clouds"]
    assert re.findall(r"╭─ ([\w ]+) ─", shown) == ["Arguments", *groups]
    assert "--http-thread-count" not in shown
    app(["flags"])
    shown = capsys.readouterr().out
    assert "--http-thread-count" in shown
    assert "--trace-rate" in shown
    assert "--gpu-memory-utilization" in shown
