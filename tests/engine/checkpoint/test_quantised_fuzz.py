"""Quantised files that are broken, lie or are absurd: refused by name, or loaded; never anything else."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from charonia.core.errors import CharoniaError
from charonia.engine.checkpoint.build_context import BuildContext
from charonia.engine.checkpoint.hf_checkpoint import open_checkpoint
from charonia.engine.checkpoint.model_spec import CheckpointError
from charonia.engine.models.registry import checkpoint_builder
from tests.quantised_files import STYLES, write_quantised

FILE = "model.safetensors"
MUTATED = ("gptq in another order", "gptq of several", "awq", "w4a16 asymmetric", "w8a8", "fp8 blocks")
ABSURD = (None, True, -1, 0, 7, 1 << 62, 1e308, "", "x" * 1000, [], {}, [1, 2, 3], {"a": {}}, "re:(a+)+$")

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def quantised(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(style: str) -> Path:
        if style not in made:
            source = checkpoint("llama", num_hidden_layers=1)
            made[style] = write_quantised(source, tmp_path_factory.mktemp("fuzz"), STYLES[style]())[0]
        return made[style]

    return make


def load(directory: Path) -> None:
    context = BuildContext(torch.bfloat16, torch.device("cpu"), 64)
    checkpoint_builder(open_checkpoint(directory)).build(context).decoder.close()


def refusal(directory: Path) -> str | None:
    """What is said to the checkpoint there; None: it loads."""
    try:
        load(directory)
    except CharoniaError as error:
        return error.message
    return None


def drop(tensors: Tensors, name: str, source: random.Random) -> None:
    del tensors[name]


def cut(tensors: Tensors, name: str, source: random.Random) -> None:
    tensors[name] = tensors[name].flatten()[: source.randrange(tensors[name].numel() + 1)].clone()


def turn(tensors: Tensors, name: str, source: random.Random) -> None:
    tensors[name] = tensors[name].t().contiguous() if tensors[name].dim() == 2 else tensors[name].reshape(1, -1)


def change_type(tensors: Tensors, name: str, source: random.Random) -> None:
    types = [torch.int64, torch.int32, torch.int8, torch.uint8, torch.float32, torch.float16, torch.bool]
    tensors[name] = torch.ones(tensors[name].shape, dtype=source.choice(types))


def swap(tensors: Tensors, name: str, source: random.Random) -> None:
    tensors[name] = tensors[source.choice(sorted(tensors))].clone()


def fill(tensors: Tensors, name: str, source: random.Random) -> None:
    """With numbers of any size: orders that are none, scales that are no numbers."""
    octets = bytes(source.getrandbits(8) for _ in range(tensors[name].nbytes))
    found = torch.frombuffer(bytearray(octets or b"\0"), dtype=torch.uint8)[: tensors[name].nbytes]
    tensors[name] = found.view(tensors[name].dtype).reshape(tensors[name].shape).clone()


MUTATIONS = (drop, cut, turn, change_type, swap, fill)


@pytest.mark.parametrize("style", MUTATED)
@pytest.mark.parametrize("rounds", [2, pytest.param(100, marks=pytest.mark.proof)])
def test_a_tensor_that_is_wrong_is_refused_or_loads(
    quantised: Callable[[str], Path], tmp_path: Path, style: str, rounds: int
) -> None:
    copy, refused = Path(shutil.copytree(quantised(style), tmp_path / "copy")), 0
    whole = load_file(copy / FILE)
    parts = sorted(name for name in whole if "_proj" in name)
    for seed in range(rounds):
        source = random.Random(f"{style} {seed}")
        for mutate in MUTATIONS:
            tensors = dict(whole)
            mutate(tensors, source.choice(parts), source)
            save_file(tensors, copy / FILE)
            said = refusal(copy)
            refused += said is not None
            assert said is None or str(copy) in said
    assert refused >= rounds * 2, "most of these can't be loaded"


@pytest.mark.parametrize("style", MUTATED)
def test_a_file_that_is_cut_off_is_refused(quantised: Callable[[str], Path], tmp_path: Path, style: str) -> None:
    copy = Path(shutil.copytree(quantised(style), tmp_path / "copy"))
    content = (copy / FILE).read_bytes()
    for part in (0.0, 0.001, 0.3, 0.999):
        (copy / FILE).write_bytes(content[: int(len(content) * part)])
        with pytest.raises(CheckpointError, match="truncated or not a safetensors file"):
            load(copy)


def fields_of(config: dict[str, Any], way: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Where the fields are, those within others too."""
    return [
        path
        for name, value in config.items()
        for path in [(*way, name), *(fields_of(value, (*way, name)) if isinstance(value, dict) else [])]
    ]


@pytest.mark.parametrize("style", MUTATED)
def test_a_config_that_is_absurd_is_refused_or_loads(
    quantised: Callable[[str], Path], tmp_path: Path, style: str
) -> None:
    copy = Path(shutil.copytree(quantised(style), tmp_path / "copy"))
    right = (copy / "config.json").read_text()
    for path in fields_of(json.loads(right)["quantization_config"]):
        for value in random.Random("/".join(path)).sample(ABSURD, 2):
            config = json.loads(right)
            part = config["quantization_config"]
            for name in path[:-1]:
                part = part[name]
            part[path[-1]] = value
            (copy / "config.json").write_text(json.dumps(config))
            said = refusal(copy)
            assert said is None or str(copy) in said
