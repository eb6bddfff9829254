"""Instances in processes of their own: what they import, hold and crash is theirs, and an end frees all of it.

Any backend's instances can be; the parameter EXECUTION of a model or backend says whether: `isolated`, or `thread`,
in the server itself. Tensors cross by memory that both sides map, and beside them one small message each way.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

from ...core.errors import CharoniaError, Internal, error_from_code
from ...core.memory_needs import MemoryNeed
from ...core.model import ConfigDocument, ModelConfig
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
    """A `RuntimeLoader` that loads what `origin` does, where the parameter says or else `default`. `libraries`: bytes
    that a process takes with what it imports. `heavy`: completing a config imports them too, which the server must not.
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

    def needs(self, directory: Path, document: ConfigDocument, parameters: Mapping[str, str]) -> tuple[MemoryNeed, ...]:
        """The memory that the backend's own loader needs, and for each process the libraries that it imports."""
        isolated, own = self._read(parameters)
        loader = self.loader.load_reference()
        if not isolated:
            return loader.needs(directory, document, own)
        places = [slot.placement for slot in read_instance_slots("", document)]
        weights = [loader.needs(directory, with_one_instance(document, place), own) for place in places]
        return (MemoryNeed(self.library_bytes * len(places)), *chain.from_iterable(weights))

    def complete(self, directory: Path, document: ConfigDocument, parameters: Mapping[str, str]) -> ConfigDocument:
        """Complete the config as the backend's own loader does, in a child process where `load` would use one."""
        isolated, own = self._read(parameters)
        if not (isolated and self.completes_in_process):
            return self.loader.load_reference().complete(directory, document, own)
        return document if declares_tensors(document) else _complete_in_process(self.loader, directory, document, own)

    def _read(self, parameters: Mapping[str, str]) -> tuple[bool, dict[str, str]]:
        """Whether a child process is chosen, and the parameters that are the backend's."""
        chosen = read_choice(parameters, EXECUTION_PARAMETER, (ISOLATED, THREAD), self.default)
        return chosen == ISOLATED, {name: value for name, value in parameters.items() if name != EXECUTION_PARAMETER}


def _complete_in_process(
    origin: LoaderRef, directory: Path, document: ConfigDocument, parameters: dict[str, str]
) -> ConfigDocument:
    link = InstanceProcess(completion_main, origin, directory, document, parameters)
    try:
        said = _first_message(link, f"the process that reads {directory}")
    finally:
        link.close()
    assert isinstance(said, ConfigCompleted)
    whole: ConfigDocument = json.loads(said.document)
    return whole


def _first_message(link: InstanceProcess, who: str) -> FromInstance:
    """The first message of a child, its log apart. Raises the failure that it reports, or `Internal` if it ended."""
    try:
        said = link.receive()
    except ProcessLost as loss:
        raise Internal(f"{who} {loss}") from None
    if isinstance(said, InstanceFailed):
        raise _to_error(said, who, said.message)
    return said


def _to_error(said: InstanceFailed, who: str, message: str) -> CharoniaError:
    """The error that was meant for clients; for any other, `message`, and all of it in the log."""
    if not said.report:
        return error_from_code(said.code, said.message, said.field)
    log.error("%s failed: %s", who, said.report)
    return Internal(message)


class IsolatedRuntime:
    """One instance and its process. If that ends by itself, what it executes fails with `Internal`, and the instance
    is of no more use; its `RuntimeTraits.life` tells."""

    def __init__(self, task: InstanceTask) -> None:
        self._name = task.placement.name
        self._regions = InstanceArenas(TensorArena(), TensorArena())
        try:
            self._link = InstanceProcess(instance_main, self._regions, task)
        except BaseException:
            self._free()
            raise
        try:
            loaded = _first_message(self._link, f"the process of instance '{self._name}'")
        except BaseException:
            self.close()
            raise
        assert isinstance(loaded, InstanceLoaded)
        self.traits = RuntimeTraits(ragged=loaded.ragged, process=self._link, interrupt=self._link.kill)

    def execute(self, inputs: Arrays, wanted: Sequence[str]) -> Iterator[Arrays]:
        made = self._ask(ExecuteBatch(self._regions.inputs.pack(inputs), tuple(wanted)))
        try:
            while made is not None:
                # The region is the next outputs' too.
                yield self._regions.outputs.unpack(made.outputs, copy=True)
                made = None if made.last else self._ask(ResumeOutputs())
        except GeneratorExit:
            if made is not None and not made.last:
                self._ask(AbandonOutputs())
            raise

    def close(self) -> None:
        self._link.close()
        self._free()

    def _ask(self, message: ToInstance) -> OutputsMade | None:
        """None: there is no more."""
        try:
            self._link.send(message)
            said = self._link.receive()
        except ProcessLost as loss:
            raise Internal(self._words(f"its process {loss}")) from None
        if isinstance(said, InstanceFailed):
            raise _to_error(said, f"instance '{self._name}'", self._words(said.message))
        return said if isinstance(said, OutputsMade) else None

    def _words(self, message: str) -> str:
        """Triton's, for what is the model's own fault."""
        return f"Failed to process the request(s) for model instance '{self._name}', message: {message}"

    def _free(self) -> None:
        for region in self._regions:
            region.close()


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
