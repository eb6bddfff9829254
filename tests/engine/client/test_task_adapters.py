"""Adapters that clients send: from TensorRT-LLM's rows to PEFT's directory, bounds, tenants, and what is forgotten."""

import json
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from charonia.core.adapter import Adapter, LoraTask
from charonia.core.errors import InvalidArgument, NotFound
from charonia.engine.checkpoint.hf_config import read_spec
from charonia.engine.client.adapters import AdapterTable, TaskKey
from charonia.engine.client.sequence_stats import SequenceStats
from charonia.engine.client.task_adapters import TaskAdapters, read_task_tensors
from charonia.engine.config import LoraConfig
from charonia.telemetry.llm_metrics import LlmMetrics

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}
SIZES = {0: (8, 16), 1: (8, 8), 2: (8, 4), 3: (8, 4), 4: (8, 8), 5: (8, 12), 6: (12, 8), 7: (8, 12)}
"""Inputs and outputs of a module, by TensorRT-LLM's number."""


def task_of(number: int, *rows: tuple[int, int, int], seed: int = 0) -> LoraTask:
    """A task with random matrices for each module, layer and rank."""
    random = np.random.default_rng(seed)
    flat = [random.standard_normal(rank * sum(SIZES[module])).astype(np.float16) for module, _, rank in rows]
    weights = np.zeros((len(rows), max(map(len, flat))), np.float16)
    for row, values in zip(weights, flat, strict=True):
        row[: len(values)] = values
    return LoraTask(number, weights, np.array(rows, np.int32))


class FileEngine:
    """Reads the weights of the adapters that it is given; a digest is that of the numbers in them."""

    def __init__(self) -> None:
        self.held: dict[str, dict[str, NDArray[Any]]] = {}
        self.configs: list[dict[str, Any]] = []
        self.paths: list[Path] = []

    async def load_adapter(self, name: str, path: str) -> Adapter:
        self.paths.append(Path(path))
        self.configs.append(json.loads((Path(path) / "adapter_config.json").read_text()))
        tensors = load_file(Path(path) / "adapter_model.safetensors")
        digest = str(sum(float(np.abs(value).sum()) for value in tensors.values()))
        self.held[digest] = tensors
        return Adapter(name, path, digest, 8, 1000)

    async def unload_adapter(self, digest: str) -> None:
        del self.held[digest]


class World(NamedTuple):
    """Tasks of a model with room for two adapters."""

    tasks: TaskAdapters
    table: AdapterTable
    engine: FileEngine

    async def ask(self, task: LoraTask, tenant: str = "") -> str:
        with await self.table.use(await self.tasks.load(task, tenant), SequenceStats(LlmMetrics())) as digest:
            return digest


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    engine = FileEngine()
    table = AdapterTable(engine, LoraConfig(max_bytes=2500), "base")
    yield World(TaskAdapters(table, str(tmp_path), 8), table, engine)
    await table.close()
    assert list(scratch.iterdir()) == []


def test_rows_become_peft_matrices_whose_products_are_the_same() -> None:
    spec = read_spec(CONFIG, "config.json")
    task = task_of(1, (1, 0, 2), (6, 1, 3), (0, 1, 4))
    assert task.weights is not None
    assert task.config is not None
    found = dict(read_task_tensors(spec, task.weights, task.config, 8))
    prefix = "base_model.model.model.layers"
    assert {name.removeprefix(f"{prefix}.").removesuffix(".weight") for name in found} == {
        f"{module}.lora_{matrix}"
        for module in (
            "0.self_attn.q_proj",
            "1.mlp.down_proj",
            "1.self_attn.q_proj",
            "1.self_attn.k_proj",
            "1.self_attn.v_proj",
        )
        for matrix in "AB"
    }
    query = task.weights[0]
    assert np.array_equal(found[f"{prefix}.0.self_attn.q_proj.lora_A.weight"], query[:16].reshape(2, 8))
    assert np.array_equal(found[f"{prefix}.0.self_attn.q_proj.lora_B.weight"], query[16:32].reshape(8, 2))
    fused = task.weights[2][32:96].reshape(16, 4)
    parts = [found[f"{prefix}.1.self_attn.{name}_proj.lora_B.weight"] for name in "qkv"]
    assert np.array_equal(np.concatenate(parts), fused)
    assert [len(part) for part in parts] == [8, 4, 4]


def test_phi_has_its_layers_fused() -> None:
    spec = read_spec(CONFIG | {"architectures": ["Phi3ForCausalLM"]}, "config.json")
    weights = np.ones((2, 32 + 64), np.float16)
    found = dict(read_task_tensors(spec, weights[:1, :24], np.array([[0, 0, 1]], np.int32), 8))
    assert found["base_model.model.model.layers.0.self_attn.qkv_proj.lora_B.weight"].shape == (16, 1)
    found = dict(read_task_tensors(spec, weights[:1, :32], np.array([[18, 0, 1]], np.int32), 8))
    assert found["base_model.model.model.layers.0.mlp.gate_up_proj.lora_B.weight"].shape == (24, 1)
    with pytest.raises(
        InvalidArgument, match="module 1 of layer 0 is none of this model's; its modules are 0, 4, 6, 18"
    ):
        dict(read_task_tensors(spec, weights[:1], np.array([[1, 0, 1]], np.int32), 8))


