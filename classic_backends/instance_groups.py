"""Where the instances of a model go: `instance_group` of its config, normalised."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..core.errors import InvalidArgument
from ..core.memory_needs import Share
from ..core.model import Document
from ..processes.host import cores
from .runtime import Place


class Slot(NamedTuple):
    """One instance to be loaded; a `passive` one is given no requests."""

    place: Place
    passive: bool = False


def read_slots(model: str, document: Document) -> tuple[Slot, ...]:
    """The instances of all groups in order, at least one; a GPU group has `count` on each of its GPUs.

    Raises:
        InvalidArgument: none of them would take requests.
    """
    slots = tuple(_all_slots(model, document))
    if all(slot.passive for slot in slots):
        message = f"model '{model}' has no instance that takes requests"
        raise InvalidArgument(message, field="instance_group")
    return slots


def instances(document: Document) -> Counter[int | None]:
    """How many there are on each GPU, and under None all others."""
    return Counter(slot.place.gpu for slot in _all_slots("", document))


def alone(document: Document, place: Place) -> dict[str, Any]:
    """The config of a model that has one instance, there."""
    group = {"kind": place.kind, "gpus": [] if place.gpu is None else [place.gpu]}
    return {**document, "instance_group": [group]}


def each_instance(document: Document, size: int) -> tuple[Share, ...]:
    """What a model needs whose instances have `size` bytes of weights each, where they are."""
    return tuple(Share(size * count, gpu) for gpu, count in instances(document).items())


def each_memory(document: Document, size: int) -> tuple[Share, ...]:
    """What a model needs whose instances share `size` bytes of weights in each memory that some of them use."""
    return tuple(Share(size, gpu) for gpu in instances(document))


def threads_each(document: Document) -> int:
    """How many an instance computes with that has threads of its own: the host's, shared out over the instances."""
    return max(1, cores().threads // max(1, instances(document)[None]))


def bytes_of(path: Path) -> int:
    """Of a file, or of all files in a directory; 0 where nothing is."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _all_slots(model: str, document: Document) -> Iterator[Slot]:
    groups = document.get("instance_group") or [{}]
    return (slot for index, group in enumerate(groups) for slot in _slots(f"{model}_{index}", group))


def _slots(default_name: str, group: Document) -> Iterator[Slot]:
    kind = group.get("kind") or "KIND_CPU"
    name = group.get("name") or default_name
    devices = [int(gpu) for gpu in group.get("gpus") or [0]] if kind == "KIND_GPU" else [0]
    indices = range(max(1, int(group.get("count") or 1)))
    for number, (device, _) in enumerate((device, index) for device in devices for index in indices):
        place = Place(kind, device, number, f"{name}_{number}")
        yield Slot(place, bool(group.get("passive", False)))
