"""Adapters as PEFT saves them: what is read, and what is refused by name."""

import json
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from charonia.core.errors import CharoniaError, InvalidArgument, NotFound
from charonia.engine.checkpoint.adapter_files import CONFIG_FILE, WEIGHTS_FILE, read_adapter
from charonia.engine.config import LoraConfig

LAYER, OTHER = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"
LAYERS = {LAYER: (24, 16), OTHER: (40, 16)}
LIMITS = LoraConfig(max_rank=16, max_bytes=1 << 16)
Write = Callable[..., Path]


@pytest.fixture
def write(sibling: Callable[[str], ModuleType], tmp_path: Path) -> Write:
    def make(**changes: Any) -> Path:
        made: Path = sibling("adapters.py").write_adapter(tmp_path / "adapter", LAYERS, **changes)
        return made

    return make


def test_matrices_come_with_their_scale(write: Write) -> None:
    files = read_adapter(str(write(r=4, lora_alpha=6)), LIMITS)
    assert files.rank == 4
    assert {path: (each.a.rows, each.a.columns, each.b.rows) for path, each in files.modules.items()} == {
        LAYER: (4, 16, 24),
        OTHER: (4, 16, 40),
    }
    assert {value.scale for value in files.modules.values()} == {1.5}


@pytest.mark.parametrize(
    "pattern",
    [
        "up_proj",
        "layers.1.mlp.up_proj",
        OTHER,
        r"^model\.layers\.1.*",
        "mlp.+",
        r".*layers\.\d+\.mlp\..*",
        r"layers\.\d{1,2}\.mlp\.up_proj",
        r"layers\.(?:1|2)\.mlp\.(?:up|down)_proj",
        r"model\.layers\.(?:0|1)\.mlp\.(?:gate|up)_proj",
        r"^model\.layers\.\d+\.m\w{2}\.up_proj$",
        rf"layers\.({'|'.join(map(str, range(1, 64)))})\.(?:mlp|moe)\.(gate|up|down)_proj",
        r"layers\.0\.(?:mlp|moe)|up_proj",
        r"layers.[0-9]+.(mlp|moe).\w+",
    ],
)
def test_patterns_and_rank_stabilised_scales_are_pefts(write: Write, pattern: str) -> None:
    directory = write(
        r=4, lora_alpha=6, use_rslora=True, ranks={OTHER: 9}, rank_pattern={pattern: 9}, alpha_pattern={pattern: 12}
    )
    modules = read_adapter(str(directory), LIMITS).modules
    assert (modules[LAYER].rank, modules[LAYER].scale) == (4, 3.0)
    assert (modules[OTHER].rank, modules[OTHER].scale) == (9, 4.0)


def test_the_digest_is_the_contents_and_not_the_places(write: Write, tmp_path: Path) -> None:
    directory = write()
    first = read_adapter(str(directory), LIMITS).digest
    moved = directory.rename(tmp_path / "moved")
    assert read_adapter(str(moved), LIMITS).digest == first
    config = json.loads((moved / CONFIG_FILE).read_text())
    (moved / CONFIG_FILE).write_text(json.dumps(config | {"lora_alpha": 17}))
    assert read_adapter(str(moved), LIMITS).digest != first


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"use_dora": True}, "DoRA is not supported"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is set"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters is set"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is set"),
        ({"a_variant_of_tomorrow": {"on": 1}}, "a_variant_of_tomorrow is set"),
        ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4' changes the base model's weights"),
        ({"r": 17}, "r must be a whole number from 1 to max_lora_rank 16, got 17"),
        ({"r": True}, "r must be a whole number"),
        ({"rank_pattern": {"up_proj": 99}}, "rank_pattern 'up_proj' must be a whole number from 1 to max_lora_rank 16"),
        ({"lora_alpha": "much"}, "lora_alpha must be a number"),
        ({"alpha_pattern": {"(a+)+b": 1}}, "'(a+)+b' is not a pattern that is supported"),
        ({"alpha_pattern": {"(?:a|a){9}b": 1}}, "'(?:a|a){9}b' is not a pattern that is supported"),
        ({"alpha_pattern": {r"\d+\d+\d+\d+b": 1}}, "is not a pattern that is supported"),
        ({"alpha_pattern": {r"\d?" * 9: 1}}, "is not a pattern that is supported"),
        ({"alpha_pattern": {r"\d*a{0}" * 5: 1}}, "is not a pattern that is supported"),
        ({"alpha_pattern": {r"\d+\.{0}" * 5: 1}}, "is not a pattern that is supported"),
        ({"alpha_pattern": {r"\d*a{00}" * 5: 1}}, "is not a pattern that is supported"),
        ({"alpha_pattern": {r"\d+a?" * 5: 1}}, "is not a pattern that is supported"),
        ({"alpha_pattern": {r"\d+a*" * 5: 1}}, "is not a pattern that is supported"),
        ({"alpha_pattern": {r"\d+\.?" * 5: 1}}, "is not a pattern that is supported"),
        ({"alpha_pattern": {r"\d+a{0,1}" * 5: 1}}, "is not a pattern that is supported"),
        ({"alpha_pattern": {"(a|a)" * 9: 1}}, "is not a pattern that is supported"),
        ({"alpha_pattern": {"(||||||||)" * 4: 1}}, "is not a pattern that is supported"),
        ({"alpha_pattern": {".*(|||)(|||)(|||).*b": 1}}, "is not a pattern that is supported"),
        ({"alpha_pattern": {"(?=a)": 1}}, "is not a pattern that is supported"),
        ({"alpha_pattern": {"(": 1}}, "alpha_pattern '('"),
        ({"alpha_pattern": {"x": None}}, "'x' must be a number"),
    ],
    ids=str,
)
def test_what_computes_something_else_is_refused(write: Write, changes: dict[str, Any], said: str) -> None:
    directory = write()
    config = json.loads((directory / CONFIG_FILE).read_text())
    (directory / CONFIG_FILE).write_text(json.dumps(config | changes))
    with pytest.raises(InvalidArgument) as refused:
        read_adapter(str(directory), LIMITS)
    assert said in refused.value.message
    assert str(directory / CONFIG_FILE) in refused.value.message
    assert refused.value.field == "lora_path"