@pytest.mark.parametrize(
    ("rows", "width", "text"),
    [
        ([(1, 2, 2)], 32, "lora_config: module 1 of layer 2 is there twice, or not among the 2 layers"),
        ([(1, -1, 2)], 32, "module 1 of layer -1 is there twice"),
        ([(1, 0, 2), (1, 0, 2)], 64, "module 1 of layer 0 is there twice"),
        ([(13, 0, 2)], 32, "module 13 of layer 0 is none of this model's; its modules are 0, 1, 2"),
        ([(1, 0, 9)], 144, "must have a rank from 1 to 8, got 9"),
        ([(1, 0, 0)], 32, "must have a rank from 1 to 8, got 0"),
        ([(1, 0, 2)], 31, "lora_weights: module 1 of layer 0 of rank 2 has 32 numbers and then zeros, got 31"),
        ([(1, 0, 2)], 33, "of rank 2 has 32 numbers and then zeros, got 33"),
        ([(1, 0, 2), (2, 0, 2)], 63, "lora_config must be rows of module, layer and rank"),
        ([], 4, "lora_config must be rows of module, layer and rank"),
        ([(1, 0)], 4, "lora_config must be rows of module, layer and rank"),
    ],
)
def test_rows_that_do_not_fit_the_model_are_refused(rows: list[tuple[int, ...]], width: int, text: str) -> None:
    spec = read_spec(CONFIG, "config.json")
    with pytest.raises(InvalidArgument, match=text) as refusal:
        dict(read_task_tensors(spec, np.ones(width, np.float16), np.array(rows, np.int32), 8))
    assert refusal.value.field in ("lora_config", "lora_weights")


async def test_a_task_is_sent_once_and_then_named(world: World) -> None:
    task = task_of(7, (1, 0, 2), (6, 1, 3))
    digest = await world.ask(task, "alpha")
    assert await world.ask(task, "alpha") == await world.ask(LoraTask(7), "alpha") == digest
    assert len(world.engine.configs) == 1
    assert dict(world.table.named) == {}
    [config] = world.engine.configs
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (3, 3, ["down_proj", "q_proj"])
    tensors = world.engine.held[digest]
    down, up = (tensors[f"base_model.model.model.layers.0.self_attn.q_proj.lora_{each}.weight"] for each in "AB")
    assert task.weights is not None
    row = task.weights[0]
    assert (down.shape, up.shape) == ((3, 8), (8, 3))
    assert np.array_equal(up @ down, row[16:32].reshape(8, 2) @ row[:16].reshape(2, 8))


async def test_a_number_is_its_tenants(world: World) -> None:
    await world.ask(task_of(7, (1, 0, 2)), "alpha")
    with pytest.raises(NotFound, match=r"LoRA task 7 not found in cache\. Please send LoRA weights") as refusal:
        await world.ask(LoraTask(7), "beta")
    assert refusal.value.field == "lora_task_id"
    other = await world.ask(task_of(7, (1, 0, 2), seed=1), "beta")
    assert await world.ask(LoraTask(7), "alpha") != other == await world.ask(LoraTask(7), "beta")


async def test_what_is_sent_anew_takes_the_place_of_what_was_there(world: World) -> None:
    first = await world.ask(task_of(7, (1, 0, 2)))
    second = await world.ask(task_of(7, (1, 0, 2), seed=1))
    assert await world.ask(LoraTask(7)) == second != first


async def test_what_was_let_go_is_forgotten_and_can_be_sent_again(world: World) -> None:
    task = task_of(1, (1, 0, 2))
    first = await world.ask(task)
    for number in (2, 3):
        await world.ask(task_of(number, (1, 0, 2), seed=number))
    assert len(world.engine.held) == 2
    assert not world.engine.paths[0].exists()
    with pytest.raises(NotFound, match="LoRA task 1 not found in cache"):
        await world.ask(LoraTask(1))
    assert await world.ask(task) == first


async def test_two_numbers_of_one_content_share_it(world: World) -> None:
    first = await world.ask(task_of(1, (1, 0, 2)))
    assert await world.ask(task_of(2, (1, 0, 2))) == first
    assert [path.exists() for path in world.engine.paths] == [True, False]
    assert world.table.has(TaskKey("", 1))


async def test_half_an_adapter_is_none(world: World) -> None:
    whole = task_of(1, (1, 0, 2))
    for half in (LoraTask(1, whole.weights), LoraTask(1, None, whole.config)):
        with pytest.raises(InvalidArgument, match="lora_weights and lora_config go together"):
            await world.ask(half)
    with pytest.raises(InvalidArgument, match="must have a rank from 1 to 8"):
        await world.ask(task_of(1, (1, 0, 9)))
    assert not world.table.has(TaskKey("", 1))
