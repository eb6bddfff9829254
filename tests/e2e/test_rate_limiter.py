"""Instances of a real server that take turns at resources."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton

from .models import write_config
from .tensors import given

CONFIG = """
backend: "python"
max_batch_size: 0
input {{ name: "A" data_type: TYPE_FP64 dims: [ 1 ] }}
output {{ name: "B" data_type: TYPE_FP64 dims: [ 2 ] }}
instance_group {{ count: 2 rate_limiter {{ resources [ {{ name: "R" count: {count} }} ] }} }}
"""
MODEL = """
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for _ in requests:
            began = time.monotonic()
            time.sleep(0.03)
            span = np.array([began, time.monotonic()])
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("B", span)]))
        return answers
"""
ON = "--rate-limit", "execution_count"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name, count in (("small", 1), ("large", 2)):
        (write_config(tmp_path / "models", name, CONFIG.format(count=count)) / "model.py").write_text(MODEL)
    return tmp_path / "models"


def spans(client: Any, names: list[str], times: int) -> list[list[tuple[float, float]]]:
    """When each execution of each model began and ended, of requests that are sent at once."""
    value = [given(triton, "A", np.zeros(1))]
    asked = [[client.async_infer(name, value) for _ in range(times)] for name in names]
    return [[tuple(each.get_result().as_numpy("B").tolist()) for each in of_one] for of_one in asked]


def overlaps(found: list[tuple[float, float]]) -> int:
    """Executions that ran at once, at most."""
    return max(sum(begin <= at < end for begin, end in found) for at, _ in found)


def test_no_more_executions_run_than_there_are_resources(serve: Callable[..., Any], repository: Path) -> None:
    flags = "--model-repository", str(repository), "--rate-limit-resource", "r:2"
    with serve(*flags, *ON) as server:
        with triton.InferenceServerClient(server.http_address, concurrency=16) as client:
            small, large = spans(client, ["small", "large"], 8)
        assert overlaps(small) <= 2
        assert overlaps(large) == 1
        for begin, end in large:  # it needs both
            assert not [span for span in small if span[0] < end and begin < span[1]]
        said = httpx.get(server.metrics_url).text
        assert 'charonia_resource_limit{device="0",resource="r"} 2' in said
        deadline = time.monotonic() + 30
        while not re.search(
            r"^charonia_resource_used{.*} 0(?:\.0)?$", httpx.get(server.metrics_url).text, re.MULTILINE
        ):
            assert time.monotonic() < deadline
        assert "rate_limiter has no effect" not in server.said
        assert server.stop() == 0, server.said


def test_what_there_never_is_fails_a_load(serve: Callable[..., Any], repository: Path) -> None:
    flags = "--model-repository", str(repository), "--exit-on-error", "false", "--rate-limit-resource", "R:1"
    with serve(*flags, *ON) as server:
        server.until(lambda: "limited to 1 which will prevent scheduling" in server.said)
        assert "minimum required count is 2" in server.said
        assert server.status("/v2/models/small/ready") == 200
        assert server.status("/v2/models/large/ready") == 400
        assert server.stop() == 0, server.said


def test_without_the_flag_nothing_waits_and_the_log_says_so(serve: Callable[..., Any], repository: Path) -> None:
    with serve("--model-repository", str(repository), "--rate-limit-resource", "R:1") as server:
        assert server.url
        assert "instance_group.rate_limiter has no effect here" in server.said
        assert "--rate-limit-resource has no effect without --rate-limit execution_count" in server.said
        assert server.stop() == 0, server.said
