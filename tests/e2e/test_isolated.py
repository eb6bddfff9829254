"""PyTorch models in processes of their own: the server never imports torch, and lives on when they do not."""

import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import tritonclient.http as triton

from .models import write_config
from .serving import Server, children, name, serving
from .tensors import given

CONFIG = """
platform: "pytorch_libtorch"
max_batch_size: 8
input { name: "INPUT__0" data_type: TYPE_FP32 dims: -1 }
output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: -1 }
instance_group { kind: KIND_CPU }
"""


class Double(torch.nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value * 2


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("isolated") / "models"
    version = write_config(repository, "double", CONFIG)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(Double()).save(str(version / "model.pt"))
    with serving(repository.parent / "t", "--model-repository", str(repository), started=True) as server:
        yield server


@pytest.fixture
def instances(served: Server) -> Callable[[], list[int]]:
    """The processes of the server's instances."""
    return lambda: [pid for pid in children(served.process.pid) if name(pid) == "charonia-model"]


def double(served: Any) -> Any:
    with triton.InferenceServerClient(served.http_address) as client:
        values = given(triton, "INPUT__0", np.array([[1, 2, 3]], np.float32))
        return client.infer("double", [values]).as_numpy("OUTPUT__0").tolist()


def has_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def test_the_server_has_no_torch_and_the_instance_has(served: Any, instances: Callable[[], list[int]]) -> None:
    assert double(served) == [[2, 4, 6]]
    assert [has_torch(pid) for pid in instances()] == [True]
    assert not has_torch(served.process.pid)


def test_one_that_is_killed_is_replaced(served: Any, instances: Callable[[], list[int]]) -> None:
    [killed] = instances()
    os.kill(killed, signal.SIGKILL)
    served.until(lambda: served.status("/v2/models/double/ready") == 400)
    served.until(lambda: served.status("/v2/models/double/ready") == 200)
    assert double(served) == [[2, 4, 6]]
    assert "instance 'double_0_0' has ended unexpectedly" in served.said
    assert instances() != [killed]
    exposed = httpx.get(served.metrics_url).text
    assert 'charonia_instance_restarts_total{model="double",version="1"} 1\n' in exposed


def test_they_end_with_the_server(served: Any, instances: Callable[[], list[int]]) -> None:
    pids = instances()
    assert len(pids) == 1
    served.process.kill()
    served.process.wait(30)
    deadline = time.monotonic() + 30
    while any(map(alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Not a zombie either: nobody here is its parent."""
    try:
        return Path(f"/proc/{pid}/comm").read_text() == "charonia-model\n"
    except (FileNotFoundError, ProcessLookupError):
        return False
