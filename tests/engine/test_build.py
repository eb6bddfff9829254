"""What a language model needs of each memory before it loads, and what it is granted."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from charonia.core.errors import InvalidArgument
from charonia.core.media_models import MediaRefusal
from charonia.core.model import MemoryNeed, ModelConfig
from charonia.engine import build
from charonia.engine.build import language_model, memory_needed, model_media
from charonia.engine.config import EngineConfig
from charonia.processes.host import usable_cores

HOST = [MemoryNeed(1000)]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16"}))
    shards = {"model-1.safetensors": 600, "model-2.safetensors": 400}
    for name, size in {**shards, "consolidated.safetensors": 1000}.items():  # the same once more, as Mistral ships it
        half = torch.zeros(2, size // 4, dtype=torch.bfloat16)
        save_file({f"tensor of {name}": half}, tmp_path / name)
    index = {"weight_map": {f"tensor of {name}": name for name in shards}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "tokenizer.json").write_bytes(bytes(50))
    return tmp_path


@pytest.mark.parametrize(
    ("parameters", "gpus", "needed"),
    [
        ({}, (), HOST),
        ({"dtype": "float32"}, (), [MemoryNeed(2000)]),
        ({"quantization": "int8"}, (), [MemoryNeed(500)]),
        ({"kv_cache_bytes": "70"}, (), [MemoryNeed(1070)]),
        ({"kv_cache_bytes": "70", "data_parallel_size": "2"}, (), [MemoryNeed(2140)]),
        ({"enable_lora": "true", "max_lora_bytes": "30", "data_parallel_size": "2"}, (), [MemoryNeed(2060)]),
        ({"enable_lora": "true"}, (), [MemoryNeed(1000 + 2**30)]),
        (
            {"enable_lora": "true", "max_lora_bytes": "30", "tensor_parallel_size": "2"},
            (0, 1),
            [MemoryNeed(515, 0), MemoryNeed(515, 1)],
        ),
        ({}, (0, 1), [MemoryNeed(1000, 0)]),
        ({"kv_cache_bytes": "70", "tensor_parallel_size": "2"}, (0, 1), [MemoryNeed(570, 0), MemoryNeed(570, 1)]),
        (
            {"pipeline_parallel_size": "2", "data_parallel_size": "2"},
            range(4),
            [MemoryNeed(500, gpu) for gpu in range(4)],
        ),
        ({"device": "cuda:1"}, (0, 1), [MemoryNeed(1000, 1)]),
        ({"device": "cpu"}, (0,), HOST),
        ({"device": "cuda"}, (), [MemoryNeed(1000, 0)]),
        ({"executor": "fake"}, (), []),
        ({"distributed_executor_backend": "ray", "kv_cache_bytes": "70"}, (), []),
    ],
)
def test_weights_are_needed_as_they_will_be(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    parameters: dict[str, str],
    gpus: Sequence[int],
    needed: list[MemoryNeed],
) -> None:
    monkeypatch.setattr(build, "torch_has_cuda", lambda: True)
    assert list(memory_needed(str(checkpoint), parameters, gpus)) == needed
    assert list(memory_needed("/nowhere", {**parameters, "model": str(checkpoint)}, gpus)) == needed


def test_a_torch_that_knows_no_gpu_computes_on_the_host(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "torch_has_cuda", lambda: False)
    assert list(memory_needed(str(checkpoint), {}, (0,))) == HOST


def test_what_is_to_be_downloaded_yet_is_not_known() -> None:
    assert memory_needed("someone/something", {}, ()) == (MemoryNeed(0),)


def test_wrong_parameters_are_refused_by_name(checkpoint: Path) -> None:
    with pytest.raises(InvalidArgument, match="unknown parameter 'bogus'"):
        memory_needed(str(checkpoint), {"bogus": "1"}, ())


def test_more_threads_than_cores_can_be_meant_for_are_refused(checkpoint: Path) -> None:
    def build(**parameters: str) -> None:
        language_model(ModelConfig("m", "1", "charonia"), str(checkpoint), parameters, lambda *phase: None)

    most = 4 * usable_cores().logical
    with pytest.raises(InvalidArgument, match=f"threads: {most + 1} is more than 4 for each of the") as refusal:
        build(threads=str(most + 1))
    assert refusal.value.field == "threads"
    build(threads=str(most))
    build(threads=str(most + 1), distributed_executor_backend="ray")


def test_a_core_is_told_what_it_may_take(checkpoint: Path) -> None:
    def told(model: Any) -> list[tuple[int | None, int | None]]:
        configs = [replica.core._config for replica in model.client.replicas]
        return [(config.host_memory, config.gpu_memory) for config in configs]

    place = ModelConfig("m", "1", "charonia"), str(checkpoint)
    assert told(language_model(*place, {}, lambda *phase: None, memory=123, gpu_memory=45)) == [(123, 45)]
    assert told(language_model(*place, {}, lambda *phase: None)) == [(None, None)]
    two = {"data_parallel_size": "2", "device": "cuda"}
    assert told(language_model(*place, two, lambda *phase: None, memory=100, gpu_memory=45)) == [(50, 45)] * 2


@pytest.mark.parametrize(
    ("parameters", "host", "gpu"),
    [
        ({}, 2 * (4096 + 2048 + 64), 2 * (4096 + 2048 + 64)),
        ({"dtype": "float32"}, 4 * (4096 + 2048 + 64), 4 * (4096 + 2048 + 64)),
        # A head of its own in eight bits; the table of embeddings stays what it is.
        ({"quantization": "int8"}, 4096 + 2048 + 2 * 64, 2 * 4096 + 4096 + 2048 + 2 * 64),
    ],
)
def test_a_table_that_is_also_the_head_is_there_twice_where_the_head_is_quantised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parameters: dict[str, str], host: int, gpu: int
) -> None:
    monkeypatch.setattr(build, "torch_has_cuda", lambda: True)
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "bfloat16", "tie_word_embeddings": True}))
    shapes = {"embed_tokens": (64, 64), "layers.0.mlp.up_proj": (32, 64), "norm": (64,)}
    tensors = {f"model.{name}.weight": torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert list(memory_needed(str(tmp_path), {"device": "cpu", **parameters}, ())) == [MemoryNeed(host)]
    assert list(memory_needed(str(tmp_path), parameters, (0,))) == [MemoryNeed(gpu, 0)]


def test_a_checkpoint_that_is_not_there_says_nothing_of_media(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the folder in which the server was started, in its place."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "vision_config": {}}))
    (tmp_path / "preprocessor_config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    refusal = MediaRefusal("no tower.")
    assert model_media("m", EngineConfig(model=str(tmp_path)), refusal).refusals == {"image": "no tower."}
    assert model_media("m", EngineConfig(model=str(tmp_path / "nowhere")), refusal).refusals == {}


def test_options_of_media_that_a_model_has_no_use_for_are_named_and_are_no_error(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"media_path": "/pictures", "mm_processor_kwargs": '{"max_pixels": 1000}', "limit_mm_per_prompt": "image=4"}
    language_model(ModelConfig("reads", "1", "charonia"), str(checkpoint), given, lambda _: None)
    language_model(
        ModelConfig("bare", "1", "charonia"), str(checkpoint), {"limit_mm_per_prompt": "image=0"}, lambda _: None
    )
    assert [record.getMessage() for record in caplog.records] == [
        "model 'reads' takes no images and no sounds: without effect: "
        "--limit-mm-per-prompt, --mm-processor-kwargs, --media-path"
    ]
