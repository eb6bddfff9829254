"""The file of a machine: what `charonia calibrate` writes and `charonia simulate` reads."""

import os
from pathlib import Path
from typing import Annotated

import msgspec

from ...core.errors import InvalidArgument
from ...telemetry import roofline
from ...telemetry.roofline import MACHINE_FORMAT
from .simulated_machine import SimulatedMachine
from .simulation import EngineShape


class MachineOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """Where the formula of a machine is from."""

    how: str
    """What was done."""
    processor: str = ""
    cores: str = ""
    kernels: str = ""
    threads: int = 0
    checkpoint: str = ""
    """Its name."""
    model: dict[str, int] = {}
    """The model's sizes, by config.json's names."""
    precision: dict[str, str] = {}
    """Its dtype, quantization and the cache's dtype."""
    versions: dict[str, str] = {}
    """The versions of packages, by name."""
    steps: int = 0
    """The steps that were measured."""
    seconds: float = 0.0
    """The seconds in which they were."""
    error: float = 0.0
    """The mean of what steps differ by from the formula, as a share of it."""


class MachineFile(msgspec.Struct, frozen=True, kw_only=True):
    """`engine`: as it was measured, or would be served there by default; `block_bytes`: of a block of its cache, 0 if
    that is not known; `state_bytes`: of the recurrent states of a sequence."""

    format: str = MACHINE_FORMAT
    origin: MachineOrigin
    machine: SimulatedMachine
    engine: EngineShape
    block_bytes: Annotated[int, msgspec.Meta(ge=0)]
    state_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0


def write_machine_file(path: Path, content: MachineFile) -> None:
    """Raises `InvalidArgument` if the file cannot be written."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
        os.replace(part, path)
    except OSError as error:
        raise InvalidArgument(f"cannot write {path}: {error.strerror}", field="output") from None


def require_writable(path: Path, field: str) -> None:
    """Raises `InvalidArgument` where no file can be written: what takes minutes asks before it begins."""
    why = ""
    if not path.parent.is_dir():
        why = f"there is no directory {path.parent}"
    elif path.is_dir():
        why = "it is a directory"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        why = "permission denied"
    if why:
        raise InvalidArgument(f"cannot write {path}: {why}", field=field)


def read_machine_file(path: Path) -> MachineFile:
    """Raises `InvalidArgument`: there is none, it is none, or its numbers cannot be; the message names the field."""
    return roofline.read_machine_file(path, MachineFile)
