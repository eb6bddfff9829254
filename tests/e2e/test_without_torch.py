"""An installation without the extra `llm`: tensors are served, and what needs more is refused by its name."""

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import httpx
import pytest

from .models import write_config
from .serving import serving

HIDES = """
import sys

NAMES = {"jinja2", "llguidance", "safetensors", "tokenizers", "torch", "transformers", "zmq"}


class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in NAMES else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)


sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""
"""A module that Python imports at its start: the packages that the extra brings are not there."""

FLOAT = 1
"""ONNX's number of FP32."""

IDENTITY = """
backend: "identity"
max_batch_size: 8
input [{ name: "INPUT0" data_type: TYPE_FP32 dims: [2] }]
output [{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [2] }]
"""


@pytest.fixture
def hidden(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "sitecustomize.py").write_text(HIDES)
    path = os.pathsep.join(filter(None, (str(tmp_path / "hidden"), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path}


def test_tensors_are_served_and_texts_refused_by_name(
    tmp_path: Path, sibling: Callable[[str], ModuleType], root: Path, hidden: dict[str, str]
) -> None:
    repository = tmp_path / "r"
    onnx_models = sibling("onnx_models.py")
    onnx_models.write_identity(write_config(repository, "same", 'backend: "onnxruntime"') / "model.onnx", FLOAT)
    write_config(repository, "identity", IDENTITY)
    for name in ("demo", "embedder"):
        (repository / name).symlink_to(root / "examples" / "model_repository" / name)
    flags = ["--model-repository", str(repository), "--exit-on-error", "false"]
    with serving(tmp_path / "s", *flags, variables=hidden) as server:
        for name in ("demo", "embedder"):
            server.until(lambda name=name: f"{name}: FAILED: " in server.said)  # type: ignore[misc]
        for name in ("identity", "same"):
            [declared] = httpx.get(f"{server.url}/v2/models/{name}").json()["inputs"]
            value = {"name": declared["name"], "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}
            answer = httpx.post(f"{server.url}/v2/models/{name}/infer", json={"inputs": [value]})
            assert answer.json()["outputs"][0]["data"] == [1.0, 2.0]
        said = server.said
        for name in ("demo", "embedder"):
            [failure] = [line for line in said.splitlines() if line.startswith(f"{name}: FAILED: ")]
            assert "needs the package" in failure
            assert failure.endswith("pip install '.[llm]'")
        assert "Traceback" not in said
