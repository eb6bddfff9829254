"""The interface of a classic backend: one instance of a model, and the loader that makes it."""

import threading
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

from numpy.typing import NDArray

from .errors import Internal
from .model import MemoryNeed, ModelConfig, RawConfig
from .request import ParameterValue
from .request_context import RequestContext
from .wait_graph import AwaitedCall, WaitGraph

Arrays: TypeAlias = Mapping[str, NDArray[Any]]
"""Tensors by name, with the batch dimension first if the model has one. BYTES are object arrays of `bytes`; BF16 are
uint16 arrays of its bits."""


class Resource(NamedTuple):
    """A resource that instances take turns at, by its name in lower case, on one device or, with None, on the whole
    server."""

    name: str
    device: int | None

    @property
    def place(self) -> str:
        return "global" if self.device is None else str(self.device)


class InstanceRate(NamedTuple):
    """The resources that each execution of an instance takes, and how many of each. While two wait, one of priority 2
    runs half as often as one of priority 1."""

    resources: tuple[tuple[Resource, int], ...] = ()
    priority: int = 1


@dataclass(frozen=True, slots=True)
class InstancePlacement:
    kind: str = "KIND_CPU"
    """KIND_CPU, KIND_GPU or KIND_MODEL."""
    device: int = 0
    """The GPU; 0 without one."""
    number: int = 0
    """The index in its group."""
    name: str = ""
    """Triton's name for it: `<model>_<group>_<number>`."""
    passive: bool = False
    """Whether it gets no requests."""
    rate: InstanceRate | None = None
    """The resources that it takes turns at, if any."""

    @property
    def gpu(self) -> int | None:
        """The GPU that holds its weights; None for the host, and for a model that chooses itself."""
        return self.device if self.kind == "KIND_GPU" else None


class RuntimeProcess(Protocol):
    """The process of a runtime that has one of its own."""

    lost: bool
    """An execution has found that the process ended."""

    @property
    def sentinel(self) -> int:
        """A file descriptor that is readable once the process has ended."""


class RuntimeTraits(NamedTuple):
    """The abilities of a runtime that its scheduler must know."""

    inline: bool = False
    """An execution takes microseconds, so it may run in the event loop's thread."""
    ragged: bool = False
    """It takes ragged inputs: as one flat tensor, unless it takes requests."""
    process: RuntimeProcess | None = None
    """Its own process; an instance that loses it is replaced."""
    interrupt: Callable[[str], None] | None = None
    """Makes the current execution fail for the given reason, from any thread; the runtime may be lost. None if
    impossible."""
    unready_reason: Callable[[], Awaitable[str]] | None = None
    """Asks the model, in the event loop, why it is not ready; empty if it is. None if it has no such check."""


def only_response(responses: Iterable[Arrays]) -> Arrays:
    """The outputs of a model that is not decoupled. Raises `Internal` unless there is exactly one response."""
    outputs = list(responses)
    if len(outputs) != 1:
        raise Internal(f"expected a single response, got {len(outputs)}")
    return outputs[0]


class RuntimeResponse(NamedTuple):
    """One response to a request, with parameters for the client."""

    outputs: Arrays
    parameters: Mapping[str, ParameterValue] = {}


class Rescheduled(NamedTuple):
    """The answer to a request that the model wants again in a later batch. `outputs` are its sequence's states."""

    outputs: Arrays = {}


RuntimeAnswer: TypeAlias = RuntimeResponse | Exception | Rescheduled | None


@dataclass(slots=True, eq=False)
class RuntimeRequest:
    """One request as the client made it. A rescheduled one comes again as the same object, with the next execution's
    `inputs` and `flags`."""

    inputs: Arrays
    """As in `Runtime.execute`."""
    output_names: Sequence[str]
    """The wanted outputs, and the states of its sequence."""
    respond: Callable[[RuntimeAnswer, bool], None]
    """Takes a response or an error, called in the event loop; the flag marks the last one. None only marks the end.
    Also takes a `Rescheduled` that did not come with the other answers."""
    context: RequestContext
    id: str = ""
    correlation_id: int | str = 0
    """The sequence that it belongs to, as in Triton's API."""
    flags: int = 0
    """Its place in the sequence, as in Triton's API."""
    timeout: int = 0
    """Microseconds."""
    priority: int = 0
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)
    cancelled: bool = False
    """Nobody waits for it any more. `Runtime.cancel_request` reports that, unless the runtime had not got the request
    yet."""


