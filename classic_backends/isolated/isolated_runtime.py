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

from ...core.errors import CharoniaError, Internal, error_of
from ...core.memory_needs import Share
from ...core.model import Document, ModelConfig
from ..backend_parameters import choice
from ..config_completion import is_complete
from ..instance_groups import alone, read_slots
from ..runtime import Arrays, Place, Runtime, Traits
from .instance_main import Origin, Regions, Task, complete, execute
from .instance_messages import Abandon, Completed, Execute, Failed, FromInstance, Loaded, Made, Resume, ToInstance
from .instance_process import Link, Lost
from .tensor_arena import Region

log = logging.getLogger(__name__)

PARAMETER = "EXECUTION"
ISOLATED: Literal["isolated"] = "isolated"
THREAD: Literal["thread"] = "thread"


class Separable(NamedTuple):
    """A `RuntimeLoader` that loads what `origin` does, where the parameter says or else `default`. `libraries`: bytes
    that a process takes with what it imports. `heavy`: completing a config imports them too, which the server must not.
    """

    origin: Origin
    default: Literal["isolated", "thread"] = THREAD
    libraries: int = 32 << 20
    heavy: bool = False

    def load(self, directory: Path, config: ModelConfig, place: Place, parameters: Mapping[str, str]) -> Runtime:
        """As the backend's own, and:

        Raises:
            Internal: the process ended while it loaded.
        """
        isolated, own = self._read(parameters)
        if isolated:
            return IsolatedRuntime(Task(self.origin, directory, config, place, own))
        return self.origin.find().load(directory, config, place, own)

    def uses_gpus(self) -> bool:
        return self.origin.find().uses_gpus()

    def needs(self, directory: Path, document: Document, parameters: Mapping[str, str]) -> tuple[Share, ...]:
        """As the backend's own, and for each process, which shares nothing, the libraries that it imports."""
        isolated, own = self._read(parameters)
        loader = self.origin.find()
        if not isolated:
            return loader.needs(directory, document, own)
        places = [slot.place for slot in read_slots("", document)]
        weights = [loader.needs(directory, alone(document, place), own) for place in places]
        return (Share(self.libraries * len(places)), *chain.from_iterable(weights))

    def complete(self, directory: Path, document: Document, parameters: Mapping[str, str]) -> Document:
        """As the backend's own, and as `load`."""
        isolated, own = self._read(parameters)
        if not (isolated and self.heavy):
            return self.origin.find().complete(directory, document, own)
        return document if is_complete(document) else _completed(self.origin, directory, document, own)

    def _read(self, parameters: Mapping[str, str]) -> tuple[bool, dict[str, str]]:
        """Whether it is isolated, and the parameters that are the backend's."""
        chosen = choice(parameters, PARAMETER, (ISOLATED, THREAD), self.default)
        return chosen == ISOLATED, {name: value for name, value in parameters.items() if name != PARAMETER}


def _completed(origin: Origin, directory: Path, document: Document, parameters: dict[str, str]) -> Document:
    link = Link(complete, origin, directory, document, parameters)
    try:
        said = _first(link, f"the process that reads {directory}")
    finally:
        link.close()
    assert isinstance(said, Completed)
    whole: Document = json.loads(said.document)
    return whole


def _first(link: Link, who: str) -> FromInstance:
    """What a process says at last of what it was made for. Raises what failed, or `Internal` if it ended."""
    try:
        said = link.receive()
    except Lost as loss:
        raise Internal(f"{who} {loss}") from None
    if isinstance(said, Failed):
        raise _failure(said, who, said.message)
    return said


def _failure(said: Failed, who: str, message: str) -> CharoniaError:
    """The error that was meant for clients; for any other, `message`, and all of it in the log."""
    if not said.report:
        return error_of(said.code, said.message, said.field)
    log.error("%s failed: %s", who, said.report)
    return Internal(message)


class IsolatedRuntime:
    """One instance and its process. If that ends by itself, what it executes fails with `Internal`, and the instance
    is of no more use; its `Traits.life` tells."""

    def __init__(self, task: Task) -> None:
        self._name = task.place.name
        self._regions = Regions(Region(), Region())
        try:
            self._link = Link(execute, self._regions, task)
        except BaseException:
            self._free()
            raise
        try:
            loaded = _first(self._link, f"the process of instance '{self._name}'")
        except BaseException:
            self.close()
            raise
        assert isinstance(loaded, Loaded)
        self.traits = Traits(ragged=loaded.ragged, life=self._link, end=self._link.kill)

    def execute(self, inputs: Arrays, wanted: Sequence[str]) -> Iterator[Arrays]:
        made = self._ask(Execute(self._regions.inputs.pack(inputs), tuple(wanted)))
        try:
            while made is not None:
                # The region is the next outputs' too.
                yield self._regions.outputs.unpack(made.outputs, copy=True)
                made = None if made.last else self._ask(Resume())
        except GeneratorExit:
            if made is not None and not made.last:
                self._ask(Abandon())
            raise

    def close(self) -> None:
        self._link.close()
        self._free()

    def _ask(self, message: ToInstance) -> Made | None:
        """None: there is no more."""
        try:
            self._link.send(message)
            said = self._link.receive()
        except Lost as loss:
            raise Internal(self._words(f"its process {loss}")) from None
        if isinstance(said, Failed):
            raise _failure(said, f"instance '{self._name}'", self._words(said.message))
        return said if isinstance(said, Made) else None

    def _words(self, message: str) -> str:
        """Triton's, for what is the model's own fault."""
        return f"Failed to process the request(s) for model instance '{self._name}', message: {message}"

    def _free(self) -> None:
        for region in self._regions:
            region.close()


PYTORCH = Separable(
    Origin("charonia.classic_backends.torch.torch_backend", "PYTORCH"), ISOLATED, libraries=145 << 20, heavy=True
)
ENCODER = Separable(
    Origin("charonia.classic_backends.encoder.encoder_backend", "ENCODER"), ISOLATED, libraries=250 << 20
)
ONNX = Separable(Origin("charonia.classic_backends.onnx.onnx_backend", "ONNX"), heavy=True)
