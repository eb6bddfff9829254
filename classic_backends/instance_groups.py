"""Where the instances of a model go: `instance_group` of its config, normalised."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..core.errors import InvalidArgument
from ..core.memory_needs import MemoryNeed
from ..core.model import ConfigDocument
from ..processes.host import usable_cores
from .runtime import InstancePlacement


class InstanceSlot(NamedTuple):
    """One instance to be loaded; a `passive` one is given no requests."""

    placement: InstancePlacement
    passive: bool = False


def read_instance_slots(model: str, document: ConfigDocument) -> tuple[InstanceSlot, ...]:
    """The instances of all groups in order, at least one; a GPU group has `count` on each of its GPUs.

    Raises:
        InvalidArgument: none of them would take requests.
    """
    slots = tuple(_all_slots(model, document))
    if all(slot.passive for slot in slots):
        message = f"model '{model}' has no instance that takes requests"
        raise InvalidArgument(message, field="instance_group")
    return slots


def instances_per_gpu(document: ConfigDocument) -> Counter[int | None]:
    """How many there are on each GPU, and under None all others."""
    return Counter(slot.placement.gpu for slot in _all_slots("", document))


def with_one_instance(document: ConfigDocument, place: InstancePlacement) -> dict[str, Any]:
    """The config of a model that has one instance, there."""
    group = {"kind": place.kind, "gpus": [] if place.gpu is None else [place.gpu]}
    return {**document, "instance_group": [group]}


def memory_per_instance(document: ConfigDocument, size: int) -> tuple[MemoryNeed, ...]:
    """What a model needs whose instances have `size` bytes of weights each, where they are."""
    return tuple(MemoryNeed(size * count, gpu) for gpu, count in instances_per_gpu(document).items())


def memory_shared_by_instances(document: ConfigDocument, size: int) -> tuple[MemoryNeed, ...]:
    """What a model needs whose instances share `size` bytes of weights in each memory that some of them use."""
    return tuple(MemoryNeed(size, gpu) for gpu in instances_per_gpu(document))


def threads_per_instance(document: ConfigDocument) -> int:
    """How many an instance computes with that has threads of its own: the host's, shared out over the instances."""
    return max(1, usable_cores().threads // max(1, instances_per_gpu(document)[None]))


def bytes_on_disk(path: Path) -> int:
    """Of a file, or of all files in a directory; 0 where nothing is."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _all_slots(model: str, document: ConfigDocument) -> Iterator[InstanceSlot]:
    groups = document.get("instance_group") or [{}]
    return (slot for index, group in enumerate(groups) for slot in _slots(f"{model}_{index}", group))


def _slots(default_name: str, group: ConfigDocument) -> Iterator[InstanceSlot]:
    kind = group.get("kind") or "KIND_CPU"
    name = group.get("name") or default_name
    devices = [int(gpu) for gpu in group.get("gpus") or [0]] if kind == "KIND_GPU" else [0]
    indices = range(max(1, int(group.get("count") or 1)))
    for number, (device, _) in enumerate((device, index) for device in devices for index in indices):
        place = InstancePlacement(kind, device, number, f"{name}_{number}")
        yield InstanceSlot(place, bool(group.get("passive", False)))