Parameters: TypeAlias = Mapping[str, str]
"""A backend's parameters from `--backend-config`, overridden by the model's own."""


class Runtime:
    """One instance of a model. Blocking; called by the thread that loaded it or, if `inline`, by the event loop's.
    Errors other than `CharoniaError` are the model's own; the instance is used again.

    With a `by_request` loader it takes whole requests and may answer them later, the unanswered ones with an error when
    its process ends.
    """

    traits = RuntimeTraits()

    def execute(self, inputs: Arrays, output_names: Sequence[str]) -> Iterator[Arrays]:
        """The outputs for a batch of inputs: exactly once or, if decoupled, any number of times. `inputs` are
        read-only, valid until the next execution, and lack absent optional inputs. Outputs beyond `output_names` are
        ignored. Closing the iterator abandons the computation."""
        raise NotImplementedError

    def execute_requests(self, requests: Sequence[RuntimeRequest]) -> Sequence[RuntimeAnswer]:
        """An answer for each request; None if `respond` gets all its answers, before or after this returns. Raises what
        fails all unanswered requests."""
        raise NotImplementedError

    def cancel_request(self, request: RuntimeRequest) -> None:
        """Drop a request that nobody waits for; it does not come again. Called in the event loop."""

    def hold_request(self, request: RuntimeRequest, held: bool) -> None:
        """Pause the responses to a request, whose reader is slow, or resume them. Called in the event loop."""

    def awaited_calls(self) -> Sequence[AwaitedCall]:
        """The requests to other models that the current execution waits for. Called in the event loop."""
        return ()

    def close(self) -> None:
        """Free everything; the last call."""


class LoadInterruption:
    """Ends what loads one version of a model, once nobody waits for it. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: list[Callable[[], None]] = []
        self._requested = False

    def request(self) -> None:
        """End what loads, and what begins to load from here on."""
        with self._lock:
            self._requested = True
            ends = tuple(self._ends)
        for end in ends:
            end()

    @contextmanager
    def calls(self, end: Callable[[], None]) -> Iterator[None]:
        """Within the block a load is ended by this function."""
        with self._lock:
            self._ends.append(end)
            requested = self._requested
        try:
            if requested:
                end()
            yield
        finally:
            with self._lock:
                self._ends.remove(end)


class RuntimeLoader(Protocol):
    """One backend: makes the instances of its models. Imports its libraries only when called."""

    by_request: bool = False
    """Its runtimes take requests as they are."""

    @property
    def waits(self) -> WaitGraph | None:
        """Where its models are registered, if they may wait for others."""
        return None

    @abstractmethod
    def load(
        self, directory: Path, config: ModelConfig, placement: InstancePlacement, parameters: Parameters
    ) -> Runtime:
        """Make one instance from a version's directory, ready to execute. Raises `CharoniaError` if the model cannot be
        loaded; `field` names a wrong parameter."""

    def uses_gpus(self) -> bool:
        """Whether its libraries were built for GPUs."""
        return False

    def needs(self, directory: Path, raw: RawConfig, parameters: Parameters) -> tuple[MemoryNeed, ...]:
        """The least memory of all instances, by the sizes of the model's files; one memory may occur several times.
        `raw` has a normalised `instance_group`."""
        return ()

    def complete(self, directory: Path, raw: RawConfig, parameters: Parameters) -> RawConfig:
        """Add the `input`, `output` and `max_batch_size` that `raw` lacks, from the model's file. Raises
        `CharoniaError` if they contradict it."""
        return raw

    def file_parameters(self, directory: Path, parameters: Parameters) -> Mapping[str, str]:
        """The parameters of a model that its files tell, whether or not its config is completed. Raises
        `CharoniaError` if they cannot be read."""
        return {}

    def interrupt_loads(self) -> None:
        """End the loads of a model that is unloaded, those to come among them, where they can be ended."""
        return

    def forget(self) -> None:
        """Drop what `complete` kept for a load that will not come."""
        return
