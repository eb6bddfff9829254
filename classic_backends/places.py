"""Where the instances of a model go: `instance_group` of its config, normalised."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..core.errors import InvalidArgument
from ..core.host import cores
from .runtime import Place


class Slot(NamedTuple):
    """One instance to be loaded; a `passive` one is given no requests."""

    place: Place
    passive: bool = False


def read_slots(model: str, document: Mapping[str, Any]) -> tuple[Slot, ...]:
    """The instances of all groups in order, at least one; a GPU group has `count` on each of its GPUs.

    Raises:
        InvalidArgument: none of them would take requests.
    """
    groups = document.get("instance_group") or [{}]
    slots = tuple(slot for index, group in enumerate(groups) for slot in _slots(f"{model}_{index}", group))
    if all(slot.passive for slot in slots):
        message = f"model '{model}' has no instance that takes requests"
        raise InvalidArgument(message, field="instance_group")
    return slots


def host_instances(document: Mapping[str, Any]) -> int:
    """How many there are, less those on a GPU, whose weights are there."""
    groups = document.get("instance_group") or [{}]
    return sum(len(list(_slots("", group))) for group in groups if group.get("kind") != "KIND_GPU")


def threads_each(document: Mapping[str, Any]) -> int:
    """How many an instance computes with that has threads of its own: the host's, shared out over the instances."""
    return max(1, cores().threads // max(1, host_instances(document)))


def bytes_of(path: Path) -> int:
    """Of a file, or of all files in a directory; 0 where nothing is."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _slots(default_name: str, group: Mapping[str, Any]) -> Iterator[Slot]:
    kind = group.get("kind") or "KIND_CPU"
    name = group.get("name") or default_name
    devices = [int(gpu) for gpu in group.get("gpus") or [0]] if kind == "KIND_GPU" else [0]
    indices = range(max(1, int(group.get("count") or 1)))
    for number, (device, _) in enumerate((device, index) for device in devices for index in indices):
        place = Place(kind, device, number, f"{name}_{number}")
        yield Slot(place, bool(group.get("passive", False)))
