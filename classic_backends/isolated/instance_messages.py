"""What an isolated instance and the server say to each other: one small message each way for a batch.

Tensors do not travel here; messages say where they lie.
"""

import traceback
from typing import TypeAlias

import msgspec

from ...core.errors import CharoniaError, Code
from .tensor_arena import Packed


class Execute(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A batch of inputs; `wanted` names the outputs that are read."""

    inputs: tuple[Packed, ...]
    wanted: tuple[str, ...]


class Resume(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The outputs are read: make the next ones."""


class Abandon(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Nobody reads what would come."""


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Ready to execute; see `Traits`."""

    ragged: bool


class Made(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Outputs; unless they are the `last` ones, the instance waits to be resumed."""

    outputs: tuple[Packed, ...]
    last: bool


class Done(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """There are no more outputs."""


class Completed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A whole config, as JSON."""

    document: bytes


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Of what was asked nothing came. `report`: for the log, where the failure is the model's own."""

    message: str
    code: str
    field: str | None = None
    report: str = ""


class Said(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A log record."""

    level: int
    logger: str
    text: str


ToInstance: TypeAlias = Execute | Resume | Abandon
FromInstance: TypeAlias = Loaded | Made | Done | Completed | Failed | Said


def failed(error: BaseException) -> Failed:
    """What to say of an error."""
    if isinstance(error, CharoniaError):
        return Failed(error.message, error.code.value, error.field)
    return Failed(
        f"{type(error).__name__}: {error}", Code.UNKNOWN.value, None, "".join(traceback.format_exception(error))
    )
