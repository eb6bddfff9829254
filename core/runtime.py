"""The interface of a classic backend: one loaded copy of a model, and the loader that makes it.

Knows nothing of requests, batching and threads.
"""

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
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
"""Tensors by name, with the model's batch dimension first, if it has one. BYTES are object arrays of `bytes`; BF16, for
which numpy has no type, are uint16 arrays of its bits."""


class Resource(NamedTuple):
    """A resource that instances take turns at, by its name in lower case: on one device, or the server's own with
    None."""

    name: str
    device: int | None

    @property
    def place(self) -> str:
        return "global" if self.device is None else str(self.device)


class InstanceRate(NamedTuple):
    """What one instance asks for each execution: `resources` and how many of each. With priority 2 it runs half as
    often as with 1 while both wait."""

    resources: tuple[tuple[Resource, int], ...] = ()
    priority: int = 1


@dataclass(frozen=True, slots=True)
class InstancePlacement:
    """The device of one instance. `kind`: KIND_CPU, KIND_GPU or KIND_MODEL; `device`: the GPU, 0 without one; `number`:
    in its group; `name`: the instance's, as Triton makes it: `<model>_<group>_<number>`; a `passive` one gets no
    requests; `rate`: what it takes turns at, if it does."""

    kind: str = "KIND_CPU"
    device: int = 0
    number: int = 0
    name: str = ""
    passive: bool = False
    rate: InstanceRate | None = None

    @property
    def gpu(self) -> int | None:
        """The GPU that holds its weights; None for the host, and for a model that chooses itself."""
        return self.device if self.kind == "KIND_GPU" else None


class RuntimeProcess(Protocol):
    """The process of a runtime that has one of its own. `lost`: an execution found that it has ended; `sentinel`: a
    file descriptor that is readable once it has."""

    lost: bool

    @property
    def sentinel(self) -> int: ...


class RuntimeTraits(NamedTuple):
    """The abilities of a runtime that its scheduler must know.

    `inline`: an execution takes microseconds, so it may run in the event loop's thread. `ragged`: it takes ragged
    inputs, as one flat tensor unless it takes requests. `process`: its own; an instance that loses it is replaced.
    `interrupt`: makes the current execution fail for the reason given, from any thread, though the runtime may be lost
    with it; None where that is impossible. `unready_reason`: asks the model itself, in the event loop, why it is not
    ready; empty where it is, None where it has no such check.
    """

    inline: bool = False
    ragged: bool = False
    process: RuntimeProcess | None = None
    interrupt: Callable[[str], None] | None = None
    unready_reason: Callable[[], Awaitable[str]] | None = None


def only_response(responses: Iterable[Arrays]) -> Arrays:
    """The outputs of a model that is not decoupled. Raises `Internal` unless there is one response."""
    outputs = list(responses)
    if len(outputs) != 1:
        raise Internal(f"expected a single response, got {len(outputs)}")
    return outputs[0]


class RuntimeResponse(NamedTuple):
    """One response to a request: its outputs, and parameters for the client."""

    outputs: Arrays
    parameters: Mapping[str, ParameterValue] = {}


class Rescheduled(NamedTuple):
    """The answer to a request that the model wants to see again, in a later batch. `outputs`: of its sequence's
    states."""

    outputs: Arrays = {}


RuntimeAnswer: TypeAlias = RuntimeResponse | Exception | Rescheduled | None


@dataclass(slots=True, eq=False)
class RuntimeRequest:
    """One request as the client made it. One that is rescheduled comes again as the same object, with `inputs` and
    `flags` of its next execution.

    `inputs` as in `Runtime.execute`; `output_names`: those that the client wants, all of the model's if it named none,
    and those of its sequence's states. `correlation_id` and `flags` place it in its sequence, as in Triton's API;
    `timeout` is in microseconds. `respond`, called in the event loop, takes a response or an error, or None where only
    the end of the responses is told; then the last argument is true, as it may be with a response and is with an error.
    It takes a `Rescheduled` that did not come with the other answers, too. `cancelled`: nobody waits for it any more;
    `Runtime.cancel_request` tells it, unless that was before the runtime had the request.
    """

    inputs: Arrays
    output_names: Sequence[str]
    respond: Callable[[RuntimeAnswer, bool], None]
    context: RequestContext
    id: str = ""
    correlation_id: int | str = 0
    flags: int = 0
    timeout: int = 0
    priority: int = 0
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)
    cancelled: bool = False


Parameters: TypeAlias = Mapping[str, str]
"""A backend's, from `--backend-config`, overridden by the model's own."""


class Runtime:
    """One instance of a model. Blocking; called by the thread that loaded it or, if `inline`, by the event loop's. An
    exception that is no `CharoniaError` is the model's own failure; the instance is used again. One whose loader is
    `by_request` takes the requests of a batch as they are, and may answer them later; when its process ends, it tells
    that to all that have no last answer, rescheduled ones too."""

    traits = RuntimeTraits()

    def execute(self, inputs: Arrays, output_names: Sequence[str]) -> Iterator[Arrays]:
        """The outputs for a batch of inputs: exactly once or, of a decoupled model, any number of times. `inputs` are
        read-only, valid until the next execution, and lack optional inputs that were not given. Outputs beyond
        `output_names` are ignored. Closing the iterator early abandons the rest of the computation."""
        raise NotImplementedError

    def execute_requests(self, requests: Sequence[RuntimeRequest]) -> Sequence[RuntimeAnswer]:
        """An answer for each request; None for one that `respond` tells all answers of, before or after this returns.

        Raises what fails all requests that have no answer yet.
        """
        raise NotImplementedError

    def cancel_request(self, request: RuntimeRequest) -> None:
        """Nobody waits for the request any more; if it was rescheduled, it does not come again. Called in the event
        loop."""

    def hold_request(self, request: RuntimeRequest, held: bool) -> None:
        """Its responses wait for their reader: make no more of them until told otherwise. Called in the event loop."""

    def awaited_calls(self) -> Sequence[AwaitedCall]:
        """The requests to other models without whose answers the current execution does not go on. Called in the event
        loop."""
        return ()

    def close(self) -> None:
        """Free everything; the last call."""


class RuntimeLoader(Protocol):
    """One backend: makes the instances of its models. Imports its libraries when it is called. `by_request`: they take
    requests as they are."""

    by_request: bool = False

    @property
    def waits(self) -> WaitGraph | None:
        """Where its models are registered, if they may wait for others."""
        return None

    @abstractmethod
    def load(
        self, directory: Path, config: ModelConfig, placement: InstancePlacement, parameters: Parameters
    ) -> Runtime:
        """One instance, ready to execute. `directory`: of the model's version. Raises `CharoniaError` if the model
        cannot be loaded; `field` names a wrong parameter."""

    def uses_gpus(self) -> bool:
        """Whether its libraries were built for GPUs."""
        return False

    def needs(self, directory: Path, raw: RawConfig, parameters: Parameters) -> tuple[MemoryNeed, ...]:
        """The least memory of all instances, by the sizes of the model's files; one memory may occur several times.
        `raw`: the config with a normalised `instance_group`."""
        return ()

    def complete(self, directory: Path, raw: RawConfig, parameters: Parameters) -> RawConfig:
        """`raw` with the `input`, `output` and `max_batch_size` that it lacks, from the model's file. Raises
        `CharoniaError` if it contradicts the model."""
        return raw

    def forget(self) -> None:
        """Drop what `complete` has kept for a load: there will be none."""
        return
