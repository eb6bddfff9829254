"""Reads what `charonia calibrate` wrote, for explanations: of a command, and of a server."""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from ..core.errors import InvalidArgument
from ..telemetry.roofline import StepRoofline


def read_roofline(file: Path) -> StepRoofline:
    """Raises `InvalidArgument` if it cannot be read or is not calibrate's."""
    from ..planning.machine_file import read_machine_file  # which simulates engines: a server needs it for this alone

    return msgspec.convert(read_machine_file(file).machine, StepRoofline, from_attributes=True)


def read_rooflines(words: Iterable[str]) -> dict[str, StepRoofline]:
    """Of models by name, each given as NAME=FILE. Raises as `read_roofline` does, and for another form."""
    found: dict[str, StepRoofline] = {}
    for word in words:
        name, equals, file = word.partition("=")
        if not (name and equals and file):
            raise InvalidArgument(f"--machine must be NAME=FILE, got '{word}'")
        if name in found:
            raise InvalidArgument(f"--machine is given twice for '{name}'")
        found[name] = read_roofline(Path(file))
    return found
