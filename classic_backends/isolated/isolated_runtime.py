"""Runtimes in child processes: a crash ends the child alone, and its end frees all memory of the model's libraries.

Any backend can run so: the parameter EXECUTION of a model or backend is `isolated`, or `thread` for the server itself.
Tensors cross in shared memory, with one small message each way.
"""

import logging
import os
import select
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from itertools import chain
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Literal

from ...core.errors import CharoniaError, Internal
from ...core.model import MemoryNeed, ModelConfig, RawConfig
from ...core.runtime import Arrays, InstancePlacement, Parameters, Runtime, RuntimeLoader, RuntimeTraits
from ...processes import gc_tuning
from ...processes.child_process import anonymous_file, describe_exit, python_child
from ...processes.host import LAST_NICENESS, NICENESS
from ...processes.log_forwarding import LogRecordMessage
from ...processes.patient_work import patient_work
from ..backend_config import declares_tensors, read_choice, read_placements, with_one_instance
from .instance_main import (
    ConfigCompleted,
    ExecuteBatch,
    FromInstance,
    InstanceFailed,
    InstanceLoaded,
    InstanceTask,
    OutputsMade,
    ReturnMemory,
    TensorConnection,
    ToInstance,
    completion_main,
    instance_main,
    resolve_loader,
)

log = logging.getLogger(__name__)

EXECUTION_PARAMETER = "EXECUTION"
ISOLATED: Literal["isolated"] = "isolated"
THREAD: Literal["thread"] = "thread"

_LEAVE_SECONDS = 5.0
"""How long a process may take to close its model before it is killed."""


@dataclass(frozen=True)
class IsolatableLoader(RuntimeLoader):
    """A backend's `RuntimeLoader`, in a child process or in this one, as the parameter EXECUTION says."""

    loader: str
    """The backend's own, see `resolve_loader`."""
    default: Literal["isolated", "thread"] = THREAD
    library_bytes: int = 32 << 20
    """Memory that a process takes with the libraries it imports."""
    completes_in_process: bool = False
    """Completing a config imports them, too, which the server must not."""
    always_isolated: bool = False
    """The server must never import them."""
    niceness: int = NICENESS
    """The niceness of each process."""
    keeps_memory: bool = False
    """Each keeps free memory for a minute, not for seconds."""

    def load(
        self, directory: Path, config: ModelConfig, placement: InstancePlacement, parameters: Parameters
    ) -> Runtime:
        """Load as the backend's own loader does, in a child process if that is chosen. Raises `Internal` if the process
        ends while it loads."""
        isolated, own = self._read(parameters)
        if isolated:
            task = InstanceTask(self.loader, directory, config, placement, own, self.niceness)
            with patient_work.pending(self.niceness == LAST_NICENESS):
                return IsolatedRuntime(task, self.keeps_memory)
        return resolve_loader(self.loader).load(directory, config, placement, own)

    def uses_gpus(self) -> bool:
        loader = resolve_loader(self.loader)
        return loader.uses_gpus()

    def needs(self, directory: Path, raw: RawConfig, parameters: Parameters) -> tuple[MemoryNeed, ...]:
        """The memory that the backend's own loader needs, and that of the libraries of each process."""
        isolated, own = self._read(parameters)
        loader = resolve_loader(self.loader)
        if not isolated:
            return loader.needs(directory, raw, own)
        placements = read_placements("", raw)
        weights = [loader.needs(directory, with_one_instance(raw, placement), own) for placement in placements]
        return (MemoryNeed(self.library_bytes * len(placements)), *chain.from_iterable(weights))

    def complete(self, directory: Path, raw: RawConfig, parameters: Parameters) -> RawConfig:
        """Complete the config as the backend's own loader does, in a child process if `load` would use one."""
        isolated, own = self._read(parameters)
        if not (isolated and self.completes_in_process):
            return resolve_loader(self.loader).complete(directory, raw, own)
        if declares_tensors(raw):
            return raw
        with closing(InstanceProcess(completion_main, self.loader, directory, raw, own)) as process:
            message = _first_message(process, f"the process that reads {directory}")
        assert isinstance(message, ConfigCompleted)
        return message.config

    def file_parameters(self, directory: Path, parameters: Parameters) -> Mapping[str, str]:
        return resolve_loader(self.loader).file_parameters(directory, self._read(parameters)[1])

    def _read(self, parameters: Parameters) -> tuple[bool, dict[str, str]]:
        """Whether a child process is chosen, and the parameters that are the backend's."""
        choices = (ISOLATED,) if self.always_isolated else (ISOLATED, THREAD)
        chosen = read_choice(parameters, EXECUTION_PARAMETER, choices, self.default)
        return chosen == ISOLATED, {name: value for name, value in parameters.items() if name != EXECUTION_PARAMETER}


