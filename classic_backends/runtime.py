"""The seam between a classic model's scheduling and what computes: one loaded copy of a model, and who loads it.

Knows nothing of requests, batching and threads.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

from numpy.typing import NDArray

from ..core.memory_needs import MemoryNeed
from ..core.model import ConfigDocument, ModelConfig

Arrays: TypeAlias = Mapping[str, NDArray[Any]]
"""Tensors by name. With the model's batch dimension first, if it has one; BYTES are object arrays of `bytes`; BF16, for
which numpy has no type, are uint16 arrays of its bits."""


@dataclass(frozen=True, slots=True)
class InstancePlacement:
    """Where one instance of a model computes. `kind`: KIND_CPU, KIND_GPU or KIND_MODEL; `device`: the GPU, 0 without
    one; `name`: of the instance, as Triton numbers them: `<model>_<group>_<index>`."""

    kind: str = "KIND_CPU"
    device: int = 0
    number: int = 0
    name: str = ""

    @property
    def gpu(self) -> int | None:
        """Whose memory its weights take; None: the host's, or what the model itself chooses."""
        return self.device if self.kind == "KIND_GPU" else None


class RuntimeProcess(Protocol):
    """Of a runtime that may end by itself, as a process does. `lost`: an execution found that it has. `sentinel`: a
    descriptor that can be read as soon as it has."""

    lost: bool

    @property
    def sentinel(self) -> int: ...


class RuntimeTraits(NamedTuple):
    """What its scheduler must know of a runtime.

    `inline`: an execution takes microseconds, so it may run in the event loop's thread. `ragged`: inputs that allow it
    come with the elements of a whole batch in one flat tensor. `life`: it may end by itself, and is replaced then.
    `end`: from any thread, has what it executes now fail, for the reason given, though the runtime may be lost with it;
    None where nothing could.
    """

    inline: bool = False
    ragged: bool = False
    process: RuntimeProcess | None = None
    interrupt: Callable[[str], None] | None = None


class Runtime(Protocol):
    """One instance of a model. Blocking; called by one thread at a time, the one that loaded it unless `inline`.

    What it raises besides `CharoniaError` is the model's own failure; the instance is used again.
    """

    @property
    def traits(self) -> RuntimeTraits: ...

    def execute(self, inputs: Arrays, wanted: Sequence[str]) -> Iterator[Arrays]:
        """Outputs for a batch of inputs; of a decoupled model any number of times, else exactly once.

        `inputs` are read-only, last until the next execution, and lack what is optional and was not given. `wanted`
        names the outputs that are read; more do no harm. Closing the iterator early abandons what is left to compute.
        """

    def close(self) -> None:
        """Free everything. Called once; nothing is called afterwards."""


class RuntimeLoader(Protocol):
    """One backend: makes the instances of its models. Imports what it needs when it is asked."""

    def load(
        self, directory: Path, config: ModelConfig, place: InstancePlacement, parameters: Mapping[str, str]
    ) -> Runtime:
        """One instance, ready to execute. `directory`: of the model's version; `parameters`: the backend's, from
        `--backend-config`, and over them the model's own.

        Raises:
            CharoniaError: the model cannot be loaded; the message says why, and `field` names a wrong parameter.
        """

    def uses_gpus(self) -> bool:
        """Whether what it computes with was built for them."""

    def needs(self, directory: Path, document: ConfigDocument, parameters: Mapping[str, str]) -> tuple[MemoryNeed, ...]:
        """What all instances take at least of each memory, by the size of what they load. `document`: the config as it
        was written, but for its `instance_group`, which is normalised. One memory may be there several times."""

    def complete(self, directory: Path, document: ConfigDocument, parameters: Mapping[str, str]) -> ConfigDocument:
        """`document` with what it lacks and the model's file tells: `input`, `output` and `max_batch_size`.

        Raises:
            CharoniaError: what it says contradicts the model.
        """