A, B = (f"base_model.model.{LAYER}.lora_{side}.weight" for side in "AB")


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("base_model.model.lm_head.weight", torch.ones(2, 2), "was saved whole (modules_to_save)"),
        (A.replace("lora_A.weight", "lora_magnitude_vector"), torch.ones(2, 2), "is DoRA's"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", torch.ones(2, 2), "is an embedding's"),
        (A.removeprefix("base_model."), torch.ones(2, 2), "none that PEFT's LoRA has"),
        (A, torch.ones(8, 16, 1), "has shape [8, 16, 1]; only matrices"),
        (A, torch.ones(7, 16), "have shapes [7, 16] and [24, 8], and the rank is 8"),
        (A, torch.ones(8, 16, dtype=torch.float64), "dtype F64, which is not supported"),
        (B, None, "has lora_A alone"),
    ],
    ids=str,
)
def test_tensors_that_mean_something_else_are_refused(
    write: Write, name: str, tensor: torch.Tensor | None, said: str
) -> None:
    directory = write()
    tensors = load_file(directory / WEIGHTS_FILE)
    tensors.pop(name, None)
    save_file(tensors | ({} if tensor is None else {name: tensor}), directory / WEIGHTS_FILE)
    with pytest.raises(InvalidArgument) as refused:
        read_adapter(str(directory), LIMITS)
    assert said in refused.value.message


def test_what_is_missing_is_named(write: Write, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no directory"):
        read_adapter(str(tmp_path / "nowhere"), LIMITS)
    directory = write()
    (directory / WEIGHTS_FILE).rename(directory / "adapter_model.bin")
    with pytest.raises(InvalidArgument, match="is a pickle"):
        read_adapter(str(directory), LIMITS)


def test_a_file_that_the_system_does_not_give_is_refused(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write()

    def denied(path: Path, *_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("charonia.core.regular_files.os.open", denied)
    with pytest.raises(InvalidArgument, match=r"cannot be read: .*Permission denied"):
        read_adapter(str(directory), LIMITS)


def test_a_file_that_is_too_large_is_not_read(write: Write) -> None:
    directory = write()
    with (directory / WEIGHTS_FILE).open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(InvalidArgument, match="that max_lora_bytes allows"):
        read_adapter(str(directory), LIMITS)


def test_damaged_files_are_refused_whatever_is_wrong_with_them(write: Write) -> None:
    """Truncated anywhere, or with any bytes changed: an adapter, or one of our errors."""
    directory, random = write(), Random(3)
    whole = (directory / WEIGHTS_FILE).read_bytes()
    length = 8 + int.from_bytes(whole[:8], "little")
    for _ in range(150):
        damaged = bytearray(whole[: random.choice((len(whole), random.randrange(len(whole)), length))])
        for _ in range(random.randint(0, 3) if damaged else 0):
            damaged[random.randrange(min(len(damaged), length))] = random.choice(b'\0\xff[]{}09:,"-e')
        (directory / WEIGHTS_FILE).write_bytes(damaged)
        with suppress(CharoniaError):
            read_adapter(str(directory), LIMITS)


def test_a_number_that_no_float_can_be_is_refused(write: Write) -> None:
    directory = write()
    config = json.loads((directory / "adapter_config.json").read_text())
    for alpha in (10**400, 1e300, math.inf):
        (directory / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": alpha}))
        with pytest.raises(InvalidArgument, match="lora_alpha must be a number, got "):
            read_adapter(str(directory), LIMITS)
