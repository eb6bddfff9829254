"""Messages between the server and an isolated instance: one small message each way for a batch, as msgpack.

Tensors do not travel in them: messages say where in a `TensorArena` they lie.
"""

import traceback
from typing import TypeAlias

import msgspec

from ...core.errors import CharoniaError, ErrorCode
from ...processes.log_forwarding import LogRecordMessage
from .tensor_arena import PackedTensor


class ExecuteBatch(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Execute a batch of inputs; `wanted` names the outputs that are read."""

    inputs: tuple[PackedTensor, ...]
    wanted: tuple[str, ...]


class ResumeOutputs(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The outputs are read: make the next ones."""


class AbandonOutputs(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """No further outputs of the batch are read: end it."""


class InstanceLoaded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The instance can execute; `ragged` as in `RuntimeTraits`."""

    ragged: bool


class OutputsMade(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Outputs of a batch; unless they are the `last` ones, the instance waits for a `ResumeOutputs`."""

    outputs: tuple[PackedTensor, ...]
    last: bool


class OutputsEnded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The batch has no more outputs."""


class ConfigCompleted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A model's whole config, as JSON."""

    config: bytes


class InstanceFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A load, a batch or a completion failed. `report`: the traceback, for the log, where the model's own code failed;
    empty for an error that is meant for clients."""

    message: str
    code: str
    field: str | None = None
    report: str = ""


ToInstance: TypeAlias = ExecuteBatch | ResumeOutputs | AbandonOutputs
FromInstance: TypeAlias = (
    InstanceLoaded | OutputsMade | OutputsEnded | ConfigCompleted | InstanceFailed | LogRecordMessage
)


def failure_message(error: BaseException) -> InstanceFailed:
    if isinstance(error, CharoniaError):
        return InstanceFailed(error.message, error.code.value, error.field)
    message, report = f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
    return InstanceFailed(message, ErrorCode.UNKNOWN.value, None, report)
