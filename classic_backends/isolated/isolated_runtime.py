"""Runtimes in child processes: a crash ends the child alone, and its end frees all that the model's libraries took.

Any backend can be loaded so; the parameter EXECUTION of a model or backend says whether: `isolated`, or `thread`, in
the server itself. Tensors cross in shared memory, with one small message each way beside them.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

from ...core.errors import CharoniaError, Internal, error_from_code
from ...core.model import MemoryNeed, ModelConfig, RawConfig
from ..backend_parameters import read_choice
from ..config_completion import declares_tensors
from ..instance_groups import read_instance_slots, with_one_instance
from ..runtime import Arrays, InstancePlacement, Runtime, RuntimeTraits
from .instance_main import InstanceArenas, InstanceTask, LoaderRef, completion_main, instance_main
from .instance_messages import (
    AbandonOutputs,
    ConfigCompleted,
    ExecuteBatch,
    FromInstance,
    InstanceFailed,
    InstanceLoaded,
    OutputsMade,
    ResumeOutputs,
    ToInstance,
)
from .instance_process import InstanceProcess, ProcessLost
from .tensor_arena import TensorArena

log = logging.getLogger(__name__)

EXECUTION_PARAMETER = "EXECUTION"
ISOLATED: Literal["isolated"] = "isolated"
THREAD: Literal["thread"] = "thread"


class IsolatableLoader(NamedTuple):
    """A backend's `RuntimeLoader`, in a child process or in this one, as the parameter says or else `default`.

    `library_bytes`: memory that a process takes with the libraries it imports. `completes_in_process`: completing a
    config imports them too, which the server must not.
    """

    loader: LoaderRef
    default: Literal["isolated", "thread"] = THREAD
    library_bytes: int = 32 << 20
    completes_in_process: bool = False

    def load(
        self, directory: Path, config: ModelConfig, place: InstancePlacement, parameters: Mapping[str, str]
    ) -> Runtime:
        """Load as the backend's own loader does, in a child process where that is chosen.

        Raises:
            Internal: the process ended while it loaded.
        """
        isolated, own = self._read(parameters)
        if isolated:
            return IsolatedRuntime(InstanceTask(self.loader, directory, config, place, own))
        return self.loader.load_reference().load(directory, config, place, own)

    def uses_gpus(self) -> bool:
        return self.loader.load_reference().uses_gpus()

    def needs(self, directory: Path, raw: RawConfig, parameters: Mapping[str, str]) -> tuple[MemoryNeed, ...]:
        """The memory that the backend's own loader needs, and for each process the libraries that it imports."""
        isolated, own = self._read(parameters)
        loader = self.loader.load_reference()
        if not isolated:
            return loader.needs(directory, raw, own)
        places = [slot.placement for slot in read_instance_slots("", raw)]
        weights = [loader.needs(directory, with_one_instance(raw, place), own) for place in places]
        return (MemoryNeed(self.library_bytes * len(places)), *chain.from_iterable(weights))

    def complete(self, directory: Path, raw: RawConfig, parameters: Mapping[str, str]) -> RawConfig:
        """Complete the config as the backend's own loader does, in a child process where `load` would use one."""
        isolated, own = self._read(parameters)
        if not (isolated and self.completes_in_process):
            return self.loader.load_reference().complete(directory, raw, own)
        return raw if declares_tensors(raw) else _complete_in_process(self.loader, directory, raw, own)

    def _read(self, parameters: Mapping[str, str]) -> tuple[bool, dict[str, str]]:
        """Whether a child process is chosen, and the parameters that are the backend's."""
        chosen = read_choice(parameters, EXECUTION_PARAMETER, (ISOLATED, THREAD), self.default)
        return chosen == ISOLATED, {name: value for name, value in parameters.items() if name != EXECUTION_PARAMETER}


def _complete_in_process(
    loader: LoaderRef, directory: Path, config: RawConfig, parameters: dict[str, str]
) -> RawConfig:
    process = InstanceProcess(completion_main, loader, directory, config, parameters)
    try:
        message = _first_message(process, f"the process that reads {directory}")
    finally:
        process.close()
    assert isinstance(message, ConfigCompleted)
    completed: RawConfig = json.loads(message.config)
    return completed


def _first_message(process: InstanceProcess, name: str) -> FromInstance:
    """The first message of a child, its log apart. Raises the failure that it reports, or `Internal` if it ended."""
    try:
        message = process.receive()
    except ProcessLost as loss:
        raise Internal(f"{name} {loss}") from None
    if isinstance(message, InstanceFailed):
        raise _to_error(message, name, message.message)
    return message


def _to_error(failure: InstanceFailed, name: str, message: str) -> CharoniaError:
    """The failure itself where it is meant for clients; any other is an `Internal` with `message`, and logged whole."""
    if not failure.report:
        return error_from_code(failure.code, failure.message, failure.field)
    log.error("%s failed: %s", name, failure.report)
    return Internal(message)


class IsolatedRuntime:
    """The runtime of one instance, in its child process. If that ends by itself, the execution fails with `Internal`,
    and the runtime is of no more use, as `RuntimeTraits.process` tells."""

    def __init__(self, task: InstanceTask) -> None:
        self._name = task.placement.name
        self._arenas = InstanceArenas(TensorArena(), TensorArena())
        try:
            self._process = InstanceProcess(instance_main, self._arenas, task)
        except BaseException:
            self._close_arenas()
            raise
        try:
            loaded = _first_message(self._process, f"the process of instance '{self._name}'")
        except BaseException:
            self.close()
            raise
        assert isinstance(loaded, InstanceLoaded)
        self.traits = RuntimeTraits(ragged=loaded.ragged, process=self._process, interrupt=self._process.kill)

    def execute(self, inputs: Arrays, wanted: Sequence[str]) -> Iterator[Arrays]:
        made = self._ask(ExecuteBatch(self._arenas.inputs.pack(inputs), tuple(wanted)))
        try:
            while made is not None:
                # The arena is the next outputs' too.
                yield self._arenas.outputs.unpack(made.outputs, copy=True)
                made = None if made.last else self._ask(ResumeOutputs())
        except GeneratorExit:
            if made is not None and not made.last:
                self._ask(AbandonOutputs())
            raise

    def close(self) -> None:
        self._process.close()
        self._close_arenas()

    def _ask(self, message: ToInstance) -> OutputsMade | None:
        """The outputs that answer a message; None if there are no more."""
        try:
            self._process.send(message)
            answer = self._process.receive()
        except ProcessLost as loss:
            raise Internal(self._failure_text(f"its process {loss}")) from None
        if isinstance(answer, InstanceFailed):
            raise _to_error(answer, f"instance '{self._name}'", self._failure_text(answer.message))
        return answer if isinstance(answer, OutputsMade) else None

    def _failure_text(self, message: str) -> str:
        """Triton's words for a failure of the model's own."""
        return f"Failed to process the request(s) for model instance '{self._name}', message: {message}"

    def _close_arenas(self) -> None:
        for arena in self._arenas:
            arena.close()


PYTORCH = IsolatableLoader(
    LoaderRef("charonia.classic_backends.torch.torch_backend", "PYTORCH"),
    ISOLATED,
    library_bytes=145 << 20,
    completes_in_process=True,
)
ENCODER = IsolatableLoader(
    LoaderRef("charonia.classic_backends.encoder.encoder_backend", "ENCODER"), ISOLATED, library_bytes=250 << 20
)
ONNX = IsolatableLoader(LoaderRef("charonia.classic_backends.onnx.onnx_backend", "ONNX"), completes_in_process=True)
