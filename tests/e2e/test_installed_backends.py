"""The example of a package with a backend of its own, as pip would install it; forests; and what is not served."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton

from .models import write_config
from .tensors import given


@pytest.fixture
def installed(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """examples/backend on the path, with the metadata that installing it writes."""
    example = root / "examples" / "backend"
    project = tomllib.loads((example / "pyproject.toml").read_text())["project"]
    metadata = tmp_path / "site" / "charonia_scaler-0.1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0.1\n")
    points = project["entry-points"]["charonia.backends"]
    lines = ["[charonia.backends]", *(f"{name} = {value}" for name, value in points.items()), "broken = nowhere:X"]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.setenv("PYTHONPATH", f"{metadata.parent}:{example}")


def test_a_package_brings_a_backend(serve: Callable[..., Any], installed: None, tmp_path: Path) -> None:
    models = tmp_path / "models"
    (write_config(models, "triple", 'backend: "scaler"') / "factor.txt").write_text("3")
    write_config(models, "lost", 'backend: "scaler"')
    write_config(models, "unknown", 'backend: "scalar"')
    write_config(models, "imports", 'backend: "broken"')
    write_config(models, "plan", 'platform: "tensorrt_plan"')
    with serve("--model-repository", str(models), "--exit-on-error", "false") as server:
        with triton.InferenceServerClient(server.http_address) as client:
            config = client.get_model_config("triple")
            assert (config["max_batch_size"], "dynamic_batching" in config) == (4, True)
            answer = client.infer("triple", [given(triton, "X", np.array([[1, 2]], np.float32))])
            assert answer.as_numpy("Y").tolist() == [[3, 6]]
        assert "cannot read the factor of model 'lost'" in server.said
        assert "unknown backend 'scalar'; known are broken, " in server.said
        assert "backend 'broken' of nowhere:X cannot be imported: ModuleNotFoundError" in server.said
        assert "TensorRT plans are not run: serve the ONNX model" in server.said
        assert server.stop() == 0, server.said


def test_a_forest_is_served(serve: Callable[..., Any], tmp_path: Path) -> None:
    lightgbm: Any = pytest.importorskip("lightgbm")
    pytest.importorskip("treelite")
    rows = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    settings = {"objective": "binary", "verbose": -1, "min_data_in_leaf": 1, "num_threads": 1}
    booster = lightgbm.train(settings, lightgbm.Dataset(rows, rows[:, 0] > 0), 5)
    config = 'backend: "fil"\nparameters { key: "model_type" value { string_value: "lightgbm" } }'
    booster.save_model(write_config(tmp_path / "models", "forest", config) / "model.txt")
    with serve("--model-repository", str(tmp_path / "models")) as server:
        with triton.InferenceServerClient(server.http_address) as client:
            answer = client.infer("forest", [given(triton, "input__0", rows[:4])]).as_numpy("output__0")
            np.testing.assert_allclose(answer[:, 0], booster.predict(rows[:4]), rtol=1e-5)
        assert server.stop() == 0, server.said