class InstanceLost(Internal):
    """The process ended by itself while it executed: the one that follows may succeed."""


class IsolatedRuntime(Runtime):
    """The runtime of one instance, in its child process. If that ends by itself, the execution fails with
    `InstanceLost`, and the runtime cannot be used again (`RuntimeTraits.process`)."""

    def __init__(self, task: InstanceTask, keeps_memory: bool = False) -> None:
        self._name = task.placement.name
        releases = gc_tuning.late_releases if keeps_memory else gc_tuning.memory_releases
        with ExitStack() as resources:
            process = resources.enter_context(closing(InstanceProcess(instance_main, task, releases=releases)))
            self._process = process
            loaded = _first_message(process, f"the process of instance '{self._name}'")
            resources.pop_all()
        assert isinstance(loaded, InstanceLoaded)
        self.traits = RuntimeTraits(ragged=loaded.ragged, process=process, interrupt=process.kill)

    def execute(self, inputs: Arrays, wanted: Sequence[str]) -> Iterator[Arrays]:
        failed = f"Failed to process the request(s) for model instance '{self._name}', message: "
        try:
            self._process.send(ExecuteBatch(self._process.tensors.write(inputs), tuple(wanted)))
            answer = self._process.receive()
        except ProcessLost as loss:
            raise (Internal if loss.killed else InstanceLost)(f"{failed}its process {loss}") from None
        if isinstance(answer, InstanceFailed):
            raise _to_error(answer, f"instance '{self._name}'", failed + answer.error.message)
        assert isinstance(answer, OutputsMade), answer
        yield self._process.tensors.read(answer.outputs)

    def close(self) -> None:
        self._process.close()


def _first_message(process: "InstanceProcess", name: str) -> FromInstance:
    """The first message of a child beside its log. Raises the failure that it reports, or `Internal` if it ended."""
    try:
        message = process.receive()
    except ProcessLost as loss:
        raise Internal(f"{name} {loss}") from None
    if isinstance(message, InstanceFailed):
        raise _to_error(message, name, message.error.message)
    return message


def _to_error(failure: InstanceFailed, name: str, message: str) -> CharoniaError:
    """The failure's own error if it is meant for clients; otherwise an `Internal` with `message`, and the report is
    logged."""
    if not failure.report:
        return failure.error.error()
    log.error("%s failed: %s", name, failure.report)
    return Internal(message)


class ProcessLost(Exception):
    """The process has ended: `ended unexpectedly: <how>`, or `was ended: <why>` where it was `killed`."""

    def __init__(self, how: str, killed: bool = False) -> None:
        super().__init__(how)
        self.killed = killed


