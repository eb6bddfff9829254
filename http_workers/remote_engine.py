"""The engine of a language model as a worker has it: the hub's, over the link. Token ids in, token ids out."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.errors import SentError
from ..core.request import GenerateRequest
from ..core.tensor import NUMPY_TYPES, Tensor
from ..engine.client.admission import AdmissionControl, QueueLimits, QueueTicket
from ..engine.client.engine import EngineCapabilities
from ..engine.client.sequence_stats import SequenceStats
from ..engine.client.token_stream import TokenStream
from ..engine.core.messages import AddRequest, CoreReady
from ..telemetry.llm_metrics import EngineState
from .hub_connection import HubConnection
from .sequence_messages import AbortSequence, CancelRequests, LoraTaskMessage, SubmitSequence
from .tensors import SentTensor

_NOBODY_WAITS = AdmissionControl(QueueLimits(sys.maxsize, sys.maxsize))


@dataclass(slots=True, eq=False)
class RemoteTicket(QueueTicket):
    """A sequence that the hub is to admit, with the request that it is for."""

    generation: GenerateRequest | None = None

    def release(self, started: bool = False) -> None:
        """Forget the place: the hub counts who waits."""
        self.held = False


class RemoteEngine:
    """An `Engine`, and a `SharedEngine`: that of the hub's loaded model `model`, for the sequences of one request,
    whose key is `request`; `refusal`: why none of them may begin."""

    def __init__(
        self,
        hub: HubConnection,
        model: int,
        info: CoreReady,
        request: int = 0,
        refusal: SentError | None = None,
    ) -> None:
        self._hub = hub
        self._model = model
        self._info = info
        self._request, self._refusal = request, refusal

    def for_request(self, key: int, refusal: SentError | None) -> "RemoteEngine":
        return RemoteEngine(self._hub, self._model, self._info, key, refusal)

    @property
    def ready(self) -> bool:
        return True

    @property
    def kv_tokens(self) -> tuple[int, int]:
        return 0, 0

    @property
    def admission(self) -> AdmissionControl:
        return _NOBODY_WAITS

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(shared=self)

    def state(self) -> EngineState:
        return EngineState()

    async def start(self) -> CoreReady:
        return self._info

    async def close(self) -> None:
        """Do nothing: the engine is the hub's."""

    def admit(self, request: GenerateRequest, tenant: str = "") -> QueueTicket:
        """The hub has admitted or refused a request's sequences when the model was acquired. Those that it did not know
        of it may refuse when they are submitted: `TokenStream.read` raises what it says."""
        if self._refusal is not None:
            raise self._refusal.error()
        return RemoteTicket(_NOBODY_WAITS, tenant, request.choice_count, generation=request)

    @contextmanager
    def open_stream(
        self, add: AddRequest, stats: SequenceStats | None = None, ticket: QueueTicket | None = None
    ) -> Iterator[TokenStream]:
        assert isinstance(ticket, RemoteTicket)
        assert ticket.generation is not None
        assert stats is not None
        generation = ticket.generation
        key = self._hub.next_key()
        stats.time_left(add.timeout)
        stats.record_submission(len(add.spec.prompt))
        stream = TokenStream(stats, ticket, add.spec.priority)
        self._hub.streams.add(key, stream)
        wanted = generation.sampling.max_tokens != 0
        task = generation.lora_task
        counts = generation.choice, generation.choice_count, generation.prompt_count
        lora = None if task is None else LoraTaskMessage(task.number, _array(task.weights), _array(task.config))
        self._hub.send(SubmitSequence(key, self._request, add, stats.opened, wanted, *counts, lora))
        try:
            yield stream
        finally:
            self._hub.streams.remove(key)
            if not stream.ended:
                self._hub.send(AbortSequence(key))

    def cancel_elsewhere(self, request_id: str) -> None:
        self._hub.send(CancelRequests(self._model, request_id))


def _array(data: NDArray[Any] | None) -> SentTensor | None:
    if data is None:
        return None
    datatype = next(name for name, dtype in NUMPY_TYPES.items() if np.dtype(dtype) == data.dtype)
    return SentTensor.of(Tensor("", datatype, data.shape, data))
