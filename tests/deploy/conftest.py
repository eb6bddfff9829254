"""One scrape of a real server, after a little traffic."""

import importlib.util
from pathlib import Path
from types import ModuleType

import httpx
import pytest


def load(path: Path) -> ModuleType:
    """A file of another tests folder: with importlib import mode it is on no path."""
    spec = importlib.util.spec_from_file_location(f"deploy_{path.stem}", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def scraped(root: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    checkpoint = tmp_path_factory.mktemp("d") / "fake"
    checkpoint.mkdir()
    load(root / "tests" / "checkpoints.py").write_tokenizer(checkpoint)
    (checkpoint / "config.json").write_text("{}")
    serving = load(root / "tests" / "e2e" / "conftest.py").serving
    flags = ("--executor", "fake", "--fake-vocab-size", "384")
    with serving(tmp_path_factory.mktemp("s") / "t", str(checkpoint), *flags) as server:
        httpx.post(f"{server.url}/v2/models/fake/generate", json={"input_ids": [1], "max_tokens": 2}, timeout=60)
        text: str = httpx.get(server.metrics_url).text
    return text
