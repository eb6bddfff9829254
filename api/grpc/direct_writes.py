"""What is written to one ModelStreamInfer: one message after the other, and without a task for those that a model makes
while nothing else is being written."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from tritonclient.grpc import service_pb2 as pb

from ...core.direct_stream import DirectStream, TextSink
from ...core.logprobs import TokenLogprob
from ...core.model import ModelConfig
from ...core.request import InferResponse
from .. import raw_tensors
from ..http.eager import run_without_task
from ..infer_call import InferCall, RequestedOutput
from .messages import FINAL, write_response
from .settings import RpcContext
from .wire_format import ProtoMessage, delimited

_TEXT = "text_output"
_MOST_TEXT = 4096
"""Characters of a text whose message is made of bytes alone."""
INFER_RESPONSE = pb.ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER
_CONTENTS = pb.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER


class StreamWrites:
    """The writes of one call. Those of `write` wait for their turn; a direct one begins at once, or not at all: unread
    tokens merge meanwhile."""

    def __init__(self, context: RpcContext) -> None:
        self._context = context
        self._turns = asyncio.Lock()
        self._begun = False
        self._error: BaseException | None = None
        """The direct write that has begun ended with it: nothing more is written."""
        self._ended: asyncio.Future[None] | None = None
        """What waits for the end of the direct write that has begun."""

    async def write(self, message: ProtoMessage | bytes) -> None:
        """Write a message when those before it are written. Raises `CancelledError` if the client has left."""
        async with self._turns:
            if self._begun:
                self._ended = asyncio.get_running_loop().create_future()
                await self._ended
            try:
                if self._error is not None:
                    raise self._error
                await self._context.write(message)
            except grpc.aio.BaseError:
                # The client left, and the cancellation of this call is on its way.
                raise asyncio.CancelledError from None

    @contextmanager
    def direct(
        self, responses: DirectStream[InferResponse], config: ModelConfig, call: InferCall, limit: int
    ) -> Iterator[None]:
        """Within the block the responses in the middle of a stream are written where they are made. `limit`: see
        `ResponseSize`."""

        def take(response: InferResponse) -> bool:
            if self._busy or call.writes_to_gpu or any(map(raw_tensors.is_long, response.outputs)):
                return False
            self._begin(delimited(INFER_RESPONSE, write_response(config, call, response, False, limit)))
            return True

        responses.sink = take
        if call.outputs.get(_TEXT, call.default_output) == RequestedOutput() and limit >= 4 * _MOST_TEXT:
            responses.text_sink = self._text_sink(config, call)
        try:
            yield
        finally:
            responses.sink = responses.text_sink = None

    def _text_sink(self, config: ModelConfig, call: InferCall) -> TextSink:
        message = pb.ModelInferResponse(model_name=config.name, model_version=config.version, id=call.request.id)
        message.outputs.add(name=_TEXT, datatype="BYTES", shape=(1,))
        message.parameters[FINAL].bool_param = False
        before = message.SerializeToString()  # all but the text is the same in each message

        def take(text: str, tokens: int, logprob: TokenLogprob | None) -> bool:
            if not text:
                return True
            if self._busy or len(text) > _MOST_TEXT:
                return False
            data = text.encode()
            contents = delimited(_CONTENTS, len(data).to_bytes(4, "little") + data)
            self._begin(delimited(INFER_RESPONSE, before + contents))
            return True

        return take

    @property
    def _busy(self) -> bool:
        return self._begun or self._error is not None or self._turns.locked()

    def _begin(self, message: bytes) -> None:
        self._begun = True
        # A task for each would cost as much as the write.
        run_without_task(self._context.write(message), self._on_written)

    def _on_written(self, error: BaseException | None) -> None:
        self._begun = False
        self._error = None if error is None else error.with_traceback(None)  # its frames hold this object
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)
