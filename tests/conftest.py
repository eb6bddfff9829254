"""What every test may need."""

import gc
import importlib.util
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cyclopts import App
from cyclopts.argument import Argument, ArgumentCollection
from hypothesis import settings

from charonia.cli.serve_command import serve_command
from charonia.inprocess.options import _reader
from charonia.processes import child_process, gc_tuning
from charonia.processes.host import usable_cores
from tests.cpu_seconds import CpuSeconds
from tests.side_by_side import SideBySide

# Two shared cores: a deadline per example would test the neighbours.
settings.register_profile("charonia", deadline=None)
settings.load_profile("charonia")

# Nothing under test may reach for a hub.
os.environ["HF_HUB_OFFLINE"] = "1"

# Triton reads it when it is imported; only tests of its kernels import it, which interpret them.
os.environ["TRITON_INTERPRET"] = "1"

# Here many processes share few cores: an idle thread that spins takes one from those that compute.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Each worker reads all tests, and each server starts processes: they read compiled code, even where Python was told to
# leave none behind.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A client reads the certificates of all the world's authorities when it is made, which takes longer than most requests;
# here all is on the loopback, and what needs a certificate names it.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)

# Nothing that thousands of tests are made of is garbage: no round of the collector is to look for it.
gc.disable()

WORKERS = 4
"""At most, and one more than cores, for many tests wait for a server: each starts servers of its own."""

LONG_ONES = (
    "tests/engine/parallel",
    "tests/engine/models/test_equality.py",
    "tests/e2e",
    "tests/extras/trtllm/e2e",
    "tests/scheduler/test_machine.py",
    "tests/test_",
    "tests/repository/object_storage",
    "tests/engine/gpu",
)
"""They begin first, so that the workers end together."""

SERVERS = {
    "scraped": "deploy/test_images deploy/test_kubernetes deploy/test_monitoring",
    "demo": "docs/test_examples e2e/test_ask e2e/test_demo e2e/test_structured_outputs e2e/test_viewer",
    "server": "e2e/test_access e2e/test_adapters e2e/test_analyze e2e/test_anthropic e2e/test_batches"
    " e2e/test_capacity e2e/test_chat_tools e2e/test_generate e2e/test_grpc e2e/test_life e2e/test_metrics"
    " e2e/test_openai e2e/test_proofs e2e/test_speculation",
}
"""Files whose tests share a session's fixture are run by one worker, which alone starts what it yields."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--side-by-side", action="store_true", help="run files in several workers, unless some are chosen")
    parser.addoption("--cpu-seconds", type=Path, metavar="FILE", help="write what each test takes of the processor")


def pytest_configure(config: pytest.Config) -> None:
    option = config.option
    if option.cpu_seconds:
        config.pluginmanager.register(CpuSeconds(option.cpu_seconds.absolute()), "cpu_seconds")
    some = option.file_or_dir or option.keyword or getattr(option, "lf", False) or option.markexpr != "not proof"
    if option.side_by_side and not some:
        shared = {f"tests/{file}.py": server for server, files in SERVERS.items() for file in files.split()}
        count = min(WORKERS, usable_cores().logical + 1)
        config.pluginmanager.register(SideBySide(count, lambda item: _group(item.nodeid, shared)), "side_by_side")


def _group(nodeid: str, shared: Mapping[str, str]) -> str:
    """The file of a test, or the server that files share."""
    file = nodeid.partition("::")[0]
    return shared.get(file, file)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    cases: Counter[str] = Counter()
    for item in items:
        if (rare := item.get_closest_marker("one_in")) is not None:
            test = item.nodeid.partition("[")[0]
            if cases[test] % rare.args[0]:
                item.add_marker("proof")
            cases[test] += 1
    if config.pluginmanager.hasplugin("side_by_side"):
        items.sort(key=lambda item: not item.nodeid.startswith(LONG_ONES))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def frozen_leftovers() -> Iterator[None]:
    """What a file's tests leave, imports above all, is not looked through by the collections of those that follow."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def frozen_imports() -> Iterator[None]:
    """A model that is loaded or unloaded in this process lets the collector look for its cycles, not through all that
    thousands of tests import."""
    collect = partial(gc_tuning.collect_and_freeze, frozen_too=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc_tuning, "collect_and_freeze", collect)
        yield


@pytest.fixture(scope="session", autouse=True)
def kept_flags() -> Iterator[None]:
    """What the parser makes of all options of a server whenever it reads some, for a command or a program, it makes
    once."""
    kept = {id(app): list[Argument]() for app in (serve_command, _reader)}
    assemble = App.assemble_argument_collection

    def assembled(asked: App, **options: Any) -> ArgumentCollection:
        if id(asked) not in kept or options:
            return assemble(asked, **options)
        flags = kept[id(asked)]
        if not flags:
            flags.extend(assemble(asked))
        fresh = {id(flag): copy(flag) for flag in flags}
        for flag in fresh.values():
            flag.tokens = []
            flag.children = ArgumentCollection(fresh[id(child)] for child in flag.children)
        return ArgumentCollection(fresh.values())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(App, "assemble_argument_collection", assembled)
        yield


@pytest.fixture(scope="module")
def copied_children() -> Iterator[None]:
    """Children that run a function of ours are copies of a process that has imported the engine, unless
    CHARONIA_TEST_COPIES=none says otherwise (tests/e2e/server_template.py)."""
    from tests.e2e.server_template import copying_subprocess

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child_process, "subprocess", copying_subprocess())
        yield


@pytest.fixture
def started_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are started as users' servers start them, where others of the file are copies."""
    from tests.e2e.server_template import SWITCH

    monkeypatch.setattr(child_process, "subprocess", subprocess)
    monkeypatch.setenv(SWITCH, "servers")


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def sibling(root: Path) -> Callable[[str], ModuleType]:
    """Another file of tests/, by its path there: with importlib import mode the folder is on no path."""
    loaded: dict[str, ModuleType] = {}

    def load(path: str) -> ModuleType:
        if path not in loaded:
            name = f"tests_{path.removesuffix('.py').replace('/', '_')}"
            spec = importlib.util.spec_from_file_location(name, root / "tests" / path)
            assert spec
            assert spec.loader
            loaded[path] = sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(loaded[path])
        return loaded[path]

    return load


@pytest.fixture(scope="session")
def making(sibling: Callable[[str], ModuleType]) -> ModuleType:
    """tests/checkpoints.py"""
    return sibling("checkpoints.py")


@pytest.fixture(scope="session")
def cuda_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The LD_LIBRARY_PATH of a process that is to find `cuda_library`."""
    return tmp_path_factory.mktemp("cuda")


@pytest.fixture(scope="session")
def cuda_library(sibling: Callable[[str], ModuleType], cuda_folder: Path) -> Path:
    """A driver of two GPUs, which are none: tests/fake_cuda.c."""
    built: Path = sibling("gpu_stand_in.py").build_driver(cuda_folder)
    return built


@pytest.fixture(scope="session")
def demo(root: Path, sibling: Callable[[str], ModuleType], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The server that `make serve` starts, which writes files and all metrics; tests leave it serving."""
    flags = ["--model-repository", str(root / "examples" / "model_repository")]
    flags += ["--metrics-names", "vllm", "--log-format", "json"]
    flags += ["--metrics-config=summary_latencies=true", "--metrics-config=histogram_latencies=true"]
    flags += ["--files-dir", str(tmp_path_factory.mktemp("files"))]
    with sibling("e2e/serving.py").serving(tmp_path_factory.mktemp("d") / "t", *flags) as server:
        yield server
        assert server.stop() == 0, server.said
