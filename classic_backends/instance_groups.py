"""The instances of a model by the normalised `instance_group` of its config, and the memory and threads they need.

Source: https://github.com/triton-inference-server/server/blob/main/docs/user_guide/model_configuration.md.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..core.errors import InvalidArgument
from ..core.model import MemoryNeed, RawConfig
from ..processes.host import usable_cores
from .runtime import InstancePlacement


def read_placements(model: str, raw: RawConfig) -> tuple[InstancePlacement, ...]:
    """The instances of all groups in order, at least one; a GPU group has `count` on each of its GPUs. Raises
    `InvalidArgument` if all of them are passive."""
    placements = tuple(_all_placements(model, raw))
    if all(placement.passive for placement in placements):
        message = f"model '{model}' has no instance that takes requests"
        raise InvalidArgument(message, field="instance_group")
    return placements


def instances_per_gpu(raw: RawConfig) -> Counter[int | None]:
    """The number of instances on each GPU, and of all others under None."""
    return Counter(placement.gpu for placement in _all_placements("", raw))


def with_one_instance(raw: RawConfig, placement: InstancePlacement) -> dict[str, Any]:
    """The config of a model that has one instance, there."""
    gpus = [] if placement.gpu is None else [placement.gpu]
    return {**raw, "instance_group": [{"kind": placement.kind, "gpus": gpus}]}


def memory_per_instance(raw: RawConfig, weights: Path) -> tuple[MemoryNeed, ...]:
    """The needs of a model whose instances load that file, or all files of a directory, each for itself."""
    size = _bytes_on_disk(weights)
    return tuple(MemoryNeed(size * count, gpu) for gpu, count in instances_per_gpu(raw).items())


def memory_shared_by_instances(raw: RawConfig, weights: Path) -> tuple[MemoryNeed, ...]:
    """The needs of a model whose instances on one device share what they load."""
    size = _bytes_on_disk(weights)
    return tuple(MemoryNeed(size, gpu) for gpu in instances_per_gpu(raw))


def threads_per_instance(raw: RawConfig) -> int:
    """The threads of an instance that has its own: the host's, shared out over the instances."""
    return max(1, usable_cores().threads // max(1, instances_per_gpu(raw)[None]))


def _bytes_on_disk(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _all_placements(model: str, raw: RawConfig) -> Iterator[InstancePlacement]:
    for index, group in enumerate(raw.get("instance_group") or [{}]):
        kind = group.get("kind") or "KIND_CPU"
        name = group.get("name") or f"{model}_{index}"
        devices = [int(gpu) for gpu in group.get("gpus") or [0]] if kind == "KIND_GPU" else [0]
        count, passive = max(1, int(group.get("count") or 1)), bool(group.get("passive", False))
        for number in range(len(devices) * count):
            yield InstancePlacement(kind, devices[number // count], number, f"{name}_{number}", passive)
