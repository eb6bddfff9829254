"""Servers over checkpoints of a few kilobytes."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch

from charonia.bench import server_process
from charonia.bench.server_process import LivenessCheck
from charonia.cli.app import app
from tests.e2e.server_template import copies, copy_process

from .models import FAKE, write_model
from .serving import Server, on_loopback, serving


@pytest.fixture(scope="module", autouse=True)
def copied_servers() -> Iterator[None]:
    """Servers that proofs, and the optimizer, start for themselves are copies, too."""
    run_process = server_process.run_process

    @contextmanager
    def run_copy(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[tuple[int, LivenessCheck]]:
        with tempfile.TemporaryDirectory() as scratch:
            output = Path(scratch) / "output"
            with output.open("wb") as file:
                process = copy_process(command, file, environment)
            try:
                yield process.pid, LivenessCheck(process, output)  # type: ignore[arg-type]
            finally:
                server_process._end(process)  # type: ignore[arg-type]

    def run(
        command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> AbstractContextManager[tuple[int, LivenessCheck]]:
        match command:
            case [sys.executable, "-m", "charonia", *arguments] if not environment and copies("servers", os.environ):
                return run_copy(arguments, os.environ)
        return run_process(command, environment)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_process, "run_process", run)
        yield


@pytest.fixture
def serve(tmp_path: Path) -> Callable[..., object]:
    """`serve(*arguments)` is a context manager that yields a `Server`."""
    # Short: the path of a unix socket has little room.
    return lambda *arguments: serving(tmp_path / "t", *arguments)


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`refused(*arguments)`: what `charonia serve` says of a command that it refuses, in this process."""

    def run(*arguments: str) -> str:
        try:
            status = app(["serve", *arguments, *on_loopback(arguments)])
        except SystemExit as end:
            status = end.code
        assert status in (1, 2)
        return capfd.readouterr().err

    return run


@pytest.fixture(scope="session")
def checkpoint(making: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole checkpoint with random weights."""
    written: Path = making.write_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny")
    return written


@pytest.fixture(scope="session")
def tokenizer_only(making: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the fake executor needs of a checkpoint."""
    directory = tmp_path_factory.mktemp("fake") / "fake"
    directory.mkdir()
    making.write_tokenizer(directory)
    (directory / "config.json").write_text("{}")
    return directory


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path, tokenizer_only: Path) -> Path:
    """`tiny` computes, and drafts from its text; `fake` counts, `slow` counts slowly and lets one wait, `broken` cannot
    be."""
    directory = tmp_path_factory.mktemp("repository")
    drafting = (
        r"{\"method\": \"ngram\", \"num_speculative_tokens\": 5, \"prompt_lookup_min\": 1, \"prompt_lookup_max\": 4}"
    )
    told = {"speculative_config": drafting, "per_request_spec_decode_metrics": "summary"}
    write_model(directory, "tiny", checkpoint, enable_lora="true", max_lora_bytes=30_000, **told)
    write_model(directory, "fake", tokenizer_only, **FAKE)
    write_model(
        directory, "slow", tokenizer_only, **FAKE, fake_step_seconds=0.05, max_num_seqs=1, max_queued_requests=1
    )
    write_model(directory, "broken", tokenizer_only, bogus=1)
    return directory


@pytest.fixture(scope="session")
def loras(checkpoint: Path, sibling: Callable[[str], ModuleType], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of adapters `a`, `b` and `c` of `checkpoint`, two of which `tiny` has room for."""
    directory, adapters = tmp_path_factory.mktemp("loras"), sibling("adapters.py")
    layers = adapters.layers_of(checkpoint, ("q_proj", "down_proj"))
    for seed, name in enumerate("abc"):
        adapters.write_adapter(directory / name, layers, seed, dtype=torch.float16, lora_alpha=8)
    return directory


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, repository: Path, loras: Path) -> Iterator[Server]:
    """One server over `repository` for all tests that leave it as it was."""
    files = str(tmp_path_factory.mktemp("files"))
    flags = ["--model-repository", str(repository), "--exit-on-error=false"]
    flags += ["--files-dir", files, "--files-max-bytes", "500000"]
    flags += ["--allow-runtime-lora", "--lora-root", str(loras)]
    with serving(tmp_path_factory.mktemp("s") / "t", *flags) as running:
        yield running
        assert running.stop() == 0, running.said
        assert list(running.scratch.iterdir()) == []
