"""LoRA adapters as PEFT saves them, and checkpoints with adapters merged into their weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none", "target_modules": "all-linear"}


def layers_of(checkpoint: Path, names: tuple[str, ...] = ("proj",)) -> dict[str, tuple[int, int]]:
    """The paths of a checkpoint's linear layers that take adapters and end as one of `names` does, with the shapes of
    their weights. The checkpoint is one safetensors file."""
    found: dict[str, tuple[int, int]] = {}
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        for tensor in file.keys():  # noqa: SIM118 (it is no dictionary)
            path = tensor.removesuffix(".weight")
            if path != tensor and path.endswith(names):
                outputs, inputs = file.get_slice(tensor).get_shape()
                found[path] = outputs, inputs
    return found


def write_adapter(
    directory: Path,
    layers: Mapping[str, tuple[int, int]],
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
    ranks: Mapping[str, int] = {},
    **changes: Any,
) -> Path:
    """A random adapter of `layers` as PEFT saves it, strong enough to change what is said. `ranks`: of
    layers whose rank is not `r`. `changes`: of CONFIG."""
    config, generator = CONFIG | changes, torch.Generator().manual_seed(seed)
    tensors = {}
    for path, (outputs, inputs) in layers.items():
        rank = ranks.get(path, config["r"])
        a, b = (torch.randn(shape, generator=generator) for shape in ((rank, inputs), (outputs, rank)))
        tensors[f"base_model.model.{path}.lora_A.weight"] = (a / inputs**0.5).to(dtype)
        tensors[f"base_model.model.{path}.lora_B.weight"] = (b * 0.2).to(dtype)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def merge(checkpoint: Path, adapter: Path, scale: Mapping[str, float] | float, merged: Path) -> Path:
    """The checkpoint with scale x B A added to its weights: by the layer's path, or the same for all."""
    weights, added = load_file(checkpoint / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, a in added.items():
        path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        if name.endswith(".lora_A.weight"):
            by = scale if isinstance(scale, float) else scale[path]
            weights[f"{path}.weight"] += by * (added[name.replace("lora_A", "lora_B")] @ a)
    merged.mkdir(parents=True, exist_ok=True)
    for file in checkpoint.iterdir():
        if file.suffix == ".json" or file.suffix == ".jinja":
            (merged / file.name).write_bytes(file.read_bytes())
    save_file(weights, merged / "model.safetensors", {"format": "pt"})
    return merged
