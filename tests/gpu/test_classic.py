"""Classic models on a GPU: instances of KIND_GPU and KIND_AUTO compute there, each in a process that gives it back; and
tensors that Python models leave there."""

import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from charonia.classic_backends.isolated.isolated_runtime import PYTORCH
from charonia.classic_backends.python_stub import tensor as api
from charonia.classic_backends.python_stub.tensor_memory import BlockReader, BlockWriter
from charonia.classic_backends.torch.torch_backend import PYTORCH as TORCH
from charonia.core.model import ModelConfig
from charonia.core.runtime import InstancePlacement
from charonia.core.tensor import TensorSpec
from charonia.processes.child_process import anonymous_file

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
    [group] = config_of(model)["instance_group"]
    assert (group["kind"], group["gpus"]) == ("KIND_GPU", list(range(torch.cuda.device_count())))
    (model / "config.pbtxt").write_text(CONFIG + "instance_group { kind: KIND_CPU }")
    [group] = config_of(model)["instance_group"]
    assert group["kind"] == "KIND_CPU"


@pytest.mark.parametrize(("kind", "expected"), [("KIND_GPU", [[1002, 1004]]), ("KIND_CPU", [[2, 4]])])
def test_it_computes_where_its_kind_says(model: Path, kind: str, expected: list[list[int]]) -> None:
    given, made = TensorSpec("INPUT__0", "FP32", (-1,)), TensorSpec("OUTPUT__0", "FP32", (-1,))
    config = ModelConfig("m", "1", "pytorch", max_batch_size=4, inputs=(given,), outputs=(made,))
    runtime = PYTORCH.load(model / "1", config, InstancePlacement(kind, 0, 0, "m_0"), {})
    assert runtime.traits.process is not None
    [answer] = runtime.execute({"INPUT__0": np.array([[1, 2]], np.float32)}, ["OUTPUT__0"])
    assert answer["OUTPUT__0"].tolist() == expected
    runtime.close()


class Several(torch.nn.Module):
    """Outputs of several types, one not contiguous, and one made on the current GPU."""

    def forward(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ones = torch.ones(value.shape, device="cuda")
        return value.t().contiguous().t() + ones, value.to(torch.bfloat16), (value > 0.5)


def test_all_outputs_come_whole_from_the_gpu(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(Several()).save(str(tmp_path / "m" / "1" / "model.pt"))
    given = TensorSpec("INPUT__0", "FP32", (-1,))
    made = tuple(TensorSpec(f"OUTPUT__{at}", kind, (-1,)) for at, kind in enumerate(("FP32", "BF16", "BOOL")))
    config = ModelConfig("m", "1", "pytorch", max_batch_size=4, inputs=(given,), outputs=made)
    last = InstancePlacement("KIND_GPU", torch.cuda.device_count() - 1, 0, "m_0")
    runtime = TORCH.load(tmp_path / "m" / "1", config, last, {})
    for size in (1, 1 << 20):
        value = np.random.default_rng(size).random((2, size), np.float32)
        value.flags.writeable = False
        for _ in range(3):
            [answer] = runtime.execute({"INPUT__0": value}, [spec.name for spec in made])
            np.testing.assert_array_equal(answer["OUTPUT__0"], value + 1)
            bits = torch.from_numpy(value.copy()).to(torch.bfloat16).view(torch.uint16).numpy()
            np.testing.assert_array_equal(answer["OUTPUT__1"], bits)
            np.testing.assert_array_equal(answer["OUTPUT__2"], value > 0.5)
    runtime.close()


def test_a_python_model_s_tensor_of_a_gpu_stays_there_until_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    file = anonymous_file("sent")
    writer, reader = BlockWriter(file), BlockReader(file)
    monkeypatch.setattr(api, "server", lambda: SimpleNamespace(writer=writer))
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        source = (torch.arange(40_000, device="cuda") % 7).to(dtype).reshape(200, 200)[3:, 5::2].t()
        for given in (source, torch.utils.dlpack.to_dlpack(source)):
            tensor = api.Tensor.from_dlpack("T", given)
            assert (tensor.is_cpu(), tensor.shape()) == (False, list(source.shape))
            back = torch.from_dlpack(tensor)
            assert (back.data_ptr(), back.device) == (source.data_ptr(), source.device)
            [sent] = api.write_tensors([tensor])
            here = source.cpu()
            expected = here.view(torch.uint16) if dtype is torch.bfloat16 else here
            np.testing.assert_array_equal(reader.read(sent), expected.numpy())


def test_the_server_itself_does_not_touch_the_gpu(model: Path) -> None:
    pytest.importorskip("tritonclient")
    code = (
        "import sys; from pathlib import Path; from charonia.repository.builder import ModelBuilder;"
        "from charonia.repository.model_source import read_model; source = read_model(Path(sys.argv[1]));"
        "ModelBuilder().complete_config(source, source.versions[0]); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(model)], check=False).returncode == 0
