"""Rollouts of a real server: a version that fails goes back, one that does not goes on over a restart; and a shadow."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from charonia.cli.app import app

from .models import write_config

CONFIG = """
backend: "python"
input { name: "A" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "B" data_type: TYPE_FP32 dims: [ 4 ] }
"""
CODE = """
from pathlib import Path
import triton_python_backend_utils as triton

class TritonPythonModel:
    asked = 0

    def answer(self, request):
        self.asked += 1
        if self.asked % 3 == 0 and Path(__file__).with_name("fails").exists():
            return triton.InferenceResponse([], triton.TritonError("it broke"))
        return triton.InferenceResponse([triton.Tensor("B", triton.get_input_tensor_by_name(request, "A").as_numpy())])

    def execute(self, requests):
        return [self.answer(request) for request in requests]
"""
ROUTES = """
routes:
  numbers: {arms: [{model: a, weight: 1, version: 1}]}
  mirrored:
    arms: [{model: a, weight: 1, version: 1}]
    shadow: {model: a, version: 2, share: 0.5, compare: tensors, also: [python]}
"""
BODY = {"inputs": [{"name": "A", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]}]}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "models"
    for version in "12":
        (write_config(root, "a", CONFIG, version) / "model.py").write_text(CODE)
    (root / "a" / "2" / "fails").touch()
    (root / "routes.yaml").write_text(ROUTES)
    return root


@contextmanager
def asking(url: str) -> Iterator[Counter[tuple[str, int]]]:
    """Requests for the route, one after the other; how many there were by the arm that served and the status."""
    answers, done = Counter[tuple[str, int]](), threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=url) as client:
            while not done.wait(0.004):
                answer = client.post("/v2/models/numbers/infer", json=BODY)
                answers[answer.headers["x-charonia-arm"], answer.status_code] += 1

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield answers
    finally:
        done.set()
        thread.join()


def test_a_rollout_goes_back_or_on(
    serve: Callable[..., Any], repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = "--model-repository", str(repository), "--state-dir", str(tmp_path / "state")

    def rollout(url: str, *arguments: str) -> tuple[int, str]:
        status = app(["rollout", "numbers", "--url", url, *arguments])
        said = capsys.readouterr()
        return status, said.out + said.err

    quick = "--every", "0.5s", "--min-requests", "20", "--guard", "error_rate < 1 %, p50 < 100x"
    with serve(*started) as server:
        assert rollout(server.url, "--to", "9") == (1, "charonia: model 'a' has no version 9\n")
        with asking(server.url) as answers:
            status, said = rollout(server.url, "--to", "2", "--steps", "40,100", *quick)
        assert status == 1
        assert "back after step 1 of 2, 40 %: error_rate < 1 %: " in said
        assert said.endswith("route numbers: a:2: back\n")
        assert answers["a:2", 500] > 0
        assert answers["a:1", 200] == sum(answers.values()) - answers["a:2", 500] - answers["a:2", 200]
        with asking(server.url) as answers:
            pass
        assert set(answers) <= {("a:1", 200)}
        (repository / "a" / "2" / "fails").unlink()
        assert rollout(server.url, "--to", "2", "--steps", "30,60,100", "--detach", *quick)[0] == 0
        refused = httpx.post(f"{server.url}/v2/routes/numbers/rollout", json={"to": "2"})
        assert (refused.status_code, "abort it first" in refused.json()["error"]) == (409, True)
        with asking(server.url) as answers:
            server.until(lambda: "on to step 2 of 3, 60 %" in server.said)
        assert {status for _, status in answers} == {200}
        scraped = httpx.get(server.metrics_url).text
        assert 'charonia_rollout_share_ratio{model="a",route="numbers",version="2"} 0.6\n' in scraped
        assert 'charonia_rollout_decisions_total{decision="back",route="numbers"} 1\n' in scraped
        for _ in range(10):
            httpx.post(f"{server.url}/v2/models/mirrored/infer", json=BODY).raise_for_status()
        copied = 'charonia_shadow_requests_total{model="a",outcome="same",route="mirrored",version="2"} 5\n'
        server.until(lambda: copied in httpx.get(server.metrics_url).text)
        assert server.stop() == 0
    with serve(*started) as server:
        status, said = rollout(server.url, "--status")
        assert (status, "step 2 of 3, 60 %" in said) == (0, True)
        with asking(server.url) as answers:
            server.until(lambda: "a:2 serves alone" in server.said)
            rollout(server.url, "--status")
        assert {status for _, status in answers} == {200}
        arms = httpx.get(f"{server.url}/v2/routes/numbers").json()["route"]["arms"]
        assert [(arm["version"], arm["weight"]) for arm in arms] == [(2, 100)]
        assert rollout(server.url, "--status")[0] == 0
        assert rollout(server.url, "--to", "1", "--steps", "1,100", "--detach")[0] == 0
        assert rollout(server.url, "--abort")[0] == 0
        assert rollout(server.url, "--abort") == (1, "charonia: route 'numbers' has no rollout that runs\n")
        arms = httpx.get(f"{server.url}/v2/routes/numbers").json()["route"]["arms"]
        assert [(arm["version"], arm["weight"]) for arm in arms] == [(2, 100)]
