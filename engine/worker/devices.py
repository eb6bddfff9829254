"""The device that each rank of a machine computes on."""

import torch

from ...core.errors import InvalidArgument
from ..config import EngineConfig


def assign_device(config: EngineConfig, local: int = 0, here: int = 1) -> str:
    """The device of rank `local`, of `here` ranks that each replica has on this machine: a GPU of its own, or the
    processor that all share. Names that are unknown or not here are left to `resolve_device`.

    Raises:
        InvalidArgument: there are fewer GPUs than ranks, or one is named for all.
    """
    kind, _, number = config.device.partition(":")
    if kind == "auto":
        kind = _fastest()
    ranks = here * config.data_parallel_size
    if kind != "cuda" or ranks == 1 or not torch.cuda.is_available():
        return config.device if number else kind
    if number:
        message = f"device {config.device!r} is one GPU, and there are {_ranks(config, here)}"
        raise InvalidArgument(message, field="device")
    if (count := torch.cuda.device_count()) < ranks:
        field = "data_parallel_size" if config.data_parallel_size > 1 else "tensor_parallel_size"
        message = f"{_ranks(config, here)} need a GPU each, and this machine has {count}"
        raise InvalidArgument(f"{field}: {message}", field=field)
    return f"cuda:{config.replica * here + local}"


def resolve_device(name: str) -> torch.device:
    """The device that a name means; "auto" is a GPU wherever torch finds one. A GPU has its index: of its calls torch
    lets some do without, and NCCL and `set_device` refuse it.

    Raises:
        InvalidArgument: there is no such device, or none of that kind on this machine.
    """
    try:
        device = torch.device(_fastest() if name == "auto" else name)
    except RuntimeError as error:
        raise InvalidArgument(f"device {name!r} is unknown; known are auto, cpu and cuda", field="device") from error
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise InvalidArgument(f"device {name!r} is not on this machine", field="device")
    if (device.index or 0) and device.type == "cuda" and device.index >= (count := torch.cuda.device_count()):
        raise InvalidArgument(f"device {name!r} is not on this machine, which has {count} of them", field="device")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def _fastest() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _ranks(config: EngineConfig, here: int) -> str:
    if config.data_parallel_size == 1:
        return f"{here} ranks"
    ranks_each = f" of {here} ranks" if here > 1 else ""
    return f"{config.data_parallel_size} replicas{ranks_each}"
