"""LoRA adapters as PEFT saves them, and checkpoints with adapters merged into their weights."""

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file

from charonia.bench.adapters import linear_layers as layers_of
from charonia.bench.adapters import write_adapter

__all__ = ["layers_of", "merge", "write_adapter"]


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
