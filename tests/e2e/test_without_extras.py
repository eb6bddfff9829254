"""The server without what extends it: a copy of the package that has no extras starts, serves, and says so."""

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.http as triton

from charonia.repository.route_control import RouteRecords
from charonia.repository.state_directory import StateDirectory

from .models import write_labelled, write_model
from .serving import serving
from .tensors import given

WITHOUT_TREE = "import sys; sys.meta_path = [finder for finder in sys.meta_path if 'editable' not in repr(finder)]"
EXTRAS = "/console", "/v1/files", "/v1/batches", "/v2/models/echo/graph"


@pytest.fixture(scope="module")
def bare(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, linked, but for its extras, which an editable install would find nevertheless."""
    package = tmp_path_factory.mktemp("bare") / "charonia"
    package.mkdir()
    for entry in root.iterdir():
        if entry.name not in ("extras", "tests", "docs", "build") and not entry.name.startswith("."):
            (package / entry.name).symlink_to(entry)
    (package.parent / "sitecustomize.py").write_text(WITHOUT_TREE)
    return package.parent


@pytest.mark.parametrize("flags", [(), pytest.param(("--frontends", "2"), marks=pytest.mark.proof)])
def test_it_starts_and_serves(bare: Path, tokenizer_only: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    write_labelled(tmp_path / "models", "echo")
    write_model(tmp_path / "models", "llm", tokenizer_only, executor="fake", fake_vocab_size=384)
    arguments = "--model-repository", str(tmp_path / "models"), *flags
    with serving(tmp_path / "t", *arguments, variables={"PYTHONPATH": str(bare)}) as server:
        with triton.InferenceServerClient(server.http_address) as client:
            numbers = np.arange(16, dtype=np.float32)[None]
            answer = client.infer("echo", [given(triton, "INPUT0", numbers)])
            assert answer.as_numpy("OUTPUT0").tolist() == numbers.tolist()
        asked = {"model": "llm", "prompt": "hi", "max_tokens": 2}
        assert httpx.post(f"{server.url}/v1/completions", json=asked).json()["usage"]["completion_tokens"] == 2
        assert [server.status(path) for path in EXTRAS] == [404] * len(EXTRAS)
        assert "batches" not in httpx.get(server.url).json()["endpoints"]
        assert server.stop() == 0, server.said
        assert "left out" not in server.said


def said(bare: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> subprocess.CompletedProcess[str]:
    monkeypatch.setenv("PYTHONPATH", str(bare))
    command = [sys.executable, "-m", "charonia", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_its_command_line_has_no_flags_and_commands_of_theirs(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    help_ = said(bare, monkeypatch, "--help")
    assert (help_.returncode, "serve" in help_.stdout, "graph" in help_.stdout) == (0, True, False)
    flags = said(bare, monkeypatch, "serve", "--help").stdout
    assert ("--http-port" in flags, "--files-dir" in flags, "--console" in flags) == (True, False, False)
    assert "EXTENSION" not in flags


LACKS = "this installation lacks charonia.extras."


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("serve", "models", "--files-dir", "f"), f"Unknown option: --files-dir; {LACKS}batches, charonia.extras.c"),
        (("serve", "models", "--console"), f"Unknown option: --console; {LACKS}batches, charonia.extras.console, "),
        (("serve", "models", "--config", "flags.yaml"), f"Unknown option: --files-dir; {LACKS}batches"),
        (("graph", "models"), "graph is a command of charonia.extras.console, which this installation lacks"),
        (("analyze", "model"), "analyze is a command of charonia.extras.optimizer, which this installation lacks"),
        (("serve", "llm", "--backend", "tensorrtllm"), "it is one of charonia.extras.trtllm, which this installation"),
        (("check", "models"), "routes.yaml: WRONG: route 'r': no extension serves its 'shadow'; " + LACKS + "rollouts"),
        (("serve", "models"), f"charonia: route 'r': no extension serves its 'shadow'; {LACKS}rollouts"),
        (("check", "theirs"), "backend 'tensorrtllm' is one of charonia.extras.trtllm, which this installation lacks"),
        (("check", "theirs"), "backend 'tensorrt-llm' is one of charonia.extras.trtllm, which this installation lacks"),
    ],
)
def test_what_they_alone_understand_is_refused_by_their_names(
    bare: Path,
    tokenizer_only: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    says: str,
) -> None:
    for name in ("a", "b"):
        write_labelled(tmp_path / "models", name)
    arms = "arms: [{model: a, weight: 1}], shadow: {model: b}"
    (tmp_path / "models" / "routes.yaml").write_text(f"routes: {{r: {{{arms}}}}}")
    for name in ("tensorrtllm", "tensorrt-llm"):
        (tmp_path / "theirs" / name / "1").mkdir(parents=True)
        (tmp_path / "theirs" / name / "config.pbtxt").write_text(f'backend: "{name}"')
    (tmp_path / "llm").symlink_to(tokenizer_only)
    (tmp_path / "flags.yaml").write_text("files-dir: f")
    monkeypatch.chdir(tmp_path)
    run = said(bare, monkeypatch, *words)
    assert run.returncode in (1, 2), "2 is that of a command line that cannot be read"
    assert says in " ".join((run.stdout + run.stderr).replace("│", " ").split())


def test_what_was_kept_for_them_is_told(bare: Path, tmp_path: Path) -> None:
    write_labelled(tmp_path / "models", "echo")
    (tmp_path / "state").mkdir(0o700)
    with closing(StateDirectory(tmp_path / "state")) as state:
        state.write("rollouts", RouteRecords())
    arguments = "--model-repository", str(tmp_path / "models"), "--state-dir", str(tmp_path / "state")
    with serving(tmp_path / "t", *arguments, variables={"PYTHONPATH": str(bare)}) as server:
        assert server.status("/v2/models/echo/ready") == 200
        assert server.stop() == 0, server.said
        assert f"nothing goes on with the 'rollouts' that --state-dir keeps; {LACKS}batches" in server.said
        assert f"endpoints, flags, backends or commands are missing; {LACKS}batches" in server.said
        assert "'routes'" not in server.said