class InstanceProcess:
    """The server's end of a child process that runs `target(connection, descriptors, *arguments)`. `send` and `receive`
    are for one thread.

    Raises:
        OSError: the process cannot be started.
        MemoryError: its tensors find no memory.
    """

    def __init__(
        self,
        target: Callable[..., None],
        *arguments: Any,
        releases: set[Callable[[], None]] = gc_tuning.memory_releases,
    ) -> None:
        """`releases`: those of `gc_tuning` that the return of its free memory is one of."""
        self.lost = False
        """Its end was noticed, so that a new `InstanceProcess` must take its place."""
        self._kill_reason = ""
        with ExitStack() as resources:
            self._connection, theirs = Pipe()
            resources.enter_context(self._connection)
            with theirs:
                inputs = anonymous_file("charonia-inputs")
                outputs = anonymous_file("charonia-outputs")
                files = inputs, outputs
                for file in files:
                    resources.callback(os.close, file)
                self.tensors = TensorConnection[FromInstance](self._connection, (outputs, inputs), FromInstance)
                """To and from the process."""
                process = python_child("charonia-model", target, theirs, files, *arguments, inherited=files)
            self._process = process
            self._resources = resources.pop_all()
        self.pid = process.pid
        self.sentinel = process.sentinel
        """A descriptor that becomes readable when the process has ended."""
        self._poll = select.poll()
        for descriptor in (self._connection.fileno(), self.sentinel):
            self._poll.register(descriptor, select.POLLIN)
        self._releases = releases
        releases.add(self.return_memory)

    def send(self, message: ToInstance) -> None:
        """Raises `ProcessLost`."""
        try:
            self.tensors.send(message)
        except OSError:
            raise self._loss() from None

    def receive(self) -> FromInstance:
        """The next message; records of the process's log go to ours. Raises `ProcessLost`."""
        while True:
            # Processes that the model started may keep the connection open: a closed one is not the only sign.
            ready = {descriptor for descriptor, _ in self._poll.poll()}
            if self._connection.fileno() not in ready:
                raise self._loss()
            try:
                message = self.tensors.receive()
            except (EOFError, OSError):
                raise self._loss() from None
            if not isinstance(message, LogRecordMessage):
                return message
            message.log_here()

    def return_memory(self) -> None:
        """Give free memory for tensors back to the system at both ends; from any thread."""
        with suppress(OSError):  # the process may be lost
            self.tensors.trim()
            self.tensors.send(ReturnMemory())

    def kill(self, reason: str) -> None:
        """Kill the process, from any thread; `ProcessLost` has the reason."""
        self._kill_reason = reason
        self._process.kill()

    def close(self) -> None:
        """Let the process end by itself, or kill it after some seconds; return when it has ended."""
        self._releases.discard(self.return_memory)
        self.tensors.close()
        self._process.close(_LEAVE_SECONDS)
        self._resources.close()

    def _loss(self) -> ProcessLost:
        self.lost = True
        exit_code = self._process.wait(_LEAVE_SECONDS)
        if self._kill_reason:
            return ProcessLost(f"was ended: {self._kill_reason}", killed=True)
        return ProcessLost(f"ended unexpectedly: {describe_exit(exit_code)}")


PYTORCH = IsolatableLoader(
    "charonia.classic_backends.torch.torch_backend:PYTORCH",
    ISOLATED,
    library_bytes=145 << 20,
    completes_in_process=True,
)
ENCODER = IsolatableLoader(
    "charonia.classic_backends.encoder.encoder_backend:ENCODER", ISOLATED, library_bytes=250 << 20
)
TOWER = IsolatableLoader(
    "charonia.classic_backends.tower.tower_backend:TOWER", ISOLATED, library_bytes=250 << 20, keeps_memory=True
)
PATIENT_TOWER = replace(TOWER, niceness=LAST_NICENESS)
"""Gives way to steps that decode: what it makes stands in prompts, and is not all that a decoder reads."""
ONNX = IsolatableLoader("charonia.classic_backends.onnx.onnx_backend:ONNX", completes_in_process=True)
OPENVINO = IsolatableLoader("charonia.classic_backends.openvino_backend:OPENVINO", completes_in_process=True)
FIL = IsolatableLoader("charonia.classic_backends.tree_models:FIL", ISOLATED, completes_in_process=True)
TENSORFLOW = IsolatableLoader(
    "charonia.classic_backends.tensorflow_backend:TENSORFLOW",
    ISOLATED,
    library_bytes=240 << 20,
    completes_in_process=True,
    always_isolated=True,
)
