"""The responses of the hub's models, on their way to a worker."""

from ..core.gateway import ResponseStream
from ..core.request import InferResponse
from .hub_link import HubLink
from .messages import ModelAnswer, ResponseNotes, ResponsesEnded
from .open_requests import OpenCall, OpenRequest
from .tensors import TensorExchange


class ResponseSender:
    """Sends the responses to the calls of one worker."""

    def __init__(self, link: HubLink, exchange: TensorExchange) -> None:
        self._link, self._exchange = link, exchange

    def send(self, key: int, response: InferResponse, notes: ResponseNotes | None = None, last: bool = False) -> None:
        outputs = [self._exchange.message(tensor) for tensor in response.outputs]
        parameters = dict(response.parameters) if response.parameters else {}
        self._link.send(ModelAnswer(key, outputs, parameters, response.final, last, notes))

    async def send_only(self, key: int, responses: ResponseStream[InferResponse], opened: OpenRequest) -> None:
        """Send what a model answers that responds once: its response says that no other comes."""
        before: InferResponse | None = None
        async for response in responses:
            if before is not None:
                self.send(key, before, opened.notes())
            before = response
            if response.final:
                break
        if before is None:
            self._link.send(ResponsesEnded(key))
        else:
            self.send(key, before, opened.notes(), last=True)

    async def send_stream(
        self, key: int, responses: ResponseStream[InferResponse], opened: OpenRequest, call: OpenCall
    ) -> None:
        """Send response by response, no faster than they are read."""
        async for response in responses:
            await call.wait_for_reader()
            self.send(key, response, opened.notes())
        self._link.send(ResponsesEnded(key))
