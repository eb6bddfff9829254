"""Pipelines in a repository: loaded by request where that is allowed, with the models that they declare."""

import os
from pathlib import Path
from typing import Any

import pytest

from charonia.core.errors import Internal, InvalidArgument
from charonia.repository.model_control import CircularEnsembles, ModelControl

from .conftest import World

CONFIG = """
input [ { name: "A" data_type: TYPE_INT32 dims: 1 } ]
output [ { name: "A" data_type: TYPE_INT32 dims: 1 } ]
"""
ASKS = CONFIG + 'parameters { key: "models" value { string_value: "%s" } }'
CODE = """
async def run(request, lookup):
    return {"A": (await lookup("toy").infer({"A": request["A"]}))["A"] + %d}
"""


class PipelineWorld(World):
    """A repository that requests may load pipelines from."""

    def write_pipeline(self, name: str, asks: str, code: str = CODE % 1) -> Path:
        (self.root / name / "1").mkdir(parents=True, exist_ok=True)
        (self.root / name / "config.pbtxt").write_text(ASKS % asks)
        (self.root / name / "1" / "pipeline.py").write_text(code)
        return self.root / name / "1" / "pipeline.py"

    def explicit(self, **allowed: bool) -> None:
        self.gateway.model_control = ModelControl(
            self.catalog, self.gateway.registry, self.gateway.lifecycle, **allowed
        )


@pytest.fixture
def world(tmp_path: Path, toys: list[Any]) -> PipelineWorld:
    world = PipelineWorld(tmp_path)
    world.write("toy", {"1": 5})
    return world


async def test_a_pipeline_loads_what_it_declares_and_is_loaded_anew(world: PipelineWorld) -> None:
    file = world.write_pipeline("glue", "toy")
    world.explicit(allow_pipelines=True)
    await world.gateway.load_model("glue")
    assert {name for name, _ in world.states()} == {"glue", "toy"}
    assert await world.ask("glue") == 6
    assert world.gateway.model_config("glue").raw["instance_group"] == []
    stamp = file.stat()
    file.write_text(CODE % 2)
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
    await world.gateway.load_model("glue")
    assert await world.ask("glue") == 7
    file.write_text("async def run(")
    with pytest.raises(InvalidArgument, match=r"glue/1/pipeline\.py:1: '\(' was never closed"):
        await world.gateway.load_model("glue")
    assert await world.ask("glue") == 7
    await world.gateway.unload_model("glue")
    assert not world.gateway.is_model_ready("glue")
    await world.gateway.lifecycle.close()


async def test_a_model_that_may_be_missing_is_loaded_where_it_is(world: PipelineWorld) -> None:
    world.write_pipeline("glue", "toy, gone?")
    assert await world.start()
    world.write("gone", {"1": 3})
    world.explicit(allow_pipelines=True)
    await world.gateway.unload_model("glue", dependents=True)
    await world.gateway.load_model("glue")
    assert all(map(world.gateway.is_model_ready, ("glue", "toy", "gone")))
    await world.gateway.lifecycle.close()


async def test_a_request_loads_no_pipeline_unless_it_may(world: PipelineWorld) -> None:
    world.write_pipeline("glue", "toy")
    world.explicit(allow_code=True)
    with pytest.raises(InvalidArgument, match="model 'glue' is a pipeline, whose code runs in the server: "):
        await world.gateway.load_model("glue")
    assert not world.gateway.is_model_ready("toy"), "nor what it asks"
    world.explicit(allow_pipelines=True)
    files = {"1/answer": b"5"}
    with pytest.raises(Internal, match="the files of model 'glue' would be run as code"):
        await world.gateway.load_model("glue", '{"backend": "pipeline", "default_model_filename": "answer"}', files)
    await world.gateway.lifecycle.close()


async def test_pipelines_in_a_circle_are_refused(world: PipelineWorld) -> None:
    world.write_pipeline("ping", "pong")
    world.write_pipeline("pong", "ping")
    world.explicit(allow_pipelines=True)
    with pytest.raises(CircularEnsembles, match="ping -> pong"):
        await world.gateway.load_model("ping")
    await world.gateway.lifecycle.close()


async def test_fields_without_a_meaning_are_told(world: PipelineWorld, caplog: pytest.LogCaptureFixture) -> None:
    world.write_pipeline("glue", "toy")
    path = world.root / "glue" / "config.pbtxt"
    path.write_text(path.read_text() + "dynamic_batching {} instance_group { count: 2 kind: KIND_CPU }")
    world.write_pipeline("sequences", "toy")
    path = world.root / "sequences" / "config.pbtxt"
    path.write_text(path.read_text() + "sequence_batching {}")
    world.write_pipeline("escapes", "toy")
    path = world.root / "escapes" / "config.pbtxt"
    path.write_text(path.read_text() + 'default_model_filename: "../../toy/1/answer"')
    assert not await world.start()
    assert "dynamic_batching has no effect here" in caplog.text
    assert "instance_group has no effect here" in caplog.text
    assert "pipelines keep no sequences between requests" in world.failures["sequences"]
    assert "'default_model_filename' of escapes must stay within" in world.failures["escapes"]
    await world.gateway.lifecycle.close()
