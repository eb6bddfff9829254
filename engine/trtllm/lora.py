"""What LoRA adapters need of the engine that is to hold them: modules to put them at, and room for their ranks.

Reads each adapter's adapter_config.json, PEFT's, and no weights.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...core.errors import InvalidArgument
from ...tokenization.checkpoint_files import read_json

_MODULES = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "qkv_proj": "attn_qkv",
    "o_proj": "attn_dense",
    "gate_proj": "mlp_h_to_4h",
    "up_proj": "mlp_gate",
    "gate_up_proj": "mlp_gate_up",
    "down_proj": "mlp_4h_to_h",
    "w1": "moe_h_to_4h",
    "w2": "moe_4h_to_h",
    "w3": "moe_gate",
    "gate": "moe_router",
}
"""Modules by their names in checkpoints, and TensorRT-LLM's names of them."""

_FIELD = "lora_modules"


class LoraRequirements(NamedTuple):
    """`modules`: TensorRT-LLM's names. `rank`: the largest."""

    modules: list[str]
    rank: int


def lora_requirements(adapters: Mapping[str, str]) -> LoraRequirements:
    """What all of them need together; paths by name.

    Raises:
        InvalidArgument: one is not there, or is none that can be served.
    """
    configs = {name: _config(name, path) for name, path in adapters.items()}
    modules = {module: None for name, config in configs.items() for module in _modules(name, config)}
    return LoraRequirements(list(modules), max(_rank(name, config) for name, config in configs.items()))


def _config(name: str, path: str) -> dict[str, Any]:
    config = read_json(Path(path) / "adapter_config.json")
    if not config:
        raise InvalidArgument(f"{_FIELD}: {path} of '{name}' has no adapter_config.json", field=_FIELD)
    return config


def _modules(name: str, config: Mapping[str, Any]) -> list[str]:
    targets = config.get("target_modules")
    if not isinstance(targets, list) or not targets:
        message = f"{_FIELD}: adapter '{name}' must list its target_modules, got {targets!r}"
        raise InvalidArgument(message, field=_FIELD)
    names = [str(target).rpartition(".")[2] for target in targets]
    if unknown := [each for each in names if each not in _MODULES]:
        message = f"{_FIELD}: adapter '{name}' changes {', '.join(unknown)}, which TensorRT-LLM cannot"
        raise InvalidArgument(message, field=_FIELD)
    return [_MODULES[each] for each in names]


def _rank(name: str, config: Mapping[str, Any]) -> int:
    rank = config.get("r")
    if not isinstance(rank, int) or rank < 1:
        raise InvalidArgument(f"{_FIELD}: adapter '{name}' has no rank (r)", field=_FIELD)
    return rank
