"""Models come and go while a real server runs: by requests of the published client, and by changes on disk."""

import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from .models import write_config
from .tensors import given

IDENTITY = """
backend: "identity"
input { name: "A" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "B" data_type: TYPE_FP32 dims: [ 4 ] }
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write_config(tmp_path / "models", "a", IDENTITY)
    write_config(tmp_path / "models", "b", IDENTITY)
    write_config(tmp_path / "models", "wrong", IDENTITY.replace("[ 4 ]", "[ 0 ]", 1))
    return tmp_path / "models"


@pytest.fixture
def explicit(serve: Callable[..., Any], repository: Path) -> Iterator[Any]:
    mode = "--model-control-mode", "explicit", "--load-model", "a"
    with serve("--model-repository", str(repository), *mode) as server:
        yield server
        assert server.stop() == 0, server.said


@pytest.fixture
def client(explicit: Any) -> Iterator[Any]:
    with triton.InferenceServerClient(explicit.http_address) as client:
        yield client


def states(client: Any) -> dict[str, str | None]:
    return {each["name"]: each.get("state") for each in client.get_model_repository_index()}


def ask(client: Any, name: str, size: int = 4, module: Any = triton) -> Any:
    numbers = given(module, "A", np.arange(size, dtype=np.float32))
    return client.infer(name, [numbers]).as_numpy("B").tolist()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_requests_decide_what_is_served(explicit: Any, client: Any) -> None:
    assert client.is_server_ready()
    assert states(client) == {"a": "READY", "b": None, "wrong": None}
    client.load_model("b")
    assert ask(client, "b") == [0, 1, 2, 3]
    wide = {"backend": "identity"} | {
        side: [{"name": name, "data_type": "TYPE_FP32", "dims": [6]}]
        for side, name in (("input", "A"), ("output", "B"))
    }
    client.load_model("b", config=json.dumps(wide))
    assert ask(client, "b", 6) == [0, 1, 2, 3, 4, 5]
    client.load_model("new", config=json.dumps(wide), files={"file:7/nothing": b"x"})
    assert client.get_model_metadata("new")["versions"] == ["7"]
    with pytest.raises(
        InferenceServerException, match=r"wrong/config.pbtxt:3: model input dimension must be"
    ) as caught:
        client.load_model("wrong")
    assert caught.value.status() == "400"
    for name in ("b", "new"):
        client.unload_model(name)
    until(lambda: states(client) == {"a": "READY", "b": "UNAVAILABLE", "new": "UNAVAILABLE", "wrong": "UNAVAILABLE"})
    with triton_grpc.InferenceServerClient(explicit.grpc_address) as grpc:
        grpc.load_model("b", config=json.dumps(wide))
        assert ask(grpc, "b", 6, triton_grpc) == [0, 1, 2, 3, 4, 5]
        grpc.unload_model("b")
    assert not list(explicit.scratch.glob("charonia-scratch-*"))


def test_a_reload_loses_no_request(explicit: Any, client: Any, repository: Path) -> None:
    """Four clients ask all the time, while the version changes and while the config does."""
    stop, seen, address = threading.Event(), set(), explicit.http_address

    def keep_asking() -> int:
        count = 0
        with triton.InferenceServerClient(address) as own:
            while not stop.is_set():
                made = own.infer("a", [given(triton, "A", np.arange(4, dtype=np.float32))])
                assert made.as_numpy("B").tolist() == [0, 1, 2, 3]
                seen.add(made.get_response()["model_version"])
                count += 1
        return count

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(keep_asking) for _ in range(4)]
        until(lambda: "1" in seen)
        for version in range(2, 7):
            write_config(repository, "a", IDENTITY, str(version))
            client.load_model("a")
            write_config(repository, "a", f"{IDENTITY}\nmetric_tags {{ key: 'n' value: '{version}' }}", str(version))
            client.load_model("a")
            until(lambda version=version: str(version) in seen)
        stop.set()
        assert all(each.result(60) > 0 for each in asking)
    assert {"1", "2", "3", "4", "5", "6"} <= seen


def resident(server: Any) -> int:
    """KiB."""
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


@pytest.fixture
def large(repository: Path, sibling: Callable[..., ModuleType]) -> int:
    """A model of 67 MB; its size in KiB."""
    models = sibling("onnx_models.py")
    file = repository / "large" / "1" / "model.onnx"
    models.write_mlp(file, [2900, 2900, 2900])
    return file.stat().st_size // 1024


def test_unloading_gives_memory_back(explicit: Any, large: int, client: Any) -> None:
    def one_round() -> int:
        client.load_model("large")
        loaded = resident(explicit)
        client.unload_model("large")
        until(lambda: states(client)["large"] == "UNAVAILABLE")
        return loaded

    for _ in range(2):
        one_round()
    before = resident(explicit)
    for _ in range(10):
        assert one_round() > before + large // 2
    until(lambda: resident(explicit) < before * 1.05)


def test_polling_follows_the_files(serve: Callable[..., Any], repository: Path) -> None:
    shutil.rmtree(repository / "wrong")
    poll = "--model-control-mode", "poll", "--repository-poll-secs", "0.2"
    with serve("--model-repository", str(repository), *poll) as server:
        v2 = f"{server.url}/v2"
        write_config(repository, "c", "nonsense")
        failed = 'charonia_model_last_load_failed{model="c"} 1'
        until(lambda: failed in httpx.get(server.metrics_url).text)
        assert httpx.get(f"{v2}/health/ready").status_code == 200
        assert "config.pbtxt:1" in httpx.post(f"{v2}/repository/index").text
        write_config(repository, "c", IDENTITY, version="3")
        until(lambda: httpx.get(f"{v2}/models/c/versions/3/ready").status_code == 200)
        assert httpx.get(f"{v2}/health/ready").status_code == 200
        shutil.rmtree(repository / "a")
        until(lambda: httpx.get(f"{v2}/models/a/ready").status_code == 400)
        scraped = httpx.get(server.metrics_url).text
        assert set(re.findall(r'charonia_model_(?:ready|last_load_failed)\{model="(.)"', scraped)) == {"b", "c"}
        refused = httpx.post(f"{v2}/repository/models/b/load")
        assert (refused.status_code, refused.json()) == (
            503,
            {"error": "explicit model load / unload is not allowed if polling is enabled"},
        )
        assert server.stop() == 0, server.said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--load-model", "a"), "Use of '--load-model' requires setting '--model-control-mode=explicit' as well."),
        (("--model-control-mode", "explicit", "--load-model", "*", "--load-model", "a"), "must be the only one"),
        (("--backend-config", "x"), "--backend-config must be"),
    ],
)
def test_flags_that_contradict_each_other(
    refused: Callable[..., str], repository: Path, arguments: tuple[str, ...], says: str
) -> None:
    assert says in refused("--model-repository", str(repository), *arguments)
