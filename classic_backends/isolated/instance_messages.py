"""What an isolated instance and the server say to each other: one small message each way for a batch.

Tensors do not travel here; messages say where they lie.
"""

import traceback
from typing import TypeAlias

import msgspec

from ...core.errors import CharoniaError, ErrorCode
from .tensor_arena import PackedTensor


class ExecuteBatch(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A batch of inputs; `wanted` names the outputs that are read."""

    inputs: tuple[PackedTensor, ...]
    wanted: tuple[str, ...]


class ResumeOutputs(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The outputs are read: make the next ones."""


class AbandonOutputs(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Nobody reads what would come."""


class InstanceLoaded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Ready to execute; see `RuntimeTraits`."""

    ragged: bool


class OutputsMade(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Outputs; unless they are the `last` ones, the instance waits to be resumed."""

    outputs: tuple[PackedTensor, ...]
    last: bool


class OutputsEnded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """There are no more outputs."""


class ConfigCompleted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A whole config, as JSON."""

    document: bytes


class InstanceFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Of what was asked nothing came. `report`: for the log, where the failure is the model's own."""

    message: str
    code: str
    field: str | None = None
    report: str = ""


class InstanceLogRecord(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A log record."""

    level: int
    logger: str
    text: str


ToInstance: TypeAlias = ExecuteBatch | ResumeOutputs | AbandonOutputs
FromInstance: TypeAlias = (
    InstanceLoaded | OutputsMade | OutputsEnded | ConfigCompleted | InstanceFailed | InstanceLogRecord
)


def failure_message(error: BaseException) -> InstanceFailed:
    """What to say of an error."""
    if isinstance(error, CharoniaError):
        return InstanceFailed(error.message, error.code.value, error.field)
    return InstanceFailed(
        f"{type(error).__name__}: {error}", ErrorCode.UNKNOWN.value, None, "".join(traceback.format_exception(error))
    )
