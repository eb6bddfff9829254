"""Classic models on a GPU: instances of KIND_GPU and KIND_AUTO compute there, each in a process that gives it back."""

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from charonia.classic_backends.isolated.isolated_runtime import PYTORCH
from charonia.classic_backends.runtime import InstancePlacement
from charonia.core.model import ModelConfig
from charonia.core.tensor import TensorSpec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CONFIG = """
platform: "pytorch_libtorch"
max_batch_size: 4
input { name: "INPUT__0" data_type: TYPE_FP32 dims: -1 }
output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: -1 }
"""


class Where(torch.nn.Module):
    """Doubles, and adds a thousand on a GPU."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value * 2 + (1000 if value.is_cuda else 0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(CONFIG)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(Where()).save(str(tmp_path / "m" / "1" / "model.pt"))
    return tmp_path / "m"


def config_of(directory: Path) -> Any:
    pytest.importorskip("tritonclient")
    from charonia.repository.builder import ModelBuilder
    from charonia.repository.model_source import read_model

    source = read_model(directory)
    return ModelBuilder().complete_config(source, source.versions[0])


def test_an_instance_goes_to_the_gpu_by_itself_and_where_it_is_told(model: Path) -> None:
    [group] = config_of(model).instance_group
    assert (group.Kind.Name(group.kind), list(group.gpus)) == ("KIND_GPU", list(range(torch.cuda.device_count())))
    (model / "config.pbtxt").write_text(CONFIG + "instance_group { kind: KIND_CPU }")
    [group] = config_of(model).instance_group
    assert group.Kind.Name(group.kind) == "KIND_CPU"


@pytest.mark.parametrize(("kind", "expected"), [("KIND_GPU", [[1002, 1004]]), ("KIND_CPU", [[2, 4]])])
def test_it_computes_where_its_kind_says(model: Path, kind: str, expected: list[list[int]]) -> None:
    given, made = TensorSpec("INPUT__0", "FP32", (-1,)), TensorSpec("OUTPUT__0", "FP32", (-1,))
    config = ModelConfig("m", "1", "pytorch", max_batch_size=4, inputs=(given,), outputs=(made,))
    runtime = PYTORCH.load(model / "1", config, InstancePlacement(kind, 0, 0, "m_0"), {})
    assert runtime.traits.process is not None
    [answer] = runtime.execute({"INPUT__0": np.array([[1, 2]], np.float32)}, ["OUTPUT__0"])
    assert answer["OUTPUT__0"].tolist() == expected
    runtime.close()


def test_the_server_itself_does_not_touch_the_gpu(model: Path) -> None:
    pytest.importorskip("tritonclient")
    code = (
        "import sys; from pathlib import Path; from charonia.repository.builder import ModelBuilder;"
        "from charonia.repository.model_source import read_model; source = read_model(Path(sys.argv[1]));"
        "ModelBuilder().complete_config(source, source.versions[0]); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(model)], check=False).returncode == 0
